"""W&B's copy of a result: a separate process writes it from the result folder after the measurement."""
