"""Configurations that ship with lmbench; `--config NAME` finds them by name."""
