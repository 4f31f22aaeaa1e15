"""The Transformer that lmbench measures by default, and its LightningModule."""
