"""Measures the figures of lmbench/reference by lmbench's own commands, and goes on where it ended, also elsewhere.

    python .ci/evidence.py                               # what there is to measure here, and how long it takes
    python .ci/evidence.py --budget 9m --pack runs.tgz   # measure for nine minutes
    python .ci/evidence.py --budget 9m --pack more.tgz --unpack runs.tgz   # go on, on another machine too
    lmbench report evidence/nvidia_h200-*/precision --publish lmbench/reference/h200_precision   # a page an item

The items and their order are in evidence.yaml. A card and a commit have a folder of their own in `evidence/`, so rows
of the same card and commit are not measured again, and rows of others never mix. Run it in a clone, whose commit the
runs record. Needs lmbench's environment.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import yaml

from lmbench.commands.words import read_budget

HERE = Path(__file__).resolve().parent
#: Seconds that an interrupted sweep has to write its results, and that packing takes.
GRACE_S = 25
#: What a report reads of a run; traces and memory histories stay behind.
PACKED = (
    "run.json",
    "steps.jsonl",
    "config.yaml",
    "sweep.json",
    "base.yaml",
    "attempts.txt",
    "tuned.yaml",
    "cells.csv",
)
#: An archive larger than this loses the steps of runs, of which few tables show more than the record has.
MOST_BYTES = 15 * 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=read_budget, default=0, help="time for all of it, such as 90s or 9m")
    parser.add_argument("--only", default="", help="these items alone, such as precision,compile")
    parser.add_argument("--list", type=Path, default=HERE / "evidence.yaml", help="another list of items")
    parser.add_argument("--results", type=Path, default=Path("evidence"), help="folder of all results")
    parser.add_argument("--unpack", type=Path, nargs="*", default=[], help="archives to go on with")
    parser.add_argument("--pack", type=Path, help="archive to write at the end")
    words = parser.parse_args()
    deadline = time.monotonic() + words.budget - GRACE_S
    for archive in words.unpack:
        with tarfile.open(archive) as packed:
            packed.extractall(words.results, filter="data")
    card, gib, gpus = machine()
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True, cwd=HERE).strip()
    if subprocess.check_output(["git", "status", "--porcelain", "--untracked-files=no"], text=True, cwd=HERE):
        sys.exit("the checkout has changes that are not committed: nobody could repeat the runs")
    folder = words.results / f"{card}-{commit[:9]}"
    folder.mkdir(parents=True, exist_ok=True)
    only = set(filter(None, words.only.split(",")))
    items = [item for item in yaml.safe_load(words.list.read_text()) if fits(item, gib, gpus, only)]
    print(f"{folder}: {gpus} of {card}, {gib:.0f} GiB each")
    for item in items:
        is_done = done_file(folder, item).exists()
        left_s = deadline - time.monotonic()
        if not is_done and words.budget and left_s > 30:
            print(f"== {item['name']}: about {item['minutes']} min, {left_s / 60:.1f} left", flush=True)
            is_done = measure(item, folder, left_s)
        print(
            f"{'done' if is_done else 'open':<5} {item['minutes']:>3} min  {item['name']:<30} lmbench {item['run']}",
            flush=True,
        )
    if words.pack:
        pack(words.results, words.pack)


def machine():
    """Name of the card, its GiB and the number of cards; the CPU where there is none."""
    # In a process of its own, since one that uses the GPU would stand in every run as another process there.
    asks = (
        "import torch.cuda as c; p = c.get_device_properties(0); "
        "print(p.name, p.total_memory, c.device_count(), sep=';')"
    )
    answer = subprocess.run([sys.executable, "-c", asks], check=False, capture_output=True, text=True)
    if answer.returncode:
        return "cpu", 0, 1
    name, total_bytes, count = answer.stdout.strip().split(";")
    return re.sub(r"\W+", "_", name).lower(), int(total_bytes) / 2**30, int(count)


def fits(item, gib, gpus, only):
    """Whether an item is for this machine. One with several cards measures what takes several, unless it is asked."""
    if only and item["name"] not in only:
        return False
    is_for_count = item.get("gpus", 1) <= gpus and (bool(only) or gpus == 1 or item.get("gpus", 1) > 1)
    return is_for_count and item.get("gib", 0) <= gib <= item.get("most_gib", gib)


def done_file(folder, item):
    """The file that says that an item is complete."""
    return folder / f"{item['name']}.done"


def command(folder, item):
    """The words of an item's command; an item that was begun goes on."""
    name, (verb, *words) = item["name"], shlex.split(item["run"])
    home = folder / name
    if verb == "overhead":
        return [verb, *words, "--format", "json", "--output", str(home.with_suffix(".json"))]
    if verb == "fit" and (home / "sweep.json").exists():
        return ["sweep", str(home), "--trust"]
    if verb == "fit":
        return [verb, *words, "--measure.results_dir", str(folder), "--measure.run_id", name]
    trust = ["--trust"] if verb == "tune" else []
    return [verb, *words, "--results_dir", str(folder), "--name", name, *trust]


def measure(item, folder, limit_s):
    """Measure an item for `limit_s` at most; returns whether it is complete."""
    process = subprocess.Popen([sys.executable, "-m", "lmbench", *command(folder, item)], start_new_session=True)
    for number, wait_s in ((signal.SIGINT, limit_s), (signal.SIGTERM, GRACE_S * 0.6), (signal.SIGKILL, 5)):
        try:
            code = process.wait(wait_s)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, number)
    else:
        code = process.wait()
    # A cell that ran out of memory or failed a guard is a row; 1, 2 and the signals are no end.
    is_complete = code in (0, 3, 4, 5, 10, 11)
    if is_complete:
        done_file(folder, item).write_text(f"exit code {code}\n")
    return is_complete


def pack(results, archive):
    """Write what reports read of all results."""
    for names in (PACKED, [name for name in PACKED if name != "steps.jsonl"]):
        with tarfile.open(archive, "w:gz") as packed:
            for path in sorted(results.rglob("*")):
                is_whole = path.suffix in (".json", ".done") and path.parent.parent == results
                if path.is_file() and (path.name in names or is_whole):
                    packed.add(path, path.relative_to(results))
        if archive.stat().st_size <= MOST_BYTES:
            break
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
