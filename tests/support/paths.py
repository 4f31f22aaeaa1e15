"""Where the tests find the checkout, their data and the modules that they share."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
DATA = TESTS / "data"
GOLDEN = DATA / "golden"
RUNS = DATA / "runs"
MEMORY = DATA / "memory"
TRACES = DATA / "traces"
