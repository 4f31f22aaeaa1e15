"""The dtype of every tensor of a step, and the reason for it: recorded in a probe step, shown by `lmbench dtypes`."""

from dataclasses import dataclass


@dataclass
class DtypeSettings:
    """What to record of dtypes, for `lmbench dtypes`.

    Args:
        record: record the dtypes of parameters, modules, operators, loss, gradients and optimizer state on one probe
            step, with the reason for each cast; nothing is recorded if measure.probe_steps is 0.
    """

    record: bool = False
