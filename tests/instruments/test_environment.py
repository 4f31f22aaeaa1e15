"""Environment, host and device state: complete, true, and without secrets."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import msgspec
import pytest
import torch
from fit_process import measure_here, statuses
from repository import git
from strangers import OwnLoaders
from tables import cases, stored

from lmbench.device import device_of
from lmbench.device.nvml import NvmlSensor
from lmbench.device.sensor import derive_device_state, other_processes
from lmbench.instruments.environment import capture_environment, git_state, torch_flags
from lmbench.instruments.host import kernel_launch_s, peak_rss_bytes
from lmbench.records.codec import as_dict
from lmbench.records.measured import DeviceReading
from lmbench.records.run import GpuFacts, Revision, RunEnvironment

CPU = torch.device("cpu")
SECRETS = "CUDA_SECRET_TOKEN TORCH_password NCCL_Credentials OMP_SECRET HF_TOKEN MY_CUDA_X"
LISTED = "CUDA_LAUNCH_BLOCKING MKL_NUM_THREADS NCCL_DEBUG OMP_NUM_THREADS PYTORCH_ALLOC_CONF"


def test_the_environment_fits_its_schema_and_has_the_listed_variables_but_no_secret(monkeypatch):
    planted = {"PATH": os.defpath, **dict.fromkeys(SECRETS.split(), "hunter2-planted")}
    planted |= dict.fromkeys(LISTED.split(), "1")
    monkeypatch.setattr(os, "environ", planted)
    before = torch.get_rng_state()
    captured = capture_environment(CPU)
    assert torch.equal(torch.get_rng_state(), before)
    host = captured.host
    assert (1e-9 < host.python_iteration_s < 1e-6, 1e-7 < host.kernel_launch_s < 1e-3) == (True, True)
    text = json.dumps(as_dict(captured), allow_nan=False)
    assert msgspec.convert(json.loads(text), RunEnvironment) == captured
    assert "hunter2" not in text
    assert list(captured.variables) == LISTED.split()
    assert captured.versions.python == platform.python_version()
    for package in ("torch", "lightning"):
        # A build's own version has its CUDA, too: 2.11.0+cu130.
        assert getattr(captured.versions, package).partition("+")[0] == metadata.version(package).partition("+")[0]


def flags_of_switches():
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    switched = torch_flags()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    return switched, torch_flags()


def test_flags_follow_torchs_switches_and_those_that_it_refuses_to_read_are_null():
    # Use another process, because the new TF32 setting makes the old ones unreadable for good.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        switched, refused = pool.apply(flags_of_switches)
    flags = switched.float32_matmul_precision, switched.deterministic_algorithms, switched.anomaly_mode
    assert flags == ("high", True, True)
    assert (refused.float32_matmul_precision, refused.cudnn_benchmark) == (None, False)


@cases("""
- [batch, changed, status]
- [0, [], pass]
- [2, [thread_count 1 -> 2], warn]
""")
def test_switches_that_change_within_the_window_are_told(batch, changed, status):
    class Switching(OwnLoaders):
        def on_train_batch_start(self, _, batch_idx):
            if batch_idx == batch:
                torch.set_num_threads(2)

    try:
        run = measure_here(Switching()).record
    finally:
        torch.set_num_threads(1)
    assert (run.window.changed_flags, statuses(run)["flags"]) == (changed, status)
    assert run.environment.flags.thread_count == 2


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder with one commit, and its hash."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "code.py").write_text("a = 1\n")
    for line in ("init -q", "add code.py", "commit -qm one"):
        git(*line.split(), folder=tmp_path)
    return tmp_path, git("rev-parse", "HEAD", folder=tmp_path)


def test_a_commit_is_dirty_once_a_tracked_file_changes(repository):
    path, commit = repository
    (path / "results.json").write_text("{}")
    assert git_state(path) == Revision(commit, False)
    (path / "code.py").write_text("a = 2\n")
    edited = git_state(path)
    assert (edited.commit, edited.is_dirty) == (commit, True)
    assert edited == git_state(path)
    (path / "code.py").write_bytes(b"# caf\xe9\n")
    assert git_state(path) not in (edited, Revision(commit, True))
    # A package that is installed below a project is not part of the project's commit.
    site = path / ".venv" / "site-packages" / "lmbench"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("")
    assert git_state(site, holds="__init__.py") == Revision()
    assert git_state(path, holds="code.py").commit == commit


def test_peak_memory_is_this_processs_own_not_its_parents():
    code = "from lmbench.instruments.host import peak_rss_bytes; print(peak_rss_bytes())"
    ballast = bytearray(b"x") * 900_000_000
    childs = int(subprocess.check_output([sys.executable, "-c", code]))
    assert childs < 600_000_000 < len(ballast) < peak_rss_bytes()


READINGS = stored("device_readings")


@cases("opened | closed | wall_s | changes", *READINGS["cases"])
def test_power_energy_caps_and_clock_follow_from_two_readings(opened, closed, wall_s, changes):
    readings = DeviceReading(**READINGS["opened"] | opened), DeviceReading(**READINGS["closed"] | closed)
    state, expected = derive_device_state(*readings, wall_s), READINGS["state"] | changes
    assert {name: getattr(state, name) for name in expected} == pytest.approx(expected)


@cases(f"""
- [pids, has_context, named, count]
- [[{os.getpid()}], true, [], 0]
- [[{os.getpid()}, 7, 5], true, [5, 7], 2]
- [[7], false, [7], 1]
- [[], false, [], 0]
# A container with other process ids, hidden processes, an unsupported query.
- [[90001, 90002], true, null, 1]
- [[], true, null, null]
- [null, true, null, null]
""")
def test_other_processes_are_named_counted_or_unknown(pids, has_context, named, count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_context)
    assert other_processes(pids) == (named, count)


def test_what_a_card_supports_is_in_si_units_and_the_rest_is_null():
    sensor = NvmlSensor(GpuFacts(uuid="GPU-none", pci_bus_id="none"))
    sensor._gpu = GpuFacts()
    # This card has no energy counter, no thermal violation times and no MIG.
    power = SimpleNamespace(violationTime=2_500_000_000, referenceTime=0)
    sensor._handle = "handle"
    sensor._library = SimpleNamespace(
        NVMLError=KeyError, NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0, NVML_PERF_POLICY_POWER=0,
        NVML_PERF_POLICY_THERMAL=1, nvmlDeviceGetName=lambda handle: "Small Card",
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 450_000,
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 2520}[kind],
        nvmlSystemGetDriverVersion=lambda: "600.1",
        nvmlDeviceGetViolationStatus=lambda handle, policy: {0: power}[policy],
    )  # fmt: skip
    reading = sensor.read()
    assert sensor.facts() == GpuFacts(name="Small Card", power_limit_w=450.0)
    assert sensor.driver() == "600.1"
    assert reading == DeviceReading(
        read_at_s=reading.read_at_s, sm_clock_hz=2.52e9, power_capped_s=2.5
    )  # fmt: skip


@pytest.mark.gpu
def test_a_real_gpu_tells_what_the_reports_need():
    device = torch.device("cuda", 0)
    sensor = device_of(device).sensor()
    facts, opened = sensor.facts(), sensor.read()
    assert facts.name == torch.cuda.get_device_name(device)
    assert facts.memory_total_bytes >= torch.cuda.get_device_properties(device).total_memory
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    while (closed := sensor.read()).read_at_s < opened.read_at_s + 2.0:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
    derived = derive_device_state(opened, closed)
    assert 0.5 * closed.power_w < derived.mean_power_w < 1.1 * facts.power_limit_w
    assert 0.0 <= derived.power_capped_fraction <= 1.0
    assert closed.sm_clock_hz > 0
    assert 1e-7 < kernel_launch_s(device) < 1e-4
    assert capture_environment(device).versions.driver
