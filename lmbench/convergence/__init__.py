"""Whether a faster configuration still trains: curves of runs with the same start, compared with a baseline."""
