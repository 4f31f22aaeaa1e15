"""Runs the cells of a sweep: each in a process of its own, each ending as a row, whatever happens."""
