"""How often `lmbench judge` is right about planted changes: real, of nothing, of how it trains, and cheats.

`python tests/experiments/planted_judgements.py [KIND...]` judges all changes of `planted_changes`, or those of some
kinds, and prints a table. Each run is a process. Only the step times are simulated, at a noise of 0.5 %, so that a
busy machine does not decide: the author of a change claims its speed. A process that was there already is not run
again, and rounds after the first repeat its records.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import ClassVar
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from planted_changes import CHEATS, NOTHING, TRAINS_OTHERWISE
from simulated_cells import SimulatedServers

from lmbench.cli import main
from lmbench.sweep.outcome import End

#: Steps of a training.
STEPS = 50
STEP_S, NOISE = 0.02, 0.005
EFFECTS = (-0.10, -0.08, -0.05, -0.03, -0.02, 0.02, 0.03, 0.05, 0.08, 0.10)
#: Changes of each kind, with the claimed change of the step time and the right exit codes.
KINDS = {
    "real": [("none", effect, 10 if effect > 0 else 0) for effect in EFFECTS],
    "nothing": [(change, 0.0, 0) for change in NOTHING],
    "trains otherwise": [(change, -0.1, 12) for change in TRAINS_OTHERWISE],
    "cheat": [(change, -0.3, 12) for change in CHEATS],
}


class Forks(SimulatedServers):
    """Servers whose processes are forks of this one. `effect` is the claimed change of B's step time."""

    #: Folders of results by the options of their processes.
    earlier: ClassVar[dict[tuple[tuple[str, str], ...], Path]] = {}
    kept: ClassVar = tempfile.TemporaryDirectory()

    def __init__(self, effect, seed):
        super().__init__(lambda name: name)
        self.effect, self.noise = effect, random.Random(seed)

    def end(self, name, launch, folder, options):
        side, _, repeat = name.rpartition("-r")
        is_training = folder.parents[1].name.endswith("-training")
        # A process is the same again if its options are; the configuration is the same text in every folder.
        places = ("config", "measure.probe_steps", "measure.results_dir", "measure.run_id")
        key = tuple(option for option in options.items() if option[0] not in places)
        if not is_training and repeat != "0":
            shutil.copytree(folder.with_name(f"{side}-r0"), folder)
        elif key in self.earlier:
            shutil.copytree(self.earlier[key], folder)
        elif code := self.fork(launch):
            return End(code, "itself", 1.0)
        else:
            self.earlier[key] = shutil.copytree(folder, Path(tempfile.mkdtemp(dir=self.kept.name), "run"))
        record = json.loads((folder / "run.json").read_text())
        self.claim(record, name, 1 + self.effect * (side[0] == "B"))
        (folder / "run.json").write_text(json.dumps(record))
        return End(0, "itself", 1.0)

    def claim(self, record, name, scale):
        """Give a record step times of its own, and an identity."""
        step_s = STEP_S * scale * self.noise.lognormvariate(0, NOISE)
        record["run_id"], record["pid"] = name, self.noise.randrange(1 << 22)
        record["phases"]["step"].update(p25_s=step_s, median_s=step_s, p75_s=step_s, mean_s=step_s)
        record["window"]["wall_s"] = record["window"]["steps_sum_s"] = step_s * record["window"]["steps"]

    @staticmethod
    def fork(launch):
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        code = 1
        try:
            log = os.open(launch.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os.environ.update(launch.variables)
            code = main(list(launch.words))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def judge(change, effect, folder, seed=0, servers=Forks, budget="10m"):
    """The judgement on a change, as its JSON."""
    base = Path(folder, "base.yaml")
    base.write_text(
        "trainer: {accelerator: cpu}\nmodel: planted_changes.Changed\nmeasure: {warmup_steps: 2, probe_steps: 1, "
        "steps: 20, min_window_s: 0}\nwandb: {mode: disabled}\n"
    )
    out, err = io.StringIO(), io.StringIO()
    words = [str(base), f"{base}@model.change={change}", "--budget", budget, "--results_dir", str(folder)]
    with (
        mock.patch("lmbench.campaign.trainings.MOST_STEPS", STEPS),
        mock.patch("secrets.randbits", return_value=seed),
        mock.patch("lmbench.campaign.judging.LocalExecutor", return_value=servers(effect, seed)),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        main(["judge", *words, "--name", f"{change.replace(' ', '-')}-{seed}"])
    assert out.getvalue(), err.getvalue()
    return json.loads(out.getvalue().splitlines()[-1])


def table(kinds):
    right = 0
    for kind in kinds:
        for seed, (change, effect, code) in enumerate(KINDS[kind]):
            began_s = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                judgement = judge(change, effect, folder, seed)
            is_right = judgement["exit_code"] == code
            right += is_right
            parts = judgement["parts"]
            word = next((name for name, part in parts.items() if part["word"] == "NO"), "speed")
            print(
                f"{'right' if is_right else 'WRONG'}  {kind:16} {change:20} {effect:+.0%}  {judgement['verdict']:9} "
                f"{time.monotonic() - began_s:4.0f} s  {word}: {parts[word]['word']}: {parts[word]['reason']}",
                flush=True,
            )
    print(f"{right} of {sum(len(KINDS[kind]) for kind in kinds)} right")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    from lmbench.sweep.fork_server import import_everything

    import_everything()
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "support")
    table(sys.argv[1:] or KINDS)
