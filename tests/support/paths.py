"""Where the tests find the checkout, their data and the modules that they share."""

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
#: The checkout with lmbench's sources; CI runs the tests in a folder without them.
SOURCE = Path(os.environ.get("LMBENCH_SOURCE", ROOT))
DATA = TESTS / "data"
GOLDEN = DATA / "golden"
RUNS = DATA / "runs"
MEMORY = DATA / "memory"
TRACES = DATA / "traces"
