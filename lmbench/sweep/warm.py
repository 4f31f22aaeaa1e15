"""What every `lmbench fit` does first, done once: imported by the server that a sweep's processes are forked from.

Nothing here may touch the GPU: a CUDA context does not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io

# By name: this package lies below the one that measures, and a sweep itself needs no torch.
importlib.import_module("lmbench.fit.run")
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    # Builds the parsers: what is looked up for that in signatures and docstrings stays in caches, 0.5 s worth.
    importlib.import_module("lmbench.cli").main(["fit", "--print_config"])
# A child's collector would otherwise walk over all of it, and so copy it.
gc.collect()
gc.freeze()
