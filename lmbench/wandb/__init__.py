"""W&B's copy of a result: written after the measurement, from the result folder, by a process of its own."""
