"""Whose code a file is, and the frame to name for what happened in a Trainer."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from traceback import FrameSummary

import lightning.pytorch
import torch
from tables import cases

import lmbench
import lmbench.callbacks
import lmbench.configs
from lmbench.code_owners import code_owner, recorded_folders, responsible_frame

PACKAGE = Path(lmbench.__file__).parent
BESIDE = {"callbacks": Path(lmbench.callbacks.__file__).parent, "configs": Path(lmbench.configs.__file__).parent}
#: Every file of lmbench's tree as a checkout has them.
TREE = sorted(
    {f"lmbench/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py") if path.parent not in BESIDE.values()}
    | {f"{name}/{path.name}" for name, folder in BESIDE.items() for path in folder.glob("*.py")}
)
FOLDERS = sorted({part for file in TREE for part in Path(file).parts[:-1]})
#: Folders of a user's project.
USUAL = [*FOLDERS, "torch", "lightning", "lib", "my_project"]
REPORT = """
import json, sys
from lmbench.code_owners import code_owner
print(json.dumps({file: code_owner(file) for file in json.load(sys.stdin)}))
"""


def laid_out(root, is_installed):
    """An lmbench of empty files; returns all of them."""
    files = [root / (file if file.startswith("lmbench/") or not is_installed else f"lmbench/{file}") for file in TREE]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for name in ("__init__.py", "code_owners.py", "version.py"):
        (root / "lmbench" / name).write_text((PACKAGE / name).read_text())
    return [str(file) for file in files]


def recorded_owners(files):
    """The owners of files of which only a recording of another machine tells."""
    folders = recorded_folders(files)
    return {file: code_owner(file, folders) for file in files}


@cases("""
- [place, is_installed]
- [lmbench, false]
- [another-name, false]
- [lib/python3.12/site-packages, true]
""")
def test_every_file_of_lmbench_is_its_own_and_a_users_in_folders_of_these_names_are_not(place, is_installed, tmp_path):
    own = laid_out(tmp_path / place, is_installed)
    users = [f"{tmp_path}/home/{folder}/{file}" for folder in USUAL for file in ("train.py", "src/net.py")]
    if not is_installed:
        # A script in the checkout, and one below a folder like it.
        users += [f"{tmp_path}/{place}/train.py", f"{tmp_path}/{place}/tests/lmbench/test_me.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / place)}
    command = [sys.executable, "-c", REPORT]
    told = subprocess.check_output(command, input=json.dumps(own + users), cwd=tmp_path, env=environment, text=True)
    expected = dict.fromkeys(own, "lmbench") | dict.fromkeys(users, "user")
    assert json.loads(told) == expected
    assert recorded_owners(own + users) == expected


def test_a_users_own_callback_of_the_same_name_is_the_users_in_a_recording_without_lmbench():
    files = {"/home/me/lmbench/callbacks/session.py", "/home/me/lmbench/model/attention.py", "/home/me/lmbench/cli.py"}
    assert set(recorded_owners(files).values()) == {"user"}


SITE = "/venv/lib/python3.12/site-packages"


@cases(rf"""
file | owner
{SITE}/torch/nn/functional.py | pytorch
{SITE}/lightning/pytorch/trainer/trainer.py | lightning
{SITE}/einops/einops.py | library
{SITE}/transformers/trainer.py | user
{SITE}/my_package/torch/net.py | user
/usr/lib/python3/dist-packages/torch/functional.py | pytorch
/home/me/pytorch/torch/functional.py | pytorch
/home/me/pytorch/train.py | user
/home/me/job-link-tree/torch/functional.py | pytorch
/usr/lib/python3.12/threading.py | python
C:\Users\me\anaconda3\lib\contextlib.py | python
C:\Users\me\anaconda3\lib\site-packages\torch\functional.py | pytorch
D:\work\lib\queue.py | user
<frozen runpy> | python
<stdin> | user
/venv/bin/lmbench | lmbench
/venv/bin/torchrun | pytorch
/home/me/bin/train | user
/cache/ab/cab{"x" * 49}.py | pytorch
/cache/ab/cab.py | user
""")
def test_paths_alone_tell_the_owner_of_a_foreign_file(file, owner):
    assert recorded_owners([file]) == {file: owner}


SCRIPT, USER, USERS_CLI = "/home/me/lmbench/train.py", "/home/me/callbacks/net.py", "/home/me/torch/cli.py"
LIGHTNING = Path(lightning.pytorch.__file__).parent
CLI, TRAINER, LOOP = (
    str(LIGHTNING / file) for file in ("cli.py", "trainer/trainer.py", "loops/training_epoch_loop.py")
)
TORCH = str(Path(torch.__file__).parent / "nn" / "modules" / "linear.py")
RUN, NORM = str(PACKAGE / "fit" / "measurement.py"), str(BESIDE["callbacks"] / "gradient_norm.py")


@cases(f"""
stack | named
# The outermost frame first.
{SCRIPT} {TRAINER} {LOOP} {USER} {TORCH} | {USER}
{SCRIPT} {TRAINER} {LOOP} {USER} {LOOP} {TORCH} {contextlib.__file__} | {USER}
# Lightning's check for SIGTERM: no line of the user's around the Trainer, nor of lmbench's, asks for it.
{SCRIPT} {RUN} {TRAINER} {LOOP} {TORCH} | {LOOP}
{SCRIPT} {CLI} {USERS_CLI} {TRAINER} {LOOP} {TORCH} | {LOOP}
{SCRIPT} {RUN} {TRAINER} {LOOP} {NORM} {TORCH} | {NORM}
# Threads have a stack of their own, as autograd's has.
{USER} {TORCH} | {USER}
{contextlib.__file__} {TORCH} {contextlib.__file__} | {TORCH}
{contextlib.__file__} | {contextlib.__file__}
""")
def test_the_innermost_frame_of_the_user_in_the_trainer_is_named_or_lightnings(stack, named):
    frame = responsible_frame([FrameSummary(file, 1, "call", lookup_line=False) for file in stack.split()])
    assert frame.filename == named
