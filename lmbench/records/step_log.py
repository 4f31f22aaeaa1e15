"""Step records on their way into a run's folder; a disk that is full delays them and loses none."""

from __future__ import annotations

from collections.abc import Sequence

from lmbench.records.load import load_run
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder

#: Records that may wait in memory, about 3 kB each; later ones are dropped and counted.
MAX_WAITING = 100_000
# Written at once: while the disk stays full, so many are encoded in vain at every try.
_BATCH = 64


class StepLog:
    """Appends to a folder's steps.jsonl; what cannot be written waits in memory and is tried again at every append.

    `error` is why the last try failed, None when nothing waits.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._waiting: list[StepRecord] = []
        self._dropped_count = 0
        self.error: OSError | None = None

    @property
    def unwritten_count(self) -> int:
        """Records that are not in the file: those that wait and those that were dropped."""
        return len(self._waiting) + self._dropped_count

    def append(self, records: Sequence[StepRecord]) -> None:
        """Write the records after those that wait; never raises OSError."""
        room = max(0, MAX_WAITING - len(self._waiting))
        self._waiting.extend(records[:room])
        self._dropped_count += len(records[room:])
        self._write()

    def close(self) -> None:
        """Try once more to write what waits, and bring the file to the disk; never raises OSError."""
        self._write()
        try:
            self._folder.close()
        except OSError as error:
            self.error = error

    def steps(self) -> list[StepRecord]:
        """Every record: as it is in the file, then what waits.

        Raises OSError or UsageError if the file cannot be read any more.
        """
        written = load_run(self._folder.path).steps if self._folder.steps_written else []
        return written + self._waiting

    def _write(self) -> None:
        while self._waiting:
            before = self._folder.steps_written
            try:
                self._folder.append_steps(self._waiting[:_BATCH])
            except OSError as error:
                self.error = error
                return
            finally:
                del self._waiting[: self._folder.steps_written - before]
        self.error = None
