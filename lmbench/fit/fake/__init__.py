"""A training on fake tensors, by which memory is predicted: its steps, its ranks, and what is noted of them."""
