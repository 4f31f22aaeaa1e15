"""Runs the cells of a sweep. Each run has a fresh process, and leaves a row whatever happens."""
