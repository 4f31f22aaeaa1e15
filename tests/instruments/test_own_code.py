"""The user's lines of a traceback, as opposed to those of Python, lmbench and the libraries that lmbench uses."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch
import pynvml
import torch
from tables import cases

import lmbench
from lmbench.instruments.ending import is_lmbench_failure, user_lines, user_traceback

MINE = "/home/me/project/my_module.py"
#: An installed package of the user's, in the same folder as libraries of a single file, such as pynvml.
PACKAGE = str(Path(pynvml.__file__).parent / "my_package" / "net.py")
LIGHTNING = str(Path(lightning.pytorch.__file__).parent / "loops" / "fit_loop.py")
TORCH = str(Path(torch.__file__).parent / "nn" / "modules" / "linear.py")
LMBENCH = str(Path(lmbench.__file__).parent / "fit" / "modes.py")


def raised(*files, message="planted"):
    """An exception that came through functions in these files, the last one raising it."""
    source = "def call(rest):\n    if rest:\n        return rest[0](rest[1:])\n    raise ValueError(message)\n"
    calls = []
    for file in files:
        namespace = {"message": message}
        exec(compile(source, file, "exec"), namespace)
        calls.append(namespace["call"])
    try:
        calls[0](calls[1:])
    except ValueError as error:
        # Remove this function's frame.
        return error.with_traceback(error.__traceback__.tb_next)


@cases(f"""
files | shown
{LIGHTNING} {MINE} {TORCH} | {MINE}
{LIGHTNING} {MINE} {TORCH} {MINE} {TORCH} | {MINE} {MINE}
{LIGHTNING} {PACKAGE} {TORCH} | {PACKAGE}
{LIGHTNING} {MINE} {PACKAGE} | {MINE}
# A notebook's cell, a string, compiled code, a traced graph.
{LIGHTNING} /tmp/ipykernel_7/1.py | /tmp/ipykernel_7/1.py
{LIGHTNING} <string> | <string>
{LIGHTNING} {LMBENCH} /tmp/torchinductor_me/ab/cab.py | -
{LIGHTNING} {LMBENCH} <eval_with_key>.7 | -
{LIGHTNING} {json.__file__} | -
{LIGHTNING} {LMBENCH} {TORCH} | -
""")
def test_only_the_users_lines_are_shown(files, shown):
    error = raised(*files.split())
    assert [line.filename for line in user_lines(error)] == shown.split()
    assert user_traceback(error) is not None or not shown


def test_what_lightning_calls_of_lmbench_and_fails_is_lmbenchs_own():
    assert is_lmbench_failure(raised(LIGHTNING, LMBENCH, TORCH))
    # Lightning's step runs inside lmbench's, and PyTorch refuses a value of the module.
    assert not is_lmbench_failure(raised(LIGHTNING, LMBENCH, LIGHTNING, TORCH))
