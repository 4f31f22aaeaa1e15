"""What PyTorch does on this device: sums, and where operators begin to fail."""
