"""Every command that reads, on hundreds of damaged files from a fixed seed: exit code 0 or 2 (for `compare` also a
verdict's), a line for what is wrong with a file, no traceback, and a sound run beside it is shown."""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
import shutil

import pytest
import yaml
from paths import TRACES
from planted_memory import planted_run, write
from runs import make_run, places
from simulated_cells import SimulatedServers, sweep
from tables import cases
from wandb_loopback import replace_wandb

from lmbench.cli import main
from lmbench.configs import shipped_studies

SEED = 10
#: Values that a field may have in a file of somebody else's.
ODD = (
    None, "", "nan", "../../..", "line\nfeed", "\x1b[31mred", "<script>", "=1+1", "%s{0}{a.b}%n", "a" * 5000, True, 0,
    -1, 2**53 + 1, -(2**63), 10**30, -0.0, 1e-320, 1e308, [], [None], [1, "a"], {}, {"a": {"b": [1]}}, {"a.b": 1},
    json.loads("[" * 60 + "]" * 60),
)  # fmt: skip
SWEEP = yaml.safe_load("""
base: {data.batch_size: 2}
matrix: {model.size: [tiny, small], shape: [{data.context_length: 32}, {data.context_length: 64}]}
exclude: [{model.size: tiny, data.context_length: 32}]
passes: [timing, sync]
environments: {one: {variables: {A: "1"}}}
repeats: 1
view: {title: x, tables: [{title: t, columns: [step_s], rows: [size]}]}
""")


# damage


def change_tree(tree, chance):
    """A copy with one to three places removed, renamed, multiplied or replaced."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 2, 3))):
        if not tree:
            break
        holder, key = chance.choice(places(tree))
        # Mostly where the type does not tell that it is wrong.
        odd = [value for value in ODD if type(value) is type(holder[key])] if chance.random() < 0.6 else ODD
        match chance.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[f"{key}2"] = holder.pop(key)
            case 2 if isinstance(holder, list):
                holder.extend(copy.deepcopy(holder) * 3)
            case _:
                holder[key] = copy.deepcopy(chance.choice(odd or ODD))
    return tree


def change_bytes(data, chance):
    """Cut off, doubled, with bytes in between that do not belong there."""
    cut, kept = chance.randrange(len(data) + 1), chance.randrange(2)
    junk = (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"NaN", b'"', b"[" * 2000, b"1e999", b"\\ud800", data, b"")
    return data[:cut] + chance.choice(junk) + data[cut:] * kept


def change(name, data, chance):
    """A file damaged as its kind can be: mostly still JSON, YAML or gzip, with odd values in it."""
    kind = name.rpartition(".")[2]
    if kind == "pickle" or chance.random() < 0.2:
        return change_bytes(data, chance)
    if kind == "gz":
        return gzip.compress(change(name.removesuffix(".gz"), gzip.decompress(data), chance), 1)
    if kind == "yaml":
        return yaml.safe_dump(change_tree(yaml.safe_load(data), chance)).encode()
    if kind == "jsonl":
        lines = data.splitlines()
        index = chance.randrange(len(lines))
        lines[index] = change("line.json", lines[index], chance)
        return b"\n".join(lines) + chance.choice((b"\n", b"", b"\n\n{", b"\n" + b"x" * 100_000))
    return json.dumps(change_tree(json.loads(data), chance)).encode()


# the files


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with a sound folder of each kind."""
    root = tmp_path_factory.mktemp("sound")
    make_run(root / "pair" / "a" / "r", {"model.size": "small", "trainer.precision": "bf16-mixed"})
    make_run(root / "pair" / "sound" / "r", {"model.size": "medium"})
    sweep(root, SimulatedServers(), SWEEP, "sweep")
    for name in ("study", "trace", "snapshot"):
        (root / name).mkdir()
    shutil.copy(shipped_studies()["precision"], root / "study" / "study.yaml")
    shutil.copy(TRACES / "two_gpus" / "trace.json.gz", root / "trace")
    write(root / "snapshot" / "snapshot.pickle", planted_run().memory)
    return root


@pytest.fixture
def _no_processes(monkeypatch):
    """No other program is run."""
    replace_wandb(monkeypatch)
    # A sweep of sound options would import PyTorch in a server.
    monkeypatch.setattr("lmbench.sweep.execute.Execution.check", lambda *_: None)


@pytest.mark.usefixtures("_no_processes")
# A kind of file in a folder, how many of it are damaged, and the commands that read it, a damaged file each in turn;
# `here` stands for the folder.
@cases("""
- [folder, name, count, commands]
- [pair, a/r/run.json, 140, [show here, compare here/a here/sound, compare here/sound here/a --format=markdown,
   noise here, upload here, report here, report here --format csv]]
- [pair, a/r/steps.jsonl, 75, [show here, report here]]
- [sweep, sweep.json, 45, [sweep here --dry_run --trust, report here]]
- [study, study.yaml, 40, [sweep here/study.yaml --dry_run]]
- [trace, trace.json.gz, 8, [kernels here/trace.json.gz, kernels here/trace.json.gz --json]]
- [snapshot, snapshot.pickle, 20, [memory here/snapshot.pickle]]
""")
def test_a_damaged_file_ends_no_command(folder, name, count, commands, sound, tmp_path, capsys):
    chance, here = random.Random(SEED), tmp_path / "here"
    for number in range(count):
        shutil.copytree(sound / folder, here)
        file = here / name
        file.write_bytes(change(file.name, file.read_bytes(), chance))
        command = commands[number % len(commands)]
        code = main([word.replace("here", str(here), 1) for word in command.split()])
        out, err = capsys.readouterr()
        what = f"file {number} of {name}: {command}: {code}\n{out[:2000]}\n{err}"
        assert code in ((0, 2, 10, 11, 12) if command.startswith("compare") else (0, 2)), what
        assert "Traceback" not in out + err, what
        # A line for the file, and another for what is missing because of it.
        assert len(re.findall(r"^lmbench: ", err, re.MULTILINE)) <= 2, what
        assert code == 2 or folder != "pair" or "sound" in out or "medium" in out, what
        shutil.rmtree(here)
