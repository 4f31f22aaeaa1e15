"""What a recording and its reader agree on: the trace's file, and the names of the ranges in it."""

TRACE_FILE = "trace.json.gz"
#: Each is followed by what it is a range of: a step's number, a phase, a module's path.
STEP, PHASE, MODULE = "lmbench.step:", "lmbench.phase:", "lmbench.module:"
