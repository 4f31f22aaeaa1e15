"""Where the memory goes: what a peak is made of, predicted before a run and read from what was recorded of one."""
