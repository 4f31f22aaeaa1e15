"""Every command on 500 damaged files from a fixed seed: exit code 0 or 2 (for `compare` also a verdict's), a line for
what is wrong with a file, no traceback, and what is sound beside it is shown."""

from __future__ import annotations

import gzip
import json
import random
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from damage import change_bytes, change_json, change_lines, change_packed, change_tree
from planted_memory import planted_run, write
from report_results import add_kernels, make_record, write_run, write_sweep
from simulated_cells import SimulatedServers, sweep
from trace_events import HandWritten

from lmbench.cli import main
from lmbench.configs import shipped_studies
from lmbench.wandb import publish
from lmbench.wandb.publish import Ended

SEED = 10
#: What all of it may add to the process's peak: no file of these is large, and none grows.
MOST_GROWTH_BYTES = 400 * 2**20
VERDICTS = (0, 2, 10, 11, 12)
Change = Callable[[bytes, random.Random], bytes]

TIMELINE = {
    "schema_version": 1, "end_ns": 1000, "host_phases": [["forward", 0, 500], ["backward", 500, 900]],
    "names": ["a", "b"], "kinds": ["gemm", "norm"], "parts": ["qkv", "norm"], "phases": ["forward", "backward"],
    "kernels": {
        "start_ns": [10, 300, 700], "duration_ns": [100, 50, 200], "name": [0, 1, 0], "kind": [0, 1, 0],
        "part": [0, 1, 0], "phase": [0, 0, 1], "stream": [7, 7, 7], "launch_ns": [5, None, 600],
        "launch_duration_ns": [3, None, 4], "is_own": [1, 0, 1],
    },
}  # fmt: skip
SWEEP = {
    "base": {"data.batch_size": 2},
    "matrix": {"model.size": ["tiny", "small"], "shape": [{"data.context_length": 32}, {"data.context_length": 64}]},
    "exclude": [{"model.size": "tiny", "data.context_length": 32}],
    "include": [{"model.size": "large"}],
    "modes": ["forward"],
    "passes": ["timing", "sync"],
    "environments": {"one": {"variables": {"A": "1"}}},
    "repeats": 1,
    "view": {
        "title": "x",
        "tables": [{"title": "t", "columns": ["step_s"], "rows": ["size"]}],
        "charts": [{"title": "c", "kind": "bars"}],
        "baseline": {"facts": {"size": "tiny"}},
    },
}


@dataclass(frozen=True)
class Subject:
    """A kind of file: the place that holds it, where in there it lies, how it is damaged, and what reads it.

    A damaged file is given to so many of the `commands`, the next one to the next ones; `here` stands for the place.
    """

    place: str
    file: str
    change: Change
    count: int
    commands: Sequence[str]
    commands_each: int = 1


