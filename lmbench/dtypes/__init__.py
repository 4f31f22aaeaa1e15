"""Which dtype every tensor of a step has, and why: recorded on a probe step, shown by `lmbench dtypes`."""
