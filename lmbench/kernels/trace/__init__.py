"""Profiler file -> kernels -> kinds, parts of the model, phases. Nothing here imports torch."""
