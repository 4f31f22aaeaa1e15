"""The seam for devices: a run measures any kind that is registered, by its clock, counters, sensor and debug mode."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from planted_device import OnMeta, PlantedDevice
from refusals import usage_error
from tables import cases
from torch import nn

from lmbench.callbacks import (
    MeasurementSession,
    MemoryHistory,
    MemoryRecorder,
    RunRecorder,
    SyncFinder,
    ThroughputMeter,
)
from lmbench.device import DEVICES, Device, device_of
from lmbench.device.amd import AmdSensor
from lmbench.instruments.window import Schedule
from lmbench.records.load import load_run
from lmbench.records.run import GpuFacts

from conftest import quiet_trainer

FORWARD_S, BACKWARD_S = 0.02, 0.03
WEIGHTS, ACTIVATIONS, TEMPORARY, EARLIER = 1000, 400, 70, 5000


class Planted(LightningModule):
    """Gives its device work and bytes, and waits for it once a step."""

    def __init__(self, device):
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.planted = device

    def training_step(self, batch, batch_idx):
        self.planted.give(FORWARD_S)
        self.planted.counters.hold(ACTIVATIONS)
        return self.net(batch).mean()

    def backward(self, loss):
        loss.backward()
        self.planted.give(BACKWARD_S)
        self.planted.counters.hold(TEMPORARY)
        self.planted.counters.hold(-ACTIVATIONS - TEMPORARY)
        self.planted.wait()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches():
    while True:
        yield torch.ones(2, 8)


@pytest.fixture(scope="module")
def device():
    planted = PlantedDevice(torch.device("meta"))
    planted.counters.hold(WEIGHTS)
    # What ran in this process before left its peak, and retries, which the counters have from the beginning.
    planted.counters.hold(EARLIER)
    planted.counters.hold(-EARLIER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "meta", lambda _: planted)
        yield planted


@pytest.fixture(scope="module")
def run(device, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    recorder = RunRecorder(str(folder), run_id="run")
    session = MeasurementSession(Schedule(warmup_steps=1, steps=4, probe_steps=2))
    callbacks = [MemoryRecorder(), SyncFinder(), ThroughputMeter(), MemoryHistory(), recorder, session]
    quiet_trainer(*callbacks, strategy=OnMeta()).fit(Planted(device), batches())
    return load_run(folder / "run").record


def test_a_run_on_a_registered_kind_of_device_ends_well_under_its_own_name(run):
    assert (run.outcome, run.device_type, run.clock, run.is_on_gpu) == ("ok", "meta", "events", True)
    assert (run.environment.gpu.name, run.environment.versions.driver) == ("Planted Card", "planted 1.0")


def test_its_phases_last_as_long_as_its_own_clock_says(run):
    assert FORWARD_S <= run.phases.forward.min_s < 1.5 * FORWARD_S
    assert BACKWARD_S <= run.phases.backward.min_s < 1.5 * BACKWARD_S


def test_its_memory_is_what_its_own_counters_say(run):
    memory, peak = run.memory, WEIGHTS + ACTIVATIONS + TEMPORARY
    assert (memory.steady_peak_allocated_bytes, memory.steady_peak_reserved_bytes) == (peak, 2 * peak)
    assert (memory.run_peak_allocated_bytes, memory.run_peak_reserved_bytes) == (peak, 2 * peak)
    assert (memory.run_alloc_retry_count, memory.window_alloc_retry_count) == (0, 0)
    assert memory.device_total_bytes == 1 << 20
    peaks, begins = memory.phase_peak_allocated_bytes, memory.phase_begin_allocated_bytes
    assert (peaks.forward, peaks.backward) == (WEIGHTS + ACTIVATIONS, peak)
    assert (begins.forward, begins.backward) == (WEIGHTS, WEIGHTS + ACTIVATIONS)


def test_its_synchronizes_are_found_in_its_own_debug_mode(run, device):
    (sync,) = run.probe.hidden_syncs
    assert (sync.count, " in wait: " in sync.location, device.sync_mode) == (1, True, "default")


def test_its_power_is_what_its_own_sensor_says(run):
    assert run.device_state.mean_power_w == pytest.approx(100.0)


def test_what_it_does_not_have_is_null_with_a_reason(run):
    assert run.memory_history.reason == "PyTorch keeps no history of an allocator on a META"


def test_memory_that_it_refuses_is_recorded_with_its_counters(device):
    recorder = MemoryRecorder()
    trainer = quiet_trainer(recorder, MeasurementSession(Schedule(0, 1)), strategy=OnMeta())
    trainer.fit(Planted(device), batches())
    device.listener(0, 500, 24)
    refused = recorder.session.run.memory.refused
    assert (refused.requested_bytes, refused.allocated_bytes, refused.device_free_bytes) == (500, WEIGHTS, 24)


def test_an_unregistered_kind_is_refused_in_one_line():
    line = r"^device mps:0: not measured; measured are cuda, cpu\b.*: set trainer.accelerator$"
    with usage_error(line):
        device_of(torch.device("mps", 0))


class AmdError(Exception):
    pass


#: What ROCm 7 answers about one card.
CARD = """
gpu_device_bdf: "0000:c1:00.0"
gpu_board_info: {model_number: 102-D65209}
gpu_device_uuid: 99ff74a1-0000-1000-80ff-d28d57a0cb14
gpu_driver_info: {driver_version: 6.12.12}
power_cap_info: {power_cap: 750000000}
power_info: {socket_power: 141, average_socket_power: N/A}
energy_count: {energy_accumulator: 2000000, counter_resolution: 15.3}
temp_metric: 51
gpu_process_list: []
"""


def amdsmi(**functions):
    """A library that knows one card."""
    answers = yaml.safe_load(CARD) | functions
    clocks = {"gfx": {"clk": 2100}}

    def refuse(*_):
        raise AmdError("not supported")

    return SimpleNamespace(
        AmdSmiException=AmdError, AmdSmiClkType=SimpleNamespace(GFX="gfx"),
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT="hot"),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT="current"), amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["card"], amdsmi_get_clock_info=lambda _, kind: clocks[kind],
        **{f"amdsmi_get_{name}": refuse if said is None else lambda *_, a=said: a for name, said in answers.items()},
    )  # fmt: skip


def amd_card(monkeypatch, library):
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    return AmdSensor(GpuFacts(name="AMD Instinct MI300X", pci_bus_id="00000000:c1:00.0"))


def test_a_card_of_amds_is_read_in_si_units(monkeypatch):
    sensor = amd_card(monkeypatch, amdsmi())
    assert sensor.facts() == GpuFacts(
        name="AMD Instinct MI300X", uuid="99ff74a1-0000-1000-80ff-d28d57a0cb14", sku="102-D65209",
        pci_bus_id="00000000:c1:00.0", power_limit_w=750.0,
    )  # fmt: skip
    reading = sensor.read()
    assert (reading.sm_clock_hz, reading.temperature_c) == (2.1e9, 51)
    assert (reading.power_w, reading.energy_j) == (141, pytest.approx(30.6))
    assert (reading.other_process_count, sensor.driver()) == (0, "6.12.12")


@cases("""
- [answers, reason]
# There is no library.
- [null, ModuleNotFoundError]
- [{gpu_device_bdf: null}, not supported]
- [{gpu_device_bdf: "0000:05:00.0"}, "0000:c1:00.0"]
""")
def test_a_card_of_amds_that_is_not_read_is_null_with_its_reason(monkeypatch, answers, reason):
    sensor = amd_card(monkeypatch, answers and amdsmi(**answers))
    assert reason in sensor.facts().sensor_reason
    assert sensor.facts().power_limit_w is None
    assert (sensor.read().energy_j, sensor.driver()) == (None, None)


def test_a_device_without_a_sensor_of_its_own_is_known_by_its_name():
    assert Device.sensor(PlantedDevice()).facts().name == "Planted Card"
