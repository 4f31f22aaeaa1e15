"""Why a tensor has its dtype, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lmbench.dtypes.recorded import NotedOperator, Rule
from lmbench.precision import find_precision

#: How many operators a module's reason names.
_NAMED = 3
NEVER_RAN = "never ran"
UNSEEN = "TorchScript: no hook sees its calls"
TAKES = "takes what it gets"
_FLOATS = ("float", "bfloat", "complex")


def plain_name(operator: str) -> str:
    """An operator as one calls it: `linear` for `aten::linear`; others keep their namespace."""
    return operator.removeprefix("aten::")


def is_floating(dtype: str) -> bool:
    return dtype.startswith(_FLOATS)


def operator_reason(
    inputs: Sequence[str],
    ran_on: Sequence[str] | None,
    gives: str | None,
    rule: Rule,
    device_type: str,
    other: str | None,
) -> str:
    """Why an operator runs on what it runs on.

    Args:
        inputs: dtypes of its tensors; ran_on: what autocast made of them, None where it did nothing.
        gives: dtype of its result, None where nobody knows.
        rule: the list that it is in.
        device_type: whose lists they are; `other` is another kind of device with the operator in its lists.
    """
    if ran_on is not None and rule not in ("off", "none"):
        return _handled(inputs, ran_on, rule)
    if rule not in ("off", "none"):
        return "autocast was off for it: takes what it gets"
    mixed = len({dtype for dtype in inputs if is_floating(dtype)}) > 1
    told = f"takes a mixture, gives {gives}" if mixed and gives else "takes a mixture" if mixed else TAKES
    if rule == "none" and other and any(is_floating(dtype) and dtype != "float32" for dtype in inputs):
        told += f" ({_device(other)} autocast has it in a list, {_device(device_type)} has not)"
    return told


def _handled(inputs: Sequence[str], ran_on: Sequence[str], rule: Rule) -> str:
    if rule == "lower":
        return "autocast's lower-precision list"
    if rule == "float32":
        return "autocast's float32 list"
    if rule == "widest":
        return "autocast's list for the widest dtype of several"
    made = [made for given, made in zip(inputs, ran_on, strict=False) if given != made]
    return f"autocast casts to {made[0]}" if made else "autocast leaves its inputs as they are"


def _device(device_type: str) -> str:
    return {"cuda": "CUDA's", "cpu": "the CPU's"}.get(device_type, f"{device_type}'s")


def module_reason(operators: Sequence[NotedOperator], was_called: bool, has_gradients: bool, has_children: bool) -> str:
    """Why a module returns what it returns: what decides it in the operators that it called itself."""
    if not was_called:
        return "not called, but its parameters have gradients: another module uses them" if has_gradients else NEVER_RAN
    if not operators:
        return "what its modules return" if has_children else "calls no operator"
    told: dict[str, list[str]] = {}
    for each in operators:
        names = told.setdefault(each.reason, [])
        if not each.is_cast and (name := plain_name(each.name)) not in names:
            names.append(name)
    if len(told) > 1:
        # What takes what it gets decides nothing.
        told.pop(TAKES, None)
    return "; ".join(f"{_listed(names)}: {reason}" if names else reason for reason, names in told.items())


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def parameter_reason(precision: str, dtypes: Collection[str]) -> str:
    """Why parameters have their dtypes."""
    meaning = find_precision(precision)
    if not dtypes:
        return "the module has none"
    if meaning is None:
        return "as the module made them"
    foreign = [dtype for dtype in dtypes if dtype != meaning.weights]
    if meaning.is_mixed:
        told = f"precision {precision} leaves weights as they are made; autocast casts copies of them"
    elif _casts(precision):
        told = f"precision {precision} makes floating weights {meaning.weights}"
    else:
        told = "precision 32-true leaves weights as they are made"
    return told + (f"; {', '.join(foreign)}: the module's own doing" if foreign else "")


def buffer_reason(precision: str) -> str:
    """Why buffers have their dtypes."""
    return f"precision {precision} casts floating ones" if _casts(precision) else "as the module made them"


def batch_reason(precision: str, dtypes: Collection[str]) -> str:
    """Why the batch's tensors have their dtypes."""
    if not any(is_floating(dtype) for dtype in dtypes):
        return "no floating tensor in it" if dtypes else "no tensor in it"
    return f"precision {precision} casts what is floating in it" if _casts(precision) else "as the data gives it"


def _casts(precision: str) -> bool:
    """Whether Lightning's plugin casts modules and batches themselves."""
    meaning = find_precision(precision)
    return meaning is not None and not meaning.is_mixed and meaning.weights != "float32"


def gradient_reason(gradients: Collection[str], parameters: Collection[str], scale: float | None, mode: str) -> str:
    """Why gradients have their dtypes."""
    if not gradients:
        return f"mode {mode} computes none" if mode in ("inference", "forward") else "there are none"
    told = "a gradient has its parameter's dtype" if set(gradients) <= set(parameters) else "as autograd left them"
    if scale is not None:
        told += f"; multiplied by the loss scale {scale:g} until the optimizer's step"
    return told


def state_reason(state: Collection[str], parameters: Collection[str], mode: str) -> str:
    """Why the optimizer's state has its dtypes."""
    if not state:
        return "no optimizer's step" if mode != "train_step" else "the optimizer holds none"
    foreign = [dtype for dtype in state if dtype not in parameters]
    told = "made like the parameters"
    return told if not foreign else f"{told}; {', '.join(foreign)}: the optimizer's own choice"


def words(dtypes: Iterable[str]) -> str:
    """Dtypes in their order, neighbours that are alike together: `float32 x 3, int64`."""
    runs: list[tuple[str, int]] = []
    for dtype in dtypes:
        if runs and runs[-1][0] == dtype:
            runs[-1] = dtype, runs[-1][1] + 1
        else:
            runs.append((dtype, 1))
    return ", ".join(dtype if count == 1 else f"{dtype} x {count}" for dtype, count in runs)
