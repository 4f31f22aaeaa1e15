"""Parts that several tests share: a quiet Trainer and what it measures, and surroundings that are put back."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial

# Before torch looks: with more threads, OpenMP's spinning on a busy two-core machine makes these small tests ten times
# slower. What the tests start inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On a busy machine lmbench would choose this itself, and say so in a line.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Sweeps that tests begin are none of the user's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="lmbench-tests-")

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from paths import GOLDEN
from runs import make_sweep
from slurm import slurm_of_this_machine
from strangers import Sleeper, SlowBatches
from wandb_loopback import PLANTED_KEY, closed_port_url
from warm_servers import warm_servers

from lmbench.callbacks import MeasurementSession, PhaseTimer
from lmbench.cli import main
from lmbench.instruments.training import total_norm
from lmbench.instruments.window import Schedule
from lmbench.records.vocabulary import PHASES
from lmbench.sweep.environments import HERE

torch.set_num_threads(1)

# A shell's background job ignores Ctrl-C and `nohup` hang-ups; what the tests start would inherit that.
for _signum, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _default)


#: Files with tests that take long. One that began last would leave the other workers idle.
LONG = ["test_slurm.py", "test_tune.py", "test_guide.py", "test_overhead.py", "test_study.py", "test_wheel.py"]


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_runtest_setup():
    # A window begins with full collections; of all that was imported until now they would take most of a short test.
    if len(gc.get_objects(generation=2)) > 20_000:
        gc.collect()
        gc.freeze()


QUIET = {
    "accelerator": "cpu",
    "max_epochs": -1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def measure(module, *callbacks, schedule=None, loader=None, val=None, **flags):
    """The window's steps of a training, each the sum of its phases, and the session that measured them."""
    timer, session = PhaseTimer(), MeasurementSession(schedule or Schedule(warmup_steps=2, steps=8))
    quiet_trainer(timer, session, *callbacks, **flags).fit(module, loader or SlowBatches(), val)
    for record in timer.records:
        assert math.fsum(getattr(record, f"{phase}_s") or 0.0 for phase in PHASES) == pytest.approx(record.step_s)
    return [record for record in timer.records if record.stage == "window"], session


def assert_slept(window, **slept):
    """Phases last as long as was really slept in them, in so many sleeps a step as there are.

    No step may have less than its sleeps. What a step has beyond them is the phase's own work, and on a busy machine
    others' turns between the end of a sleep and the phase's, of which a quarter of the steps has few. Another phase's
    sleep would make a ratio of 1.3 or more in each step.
    """
    for phase, sleeps_s in slept.items():
        each = len(sleeps_s) // (window[-1].step + 1)
        slept_s = np.reshape(sleeps_s[-each * len(window) :], (-1, each)).sum(axis=1)
        ratios = [getattr(record, f"{phase}_s") for record in window] / slept_s
        assert (ratios.min() >= 1, np.quantile(ratios, 0.25) < 1.25) == (True, True), phase


def check_golden(name, text):
    """Hold a text against a file of tests/data/golden, which was read and found right once.

    `WRITE_GOLDEN=1 python -m pytest tests -k golden` writes the files anew; read the difference before you keep it.
    """
    if "WRITE_GOLDEN" in os.environ:
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def quiet_trainer(*callbacks, **flags):
    return Trainer(callbacks=list(callbacks), **{**QUIET, **flags})


def free_device():
    """Give back what earlier tests left on the GPU: compiled graphs, objects in cycles, workspaces, cached blocks."""
    if not torch.cuda.is_initialized():
        return
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module", autouse=True)
def _free_device_of_other_modules():
    """Before the runs that a module's tests share."""
    free_device()


@pytest.fixture(autouse=True)
def _free_device_of_other_tests(request):
    """What is measured on a GPU must not depend on the tests before."""
    if request.node.get_closest_marker("gpu"):
        free_device()


@pytest.fixture(autouse=True)
def _idle_cores(monkeypatch):
    """The load of other tests makes no window of a comparison longer."""
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 0.0)


@pytest.fixture(autouse=True)
def _secrets_of_other_tests_are_unknown(monkeypatch):
    """What one test has planted as a secret may be a word of another one's."""
    monkeypatch.setattr("lmbench.masking._secrets", set())


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch):
    """A copy for W&B takes a second a run; the tests of it turn it on again."""
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.fixture(scope="session")
def _warm_server():
    """A server whose forks are runs of any test's sweep: what importing costs is paid once."""
    with warm_servers() as executor:
        executor.await_ready([HERE])
        yield executor


@pytest.fixture
def warm_sweeps(_warm_server, monkeypatch):
    """Sweeps of this process take their runs from the server."""
    monkeypatch.setattr("lmbench.campaign.sweep.LocalExecutor", lambda mark: _warm_server)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The test's folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def printed(capsys):
    """What a command that ends well prints on standard output."""

    def run(*words):
        assert main([*map(str, words)]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def answered(printed):
    """The answer of a command that ends well, as its JSON has it."""
    return lambda *words: json.loads(printed(*words, "--json"))


@pytest.fixture
def refused(capsys):
    """What a command prints on standard error that refuses its words, or ends with another exit code."""

    def run(*words, code=2):
        assert main([*map(str, words)]) == code
        return capsys.readouterr().err

    return run


@pytest.fixture
def swept(tmp_path):
    """Makes the folder of a sweep called `s`; the arguments are those of `make_sweep`."""
    return partial(make_sweep, tmp_path / "s")


@pytest.fixture
def no_account(tmp_path, monkeypatch):
    """W&B without an account or settings of the user's own; its servers are out of reach."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", closed_port_url())
    for name in ("WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def planted_key(no_account, monkeypatch):
    """The same with a key."""
    monkeypatch.setenv("WANDB_API_KEY", PLANTED_KEY)


@pytest.fixture
def small_disk(tmp_path):
    """Makes a folder of tmp_path a disk of its own, a tmpfs of so many KiB."""
    mounted = []

    def put(size_kib, name="results"):
        disk = tmp_path / name
        disk.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(disk)]
        if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(command, check=False).returncode:
            pytest.skip("mounting a small tmpfs needs root; tests with a limit on file sizes do not")
        mounted.append(disk)
        return disk

    yield put
    for disk in mounted:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="session")
def slurm():
    """A SLURM of this machine; see its class."""
    with slurm_of_this_machine() as slurm:
        yield slurm


@pytest.fixture
def sleeper():
    torch.manual_seed(0)
    return Sleeper()


@pytest.fixture
def seen_norms(sleeper):
    """The norms that the module itself sees before each optimizer step."""
    norms = []
    sleeper.on_before_optimizer_step = lambda _: norms.append(float(total_norm([p.grad for p in sleeper.parameters()])))
    return norms
