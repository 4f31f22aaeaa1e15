"""What a cell costs, and where it goes."""

from __future__ import annotations

import os

from lmbench.instruments.compiling import empty_cache
from lmbench.records.process import begin, clock_s, milestones, process_start_s, reach
from lmbench.records.run import Milestones


def test_milestones_are_dated_from_the_processs_beginning():
    before_s = clock_s()
    begin()
    reach("imported")
    reach("imported")
    found = milestones()
    assert found == Milestones(started_s=found.started_s, imported_s=found.imported_s)
    assert 0 < found.started_s <= found.imported_s
    began_s = process_start_s(os.getpid())
    assert began_s is not None
    assert before_s - began_s <= found.started_s <= clock_s() - began_s


def test_an_empty_folder_that_was_set_is_as_good_as_a_private_cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    assert empty_cache() == str(folder)
    folder.mkdir()
    assert empty_cache() == str(folder)
    (folder / "graph").touch()
    assert empty_cache() is None
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert empty_cache() is None
