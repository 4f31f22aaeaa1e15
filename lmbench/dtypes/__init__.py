"""The dtype of every tensor of a step, and the reason for it: recorded in a probe step, shown by `lmbench dtypes`."""
