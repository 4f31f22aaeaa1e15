"""What W&B costs after a run is closed: `python tests/experiments/wandb_costs.py [ROUNDS]`.

A result's offline run, for 1, 100 and 10 000 steps, by the process that writes it; its start-up is in it. (During the
run nothing of wandb is imported: `test_wandb_fit.py` checks that.)
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from runs import write_result

from lmbench.wandb.publish import write

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for steps in (1, 100, 10_000):
            times_s = []
            for _ in range(int(sys.argv[1]) if sys.argv[1:] else 5):
                result = write_result(Path(scratch), steps)
                begun = time.perf_counter()
                write([result], 600)
                times_s.append(time.perf_counter() - begun)
            (file,) = result.glob("wandb/offline-run-*/*.wandb")
            spread = f"{min(times_s):.2f} to {max(times_s):.2f}"
            print(f"{steps:6} steps: {statistics.median(times_s):.2f} s ({spread}), {file.stat().st_size / 1e6:.2f} MB")
