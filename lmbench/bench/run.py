"""Run one measurement from a command line and turn whatever happens into an exit code and one line."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings

# LightningCLI 2.6 uses interfaces jsonargparse has deprecated; its notices are not the user's business.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lmbench.bench.cli import BenchCLI
from lmbench.bench.messages import translate
from lmbench.bench.words import expand_configs, take_flag
from lmbench.callbacks import RunRecorder
from lmbench.errors import ExitCode, UsageError
from lmbench.report.terminal import print_run


class _Measurement(BenchCLI):
    """Remembers itself from its first moment on, since LightningCLI runs everything in its constructor."""

    latest: _Measurement | None = None

    def __init__(self, args: list[str], announces: bool) -> None:
        _Measurement.latest = self
        super().__init__(args, announces)


def run(args: list[str]) -> int:
    """Run `lmbench fit|validate|test` with the given words; returns the exit code.

    `--json` prints the result's record and nothing else on standard output, `--quiet` only where the result lies.
    """
    _quiet()
    _Measurement.latest = None
    as_json, args = take_flag(args, "--json")
    is_quiet, args = take_flag(args, "--quiet")
    try:
        _Measurement(expand_configs(args), announces=not (as_json or is_quiet))
    except ArgumentError as error:
        return _complain(translate(str(error), _options(args[0])))
    except (UsageError, MisconfigurationException) as error:
        return _complain(" ".join(str(error).split()))
    except SystemExit as error:
        # Help texts and --print_config end this way with 0; Lightning turns Ctrl-C into SystemExit(1).
        if error.code in (0, None):
            return ExitCode.OK
        if _ended_recorder() is None:
            raise
    except BaseException:
        recorder = _ended_recorder()
        if recorder is None or recorder.exit_code is ExitCode.INTERNAL:
            traceback.print_exc()
        if recorder is None:
            return ExitCode.INTERNAL
    return _finish(as_json, is_quiet)


def _quiet() -> None:
    """Lightning's tips and notices about its own calls say nothing about the measurement."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*")


def _ended_recorder() -> RunRecorder | None:
    """The recorder, if it got as far as recording an end."""
    recorder = _Measurement.latest.recorder if _Measurement.latest else None
    return recorder if recorder is not None and recorder.exit_code is not None else None


def _options(command: str) -> list[str]:
    measurement = _Measurement.latest
    parser = getattr(measurement, "_subcommand_parsers", {}).get(command)
    if parser is None:
        return []
    return [name[2:] for name in parser._option_string_actions if name.startswith("--")]


def _complain(line: str) -> int:
    print(f"lmbench: {line}", file=sys.stderr)
    return ExitCode.USAGE


def _finish(as_json: bool, is_quiet: bool) -> int:
    recorder = _ended_recorder()
    assert recorder is not None
    assert recorder.folder is not None
    assert recorder.exit_code is not None
    if as_json:
        print(json.dumps(recorder.run, indent=1, default=str))
    elif is_quiet:
        print(recorder.folder.path)
    else:
        print_run(recorder.run, recorder.folder.path, with_banner=False)
    return int(recorder.exit_code)
