"""Run one measurement from a command line and turn whatever happens into an exit code and one line."""

from __future__ import annotations

import os
import sys
import traceback

# LightningCLI 2.6 uses interfaces jsonargparse has deprecated; its notices are not the user's business.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

from jsonargparse import ArgumentError

from lmbench.bench.cli import BenchCLI
from lmbench.errors import ExitCode, UsageError


class _Measurement(BenchCLI):
    """Remembers itself from its first moment on, since LightningCLI runs everything in its constructor."""

    latest: _Measurement | None = None

    def __init__(self, args: list[str]) -> None:
        _Measurement.latest = self
        super().__init__(args)


def run(args: list[str]) -> int:
    """Run `lmbench fit|validate|test` with the given words; returns the exit code."""
    _Measurement.latest = None
    try:
        _Measurement(args)
    except (UsageError, ArgumentError) as error:
        return _complain(error)
    except SystemExit as error:
        # Help texts and --print_config end this way with 0; Lightning turns Ctrl-C into SystemExit(1).
        if error.code in (0, None):
            return ExitCode.OK
        recorder = _recorder()
        if recorder is None or recorder.exit_code is None:
            raise
    except BaseException as error:
        recorder = _recorder()
        if recorder is None or recorder.exit_code in (None, ExitCode.INTERNAL):
            traceback.print_exc()
            return ExitCode.INTERNAL
    return _finish()


def _recorder():  # type: ignore[no-untyped-def]
    return _Measurement.latest.recorder if _Measurement.latest else None


def _complain(error: Exception) -> int:
    print(f"lmbench: {error}", file=sys.stderr)
    return ExitCode.USAGE


def _finish() -> int:
    from lmbench.report.terminal import print_run

    recorder = _recorder()
    print_run(recorder.run, recorder.folder.path)
    return int(recorder.exit_code)
