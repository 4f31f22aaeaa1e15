"""The collective in which ranks stopped, from files as PyTorch's flight recorder writes them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from tables import cases

from lmbench.instruments.flight_recorder import read_stop, recording_variables


def entry(number, name="nccl:all_reduce", state="completed", sizes=((7, 2),)):
    return {
        "frames": [], "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"),
        "collective_seq_id": number, "profiling_name": name, "input_sizes": [list(size) for size in sizes],
        "state": state, "timeout_ms": 15000, "time_created_ns": 1, "retired": state == "completed",
    }  # fmt: skip


def write(folder, *ranks):
    path = recording_variables(folder)["TORCH_FR_DUMP_TEMP_FILE"]
    for rank, entries in enumerate(ranks):
        content = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": entries}
        Path(f"{path}{rank}").write_bytes(pickle.dumps(content))


def test_the_first_collective_that_did_not_end_is_told(tmp_path):
    waiting = [entry(8), entry(9, state="scheduled"), entry(10, "nccl:broadcast", "scheduled", ((1,),))]
    write(tmp_path, waiting, [entry(8)])
    stop = "rank 0 waited 15 s in nccl:all_reduce, number 9 of its group, of 7 x 2 elements"
    assert read_stop(tmp_path, 2) == stop


def test_a_rank_that_called_another_collective_of_that_number_is_told(tmp_path):
    write(tmp_path, [entry(9, state="started")], [entry(9, sizes=((7,),), state="started")])
    told = ", where rank 1 called nccl:all_reduce, number 9 of its group, of 7 elements"
    assert read_stop(tmp_path, 2).endswith(told)


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


@cases("content", b"", b"no pickle", pickle.dumps([1]), pickle.dumps({"entries": [Attack()]}))
def test_a_damaged_file_tells_nothing_and_runs_nothing(content, here):
    (here / "collectives0").write_bytes(content)
    assert read_stop(here, 2) is None
    assert not (here / "attacked").exists()
