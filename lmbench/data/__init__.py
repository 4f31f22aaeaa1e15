"""Random tokens and real text behind one LightningDataModule."""