def change_study(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.4:
        return change_bytes(data, chance)
    return yaml.safe_dump(change_tree(yaml.safe_load(data), chance)).encode()


_PAIR = ("show here", "compare here/a here/b", "compare here/b here/a --format=markdown", "noise here", "upload here")
SUBJECTS = {
    "run.json": Subject("pair", "a/r/run.json", change_json, 160, (*_PAIR, "compare here/a here/b --json"), 2),
    "steps.jsonl": Subject("pair", "a/r/steps.jsonl", change_lines, 60, _PAIR[::4], 2),
    "run.json in tables": Subject("pair", "a/r/run.json", change_json, 70, ("report here", "report here --format csv")),
    "run.json on a page": Subject("pair", "a/r/run.json", change_json, 20, ("report here --html here/page",)),
    "repeats": Subject("sides", "A/runs/small-32-true-r3/run.json", change_json, 30, ("compare here/A here/B",)),
    "noise.json": Subject("sides", "A/noise.json", change_json, 25, ("compare here/A here/B",)),
    "sweep.json": Subject("sweep", "sweep.json", change_json, 45, ("sweep here --dry_run", "report here")),
    "study": Subject("study", "study.yaml", change_study, 30, ("sweep here/study.yaml --dry_run",)),
    "trace": Subject(
        "trace", "trace.json", change_json, 40, ("kernels here/trace.json", "kernels here/trace.json --json")
    ),
    "snapshot": Subject("snapshot", "snapshot.pickle", change_bytes, 10, ("memory here/snapshot.pickle",)),
    "timeline.json.gz": Subject("profiled", "timeline.json.gz", change_packed, 10, ("report here --html here/page",)),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One sound place of each kind."""
    root = tmp_path_factory.mktemp("sound")
    run = make_record({"model.size": "small", "trainer.precision": "bf16-mixed"})
    profiled = make_record({"model.size": "small"})
    add_kernels(profiled, {})
    write_run(root / "pair" / "a" / "r", run)
    write_run(root / "pair" / "b" / "sound", make_record({"model.size": "medium"}))
    for side, precision in (("A", "32-true"), ("B", "bf16-mixed")):
        axes = {"model.size": ["small"], "trainer.precision": [precision]}
        write_sweep(
            root / "sides", side, axes, repeats=6,
            edit=lambda run, _, repeat: run.update(pid=100 + repeat), steps=2,
        )  # fmt: skip
    assert main(["noise", str(root / "sides" / "A")]) == 0
    sweep(root, SimulatedServers(lambda name: "ok"), SWEEP, "sweep")
    (root / "study").mkdir()
    shutil.copy(shipped_studies()["precision"], root / "study" / "study.yaml")
    write_run(root / "profiled", profiled)
    for name in ("trace", "snapshot"):
        (root / name).mkdir()
    trace = HandWritten()
    for step in range(2):
        at = 1000.0 * step
        trace.step(step, at, 900)
        trace.op("aten::mm", at + 10, 50)
        trace.launch(2 * step + 1, at + 20)
        trace.kernel(2 * step + 1, "nvjet_sm90_tst_128x128", at + 60, 300)
    trace.write(root / "trace" / "trace.json")
    write(root / "snapshot" / "snapshot.pickle", planted_run().memory)
    (root / "profiled" / "timeline.json.gz").write_bytes(gzip.compress(json.dumps(TIMELINE).encode()))
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def _no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb's own programs are not run; an upload leaves wandb's mark."""

    def run_module(module: str, words: Sequence[str], timeout_s: float) -> Ended:
        if module == "wandb":
            (Path(words[-1]) / "offline-run-1").mkdir(parents=True)
            (Path(words[-1]) / "offline-run-1" / "run-1.wandb.synced").touch()
        return Ended(0, [], 60)

    monkeypatch.setattr(publish, "run_module", run_module)


def _cases(subject: Subject) -> Iterator[tuple[random.Random, Sequence[str]]]:
    chance = random.Random(SEED)
    for index in range(subject.count):
        first = index * subject.commands_each
        places = range(first, first + subject.commands_each)
        yield chance, [subject.commands[place % len(subject.commands)] for place in places]


def test_there_are_500_files() -> None:
    assert sum(subject.count for subject in SUBJECTS.values()) == 500


@pytest.mark.usefixtures("_no_wandb")
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_damaged_file_ends_no_command(
    name: str, places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = SUBJECTS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, (chance, commands) in enumerate(_cases(subject)):
        here = tmp_path / "here"
        shutil.copytree(places[subject.place], here)
        file = here / subject.file
        file.write_bytes(subject.change(file.read_bytes(), chance))
        for command in commands:
            code = main([word.replace("here", str(here), 1) for word in command.split()])
            out, err = capsys.readouterr()
            what = f"file {number} of {name}: {command}: {code}\n{out[:2000]}\n{err}"
            assert code in (VERDICTS if command.startswith("compare") else (0, 2)), what
            assert "Traceback" not in out + err, what
            # A line for the file, and one for what is missing because of it.
            assert len(re.findall(r"^lmbench: ", err, re.MULTILINE)) <= 2, what
            page = here / "page"
            told = out + (page.read_text() if page.exists() else "")
            assert code == 2 or subject.place != "pair" or "sound" in told or "medium" in told, what
        shutil.rmtree(here)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_GROWTH_BYTES
