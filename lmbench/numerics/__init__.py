"""What 16-bit arithmetic does to sums and norms: worked out exactly, and found by experiment."""
