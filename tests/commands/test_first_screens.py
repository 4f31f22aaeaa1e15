"""What a user sees first, against golden files that were read and found right once.

That `fit` prints what `show` does
is in tests/report/test_run.py; the first screens of `kernels` and of a recorded `memory` are in
tests/kernels/test_answer.py and tests/memory/test_recorded.py.
"""

from __future__ import annotations

import re
import shutil

import warm_server
from comparison_runs import make_runs, make_sides
from paths import RUNS
from tables import cases, rows

from lmbench.sweep.execute import Execution

from conftest import check_golden

SCREENS = dict(
    rows("""
alone | -
show | show results/h200
cpu | show cpu
list | list
compare | compare results/a results/b
sweep | sweep tiny_step_times --dry_run --model.num_heads 2
noise | noise repeats
memory | memory smoke --gpu H200 --model.num_layers 1 --data.context_length 1024
""")
)


def leave_out_check():
    """Let a sweep's options be what they are: servers for the check would import PyTorch."""
    Execution.check = lambda *_: None


def screen(name, folder):
    """The standard output of a command in a folder with results."""
    make_sides(folder / "results")
    make_runs(folder / "repeats", [0.0500, 0.0502, 0.0499, 0.0501, 0.0498, 0.0500])
    for run, place in (("h200", folder / "results" / "h200"), ("cpu", folder / "cpu")):
        place.mkdir()
        shutil.copy(RUNS / f"{run}_run.json", place / "run.json")
    before = leave_out_check if name == "sweep" else None
    done = warm_server.run(*SCREENS[name].split(), folder=folder, before=before)
    return re.sub(r"in \d+ s,", "in # s,", done.stdout.replace(str(folder.resolve()), "FOLDER"))


@cases("name", *SCREENS)
def test_the_first_screen_of_a_command_is_the_golden_file(name, tmp_path):
    check_golden(f"screen_{name}.txt", screen(name, tmp_path))
