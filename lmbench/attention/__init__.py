"""Attention by itself, in a report: its rates, how it grows with length, and what a lack of memory was for."""
