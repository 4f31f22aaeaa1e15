"""A training step on fake tensors: every allocation of it, as a GPU would make it, without a GPU and without weights.

Fake tensors have shapes and storages and no bytes. They are on the device `cpu`, since without a GPU a fake tensor on
`cuda` ends the process at its first gradient (torch 2.13), and so what CUDA does otherwise than a CPU is arranged here.
That is for the whole process: import this in one of its own.
"""
