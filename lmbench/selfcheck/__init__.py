"""Checks of the harness on the user's own machine: planted truths that a measurement must bring back."""
