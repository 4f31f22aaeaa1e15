"""W&B as a mirror of results: written after the measurement, from the result folder, by a process of its own."""
