"""`lmbench selfcheck`: show that the numbers are true on this machine."""

from __future__ import annotations

import logging
import sys
import warnings

from lmbench.errors import ExitCode


def run(args: list[str]) -> int:
    """Run every check and print a table; exits with 1 when one fails."""
    if any(arg in ("-h", "--help") for arg in args[1:]):
        print("usage: lmbench selfcheck [cpu|cuda]\n\nPlants known truths and checks that they come back.")
        return ExitCode.OK
    if len(args) > 2:
        print(f"lmbench: selfcheck takes one word, cpu or cuda; {len(args) - 1} given", file=sys.stderr)
        return ExitCode.USAGE
    wanted = args[1] if len(args) > 1 else None
    if wanted not in (None, "cpu", "cuda"):
        print(f"lmbench: selfcheck takes cpu or cuda, not {wanted!r}", file=sys.stderr)
        return ExitCode.USAGE
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        print("lmbench: no CUDA device here; use `lmbench selfcheck cpu`", file=sys.stderr)
        return ExitCode.USAGE
    device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    return _check(device)


def _check(device: object) -> int:
    import torch
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lmbench.report.screen import make_console
    from lmbench.selfcheck import findings, host_bound, timing
    from lmbench.selfcheck.result import CheckResult

    assert isinstance(device, torch.device)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    console = make_console()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    console.print(f"selfcheck on {name}, torch {torch.__version__}", markup=False)
    results: list[CheckResult] = []
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "check", "expected", "found", "limit"):
        table.add_column(column)
    for check in (*timing.CHECKS, *host_bound.CHECKS, *findings.CHECKS):
        results.extend(check(device))
    for result in results:
        table.add_row(result.status, result.name, result.expected, result.found, result.limit)
    console.print(table)
    failed = sum(result.status == "fail" for result in results)
    passed = sum(result.status == "pass" for result in results)
    skipped = len(results) - passed - failed
    console.print(f"{passed} passed, {failed} failed" + (f", {skipped} need a GPU" if skipped else ""))
    return ExitCode.INTERNAL if failed else ExitCode.OK
