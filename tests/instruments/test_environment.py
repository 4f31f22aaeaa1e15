"""Environment, host and device state: complete, true, and without secrets."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from msgspec.structs import replace

from lmbench.instruments import environment, host
from lmbench.instruments.device_state import DeviceSensor, derive_device_state, other_processes
from lmbench.instruments.environment import (
    allowed_variables,
    capture_environment,
    git_state,
    torch_flags,
    versions,
)
from lmbench.records.codec import as_dict
from lmbench.records.environment import Environment, Gpu, Revision
from lmbench.records.measured import DeviceReading, DeviceState
from lmbench.records.process import process_identity

CPU = torch.device("cpu")


# environment


def test_the_environment_fits_its_schema_and_is_json():
    captured = capture_environment(CPU)
    assert msgspec.convert(json.loads(json.dumps(as_dict(captured), allow_nan=False)), Environment) == captured


def test_planted_secrets_are_nowhere_in_it(monkeypatch):
    for name in (
        "WANDB_API_KEY", "CUDA_SECRET_TOKEN", "LMBENCH_WANDB_API_KEY", "TORCH_password", "NCCL_Credentials",
        "HF_TOKEN", "OMP_SECRET", "AWS_ACCESS_KEY_ID", "HOME_OF",
    ):  # fmt: skip
        monkeypatch.setenv(name, "hunter2-planted")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    captured = capture_environment(CPU)
    assert "hunter2" not in json.dumps(as_dict(captured))
    assert captured.variables["NCCL_DEBUG"] == "WARN"


def test_only_listed_variables_are_recorded(monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    names = ["CUDA_LAUNCH_BLOCKING", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "TORCH_LOGS"]
    for name in [*names, "PATH", "USER", "MY_CUDA_X", "WANDB_MODE"]:
        monkeypatch.setenv(name, "1")
    assert list(allowed_variables()) == names


def test_versions_are_those_of_the_modules_themselves():
    import lightning
    import torchmetrics
    import wandb

    found = versions(driver=None)
    assert found.torch == torch.__version__
    assert (found.lightning, found.torchmetrics) == (lightning.__version__, torchmetrics.__version__)
    assert found.wandb == wandb.__version__
    assert found.python == ".".join(map(str, sys.version_info[:3]))


def test_flags_follow_torchs_switches():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            found = torch_flags()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)
    assert found.float32_matmul_precision == "high"
    assert found.deterministic_algorithms is True
    assert found.anomaly_mode is True
    assert torch_flags().anomaly_mode is False


def test_flags_that_torch_refuses_to_read_are_null():
    # The new TF32 setting makes the old ones unreadable.
    code = (
        "import torch, json\n"
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "from lmbench.instruments.environment import torch_flags\n"
        "from lmbench.records.codec import as_dict\n"
        "print(json.dumps(as_dict(torch_flags())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["float32_matmul_precision"], found["cudnn_benchmark"]) == (None, False)


# code revision


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)

    def git(*args):
        identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
        command = ["git", "-C", str(tmp_path), *identity, *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", "code.py")
    git("commit", "-q", "-m", "one")
    return SimpleNamespace(path=tmp_path, commit=git("rev-parse", "HEAD"))


def test_a_commit_is_dirty_once_a_tracked_file_changes(repository):
    (repository.path / "results").mkdir()
    (repository.path / "results" / "run.json").write_text("{}")
    assert git_state(repository.path) == Revision(repository.commit, False)
    (repository.path / "code.py").write_text("a = 2\n")
    assert git_state(repository.path) == Revision(repository.commit, True)


def test_a_package_installed_below_a_project_is_not_its_commit(repository):
    site = repository.path / ".venv" / "site-packages" / "lmbench"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("")
    assert git_state(site, holds="__init__.py") == Revision(None, None)
    assert git_state(repository.path, holds="code.py").commit == repository.commit


def test_no_repository_and_no_git_are_null(tmp_path, repository, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent.parent))
    assert git_state(tmp_path.parent / "absent").commit is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("git") is None
    assert git_state(repository.path) == Revision(None, None)


def test_a_git_that_hangs_is_given_up(tmp_path, monkeypatch):
    slow = tmp_path / "git"
    slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "_GIT_TIMEOUT_S", 0.2)
    assert git_state(tmp_path) == Revision(None, None)


# host


def test_host_facts_agree_with_psutil():
    facts = host.host_facts(CPU)
    assert facts.core_count == psutil.cpu_count()
    assert facts.memory_total_bytes == psutil.virtual_memory().total
    assert facts.affinity == psutil.Process().cpu_affinity()
    assert facts.cpu_model


def test_the_process_identity_is_that_of_this_process():
    identity = process_identity()
    started = psutil.Process(identity.pid).create_time() - psutil.boot_time()
    assert identity.pid == os.getpid()
    assert identity.start_s == pytest.approx(started, abs=1.5)


def test_host_scores_are_plausible_and_leave_the_random_state_alone():
    before = torch.get_rng_state()
    assert 1e-9 < host.python_iteration_s() < 1e-6
    assert 1e-7 < host.kernel_launch_s(CPU) < 1e-3
    assert torch.equal(torch.get_rng_state(), before)


def test_peak_memory_is_this_processs_own_not_its_parents():
    child = "from lmbench.instruments.host import peak_rss_bytes; print(peak_rss_bytes())"
    parent = (
        "import subprocess, sys\n"
        "ballast = bytearray(b'x') * 400_000_000\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)\n"
        "exec(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", parent, child], capture_output=True, text=True, check=True)
    childs, parents = map(int, done.stdout.split())
    assert parents > 400_000_000
    assert childs < 100_000_000


def test_the_collectors_policy_is_read_and_not_changed():
    assert host.gc_policy().is_enabled is gc.isenabled()
    assert host.gc_policy().thresholds == list(gc.get_threshold())


# device state


def _reading(**changes):
    reading = DeviceReading(
        read_at_s=0.0, energy_j=1000.0, power_capped_s=1.0, thermal_capped_s=0.0, sm_clock_hz=1.98e9,
        temperature_c=40.0, other_process_count=0,
    )  # fmt: skip
    return replace(reading, **changes)


def test_power_energy_caps_and_clock_follow_from_two_readings():
    closed = _reading(
        read_at_s=5.0, energy_j=4000.0, power_capped_s=3.5, sm_clock_hz=1.65e9, temperature_c=55, other_process_count=2
    )  # fmt: skip
    found = derive_device_state(_reading(), closed, wall_s=4.0)
    assert (found.open, found.close) == (_reading(), closed)
    assert (found.mean_power_w, found.mean_temperature_c, found.energy_j) == pytest.approx((600.0, 47.5, 2400.0))
    assert (found.power_capped_fraction, found.thermal_capped_fraction) == (0.5, 0.0)
    assert found.sm_clock_drop_fraction == pytest.approx(1 / 6)
    assert found.other_process_count == 2
    assert derive_device_state(_reading(), closed).energy_j == pytest.approx(3000.0)


def test_counters_that_a_card_lacks_or_that_were_reset_give_null():
    opened, closed = _reading(energy_j=None, sm_clock_hz=None), _reading(read_at_s=5.0, power_capped_s=0.5)
    found = derive_device_state(opened, closed)
    assert found.mean_power_w is None
    assert derive_device_state(_reading(temperature_c=None), closed).mean_temperature_c is None
    assert found.energy_j is None
    assert found.power_capped_fraction is None
    assert found.sm_clock_drop_fraction is None
    assert found.thermal_capped_fraction == 0.0


def test_a_counter_ahead_of_the_clock_is_not_over_the_whole_window():
    found = derive_device_state(_reading(), _reading(read_at_s=5.0, power_capped_s=6.1))
    assert found.power_capped_fraction == 1.0


def test_a_cpu_has_a_sensor_that_knows_nothing():
    sensor = DeviceSensor(CPU)
    assert (sensor.facts(), sensor.driver()) == (Gpu(), None)
    reading = sensor.read()
    assert reading == DeviceReading(read_at_s=reading.read_at_s)
    derived = derive_device_state(reading, reading, wall_s=1.0)
    assert derived == DeviceState(open=reading, close=reading)


@pytest.mark.parametrize(
    ("pids", "has_context", "expected"),
    [
        ([os.getpid()], True, ([], 0)),
        ([os.getpid(), 7, 5], True, ([5, 7], 2)),
        ([7], False, ([7], 1)),
        ([], False, ([], 0)),
        ([90_001, 90_002], True, (None, 1)),
        ([], True, (None, None)),
        (None, True, (None, None)),
    ],
    ids=[
        "alone",
        "named",
        "before CUDA",
        "idle",
        "other process ids in a container",
        "hidden",
        "unsupported",
    ],
)
def test_other_processes_are_named_counted_or_unknown(pids, has_context, expected):
    assert other_processes(pids, has_context) == expected


class SmallCard:
    """NVML's answers for a card that has no energy counter, no violation times and no MIG."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1

    def nvmlDeviceGetName(self, handle):
        return "Small Card"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 450_000

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return (8, 9)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 2520, 2: 10501}[kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x1 | 0x4 | 0x40

    def nvmlDeviceGetViolationStatus(self, handle, policy):
        if policy == self.NVML_PERF_POLICY_POWER:
            return SimpleNamespace(violationTime=2_500_000_000, referenceTime=0)
        raise self.NVMLError

    def nvmlSystemGetDriverVersion(self):
        return "600.1"


def test_what_a_card_supports_is_in_si_units_and_the_rest_is_null():
    sensor = DeviceSensor(CPU)
    sensor._nvml, sensor._handle = SmallCard(), "handle"
    facts, reading = sensor.facts(), sensor.read()
    assert facts == Gpu(name="Small Card", power_limit_w=450.0, compute_capability="8.9")
    assert sensor.driver() == "600.1"
    assert reading == DeviceReading(
        read_at_s=reading.read_at_s,
        sm_clock_hz=2.52e9,
        memory_clock_hz=10.501e9,
        power_capped_s=2.5,
        throttle_reasons=["software power cap", "hardware thermal slowdown"],
    )


@pytest.mark.gpu
def test_a_real_gpu_tells_what_the_reports_need():
    device = torch.device("cuda", 0)
    sensor = DeviceSensor(device)
    facts, opened = sensor.facts(), sensor.read()
    print(facts, opened)
    assert facts.name == torch.cuda.get_device_name(device)
    assert facts.memory_total_bytes >= torch.cuda.get_device_properties(device).total_memory
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    end = opened.read_at_s + 2.0
    while (closed := sensor.read()).read_at_s < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
    derived = derive_device_state(opened, closed)
    print(derived)
    assert 0.5 * closed.power_w < derived.mean_power_w < 1.1 * facts.power_limit_w
    assert 0.0 <= derived.power_capped_fraction <= 1.0
    assert closed.sm_clock_hz <= facts.max_sm_clock_hz
    assert 1e-7 < host.kernel_launch_s(device) < 1e-4
    captured = capture_environment(device)
    assert captured.versions.driver
