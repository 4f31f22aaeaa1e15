"""`lmbench fit -h`: the options of daily use on one screen, without importing PyTorch."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import fill

from lmbench.configs import shipped_configs
from lmbench.sizes import SIZES

_MEASURES = {
    "fit": "Measures training and leaves a result: forward, backward and optimizer times,\nmemory, throughput.",
    "validate": "Measures inference on the validation data and leaves a result.",
}


def help_text(command: str) -> str:
    names = f"shipped: {', '.join(shipped_configs())}"
    shipped = fill(names, 78, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    text = Path(__file__).with_suffix(".txt").read_text("utf-8")
    return text.format(command=command, measures=_MEASURES[command], shipped=shipped, sizes=", ".join(SIZES))


def daily_options() -> dict[str, tuple[str, str]]:
    """The options in the short help: each with its value (`N`, `NAME`) and what it does."""
    lines = re.findall(r"^  (--\S+) ?(\S*)\s+(\S.*)$", help_text("fit"), re.MULTILINE)
    return {name: (value, meaning) for name, value, meaning in lines}
