"""Guards on training itself: finite loss, gradients, weights that move, a sound start (design section 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lmbench.records.encoding import is_nonfinite
from lmbench.records.guards.guard import Guard, at_most, not_applicable
from lmbench.records.paths import lookup, number
from lmbench.records.summary import select_window
from lmbench.records.vocabulary import BACKWARD_MODES, Record

#: Distance of a fresh model's first loss from ln(vocab): logits of unit variance add half a nat.
FIRST_LOSS_LIMIT_NAT = 0.5


def finite_loss(run: Record, steps: Sequence[Record]) -> Guard:
    """Fails if a step, warm-up included, or the summary has a loss that is nan or infinite."""
    name = "finite_loss"
    losses = [step["loss"] for step in steps if step.get("loss") is not None]
    summary = [value for key in ("first", "last", "mean") if (value := lookup(run, f"loss.{key}")) is not None]
    if not losses and not summary:
        return not_applicable(name, "no loss was recorded")
    bad = sum(map(is_nonfinite, losses)) or sum(map(is_nonfinite, summary))
    message = "every loss is finite" if not bad else f"{bad} losses are nan or infinite"
    if bad and losses:
        first = next((step["step"] for step in steps if is_nonfinite(step.get("loss"))), None)
        message += f", the first at step {first}" if first is not None else ", in the summary"
    advice = (
        "Lower the learning rate, clip gradients or use a wider precision; the speed of a diverged run is no result."
    )
    return at_most(name, bad, 0, "count", message, advice=advice, otherwise="fail")


def gradients(run: Record, steps: Sequence[Record]) -> Guard:
    """Fails if no trainable tensor has a non-zero gradient, or one is not finite; warns if some have none."""
    name = "gradients"
    checked = _checked(run)
    if isinstance(checked, str):
        return not_applicable(name, checked)
    bad = _names(run, "nonfinite_gradients")
    if bad and lookup(run, "probe.training.is_skipped") is not True:
        advice = "Lower the learning rate or the loss scale; find the operation with torch.autograd.detect_anomaly."
        message = f"{len(bad)} of {checked} gradients are not finite: {_listed(bad)}"
        return Guard(name, "fail", len(bad), 0, "count", message, advice)
    without = _names(run, "missing_gradients") + _names(run, "zero_gradients")
    if len(without) >= checked:
        advice = "Check that the loss depends on the parameters and that they require gradients; nothing was trained."
        message = f"none of {checked} parameters has a non-zero gradient"
        return Guard(name, "fail", len(without), 0, "count", message, advice)
    message = f"{len(without)} of {checked} parameters have no or zero gradients"
    if without:
        message += f": {_listed(without)}"
    advice = "Freeze these parameters if they are meant to stay; else their work is missing from this step."
    return at_most(name, len(without), 0, "count", message, advice=advice)


def trained(run: Record, steps: Sequence[Record]) -> Guard:
    """Fails if the optimizer moved nothing; warns if it left some parameters as they were."""
    name = "trained"
    checked = _checked(run)
    if isinstance(checked, str):
        return not_applicable(name, checked)
    if run.get("mode") != "train_step":
        return not_applicable(name, f"mode {run.get('mode')} has no optimizer step")
    if lookup(run, "probe.training.is_skipped") is True:
        return not_applicable(name, "the fp16 scaler skipped the checked step")
    if lookup(run, "probe.training.unmoved_parameters") is None:
        return not_applicable(name, "the weights were not compared")
    unmoved = _names(run, "unmoved_parameters")
    if len(unmoved) >= checked:
        advice = (
            "Check the learning rate (a warm-up from 0 moves nothing) and which parameters the optimizer was given."
        )
        return Guard(name, "fail", len(unmoved), 0, "count", f"the step moved none of {checked} parameters", advice)
    message = f"{len(unmoved)} of {checked} parameters did not move"
    if unmoved:
        message += f": {_listed(unmoved)}"
    advice = "Check that the optimizer holds these parameters and that the update is not below their precision."
    return at_most(name, len(unmoved), 0, "count", message, advice=advice)


def first_loss(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if a fresh model's first loss is far from ln(vocab), the loss of an even guess."""
    name = "first_loss"
    if lookup(run, "model.is_fresh") is not True:
        return not_applicable(name, "the model is not known to be fresh from initialisation")
    loss, vocab = number(run, "loss.first"), number(run, "model.vocab_size")
    if loss is None or vocab is None:
        return not_applicable(name, "the first loss or the vocabulary is not known")
    if is_nonfinite(loss):
        return not_applicable(name, "the first loss is not finite")
    message = f"first loss {loss:.2f}, ln(vocab) {math.log(vocab):.2f}"
    advice = "Check the initialisation, the labels' shift and the loss's mean: an untrained model guesses evenly."
    return at_most(name, abs(loss - math.log(vocab)), FIRST_LOSS_LIMIT_NAT, "nat", message, advice=advice)


def skipped_steps(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if the fp16 scaler skipped updates in the window; they are left out of every statistic."""
    name = "skipped_steps"
    if run.get("precision") != "16-mixed":
        return not_applicable(name, "no gradient scaler at this precision")
    window = select_window(steps)
    count = window.skipped_count
    message = f"the scaler skipped {count} of {count + len(window.used) + window.short_count} steps of the window"
    advice = "Warm up for longer, so that the loss scale settles before the window."
    return at_most(name, count, 0, "count", message, advice=advice)


def _checked(run: Record) -> int | str:
    """How many parameters were checked, or why none were."""
    mode = run.get("mode")
    if mode not in BACKWARD_MODES:
        return f"mode {mode} computes no gradients"
    checked = number(run, "probe.training.parameters")
    if checked is None:
        return "no probe step looked at the gradients"
    return int(checked)


def _names(run: Record, key: str) -> list[str]:
    return list(lookup(run, f"probe.training.{key}") or ())


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
