"""Checks in a probe step whether the model trains: gradients are there and parameters move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lmbench.callbacks.events import Outputs
from lmbench.callbacks.observer import Observer
from lmbench.instruments.subject import token_counter, token_owner
from lmbench.instruments.training import (
    fingerprints,
    is_same_batch,
    loss_scale,
    norms,
    note_gradients,
    parameters_of,
    total_norm,
    try_batch,
    unscales_itself,
)
from lmbench.instruments.window import ProbeKind
from lmbench.records.measured import TrainingFacts
from lmbench.records.vocabulary import Stage

#: Steps that may be added to the first one, where it was skipped, or where it left some parameters alone.
_MOST_ADDED = 5


class TrainingCheck(Observer):
    """Lists parameters without gradients before the optimizer's step, and parameters that it did not move.

    A parameter is checked in the first step that gives it a gradient, of six at most: experts train in steps in which
    they get a token. With automatic optimization the step after these is checked too, and is recorded if it alone gives
    no gradient at all. Each of several optimizers has its parameters checked before its own step, which by hand may be
    in another batch.
    In your own Trainer the probe step needs `MeasurementSession(Schedule(steps=..., probe_steps=...))`.

    Recorded under `warmup`:

    - `gradient_norm`: 2-norm of all gradients in the last warm-up step. Runs with the same warm-up take it at the same
      step, however long their windows are.

    Recorded under `probe.training`:

    - `parameters`: number of trainable tensors.
    - `missing_gradients`, `zero_gradients`, `nonfinite_gradients`: names of tensors without a gradient, or with one
      that is zero everywhere or not finite.
    - `kept_gradient_count`: number of tensors whose gradient of the step before was still there at the first backward
      pass; null with manual optimization.
    - `backward_count`: backward passes of a batch, of which LBFGS takes several; null with manual optimization.
    - `unmoved_parameters`: names of tensors that the optimizer left as they were; null if none stepped.
    - `gradient_norm`: 2-norm of all gradients, before clipping and without the fp16 loss scale.
    - `has_new_batch`: whether this step had another batch than the step before it.
    - `depends_on_batch`: whether the weights give both batches different losses; null with manual optimization, on
      several ranks, if `training_step` cannot be called outside of the loop, or if 16-bit losses are equal.
    - `embedded_fraction`: share of the tokens that count which the module's embeddings look up; null in the same cases.
    - `uncounted_fraction`: how many more token ids the largest embedding looks up than count, as a share of these; null
      in the same cases, and where module or data has `tokens_per_batch`.
    - `is_skipped`: whether the fp16 scaler skipped the step, or `training_step` returned no loss, in all of the steps
      that were checked.
    """

    def prepare(self) -> None:
        self._earlier_batch: Any = None
        self._count_tokens = token_counter(self.module, self.trainer.datamodule)  # type: ignore[attr-defined]
        self.listen(True)

    @property
    def _is_probing(self) -> bool:
        return self.session.probe_kind is ProbeKind.TRAINING and self.trainer.training

    def window_opened(self) -> None:
        # The window needs neither hook.
        self.listen(False)

    def probe_begins(self, kind: ProbeKind) -> None:
        if self._is_probing:
            self.listen(True)
            self._steps, self._looks_at_batches = self._check_steps(), True
            next(self._steps)

    def _begin(self) -> None:
        # Taken between two steps: inside a step `toggle_optimizer` makes parameters look frozen.
        self._trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self._gradient_norms = dict[str, float]()
        #: Parameters as they were before their optimizer stepped.
        self._before = dict[str, tuple[float, float]]()
        self._stepped = set[str]()
        self._batch_count = self._backward_count = 0
        self._facts = self.run.probe.training = TrainingFacts()

    def batch_ended(self, outputs: Outputs, batch: Any) -> None:
        if self._is_probing:
            self._batch_count += 1
        if self._earlier_batch is not None and self._is_probing and self._looks_at_batches:
            is_same = is_same_batch(batch, self._earlier_batch)
            self._facts.has_new_batch = None if is_same is None else not is_same
            if is_same is not None and self.module.automatic_optimization and self.trainer.world_size == 1:
                self._try_batches(self._earlier_batch, batch)
        is_next_checked = self.session.probe_kind in (ProbeKind.SYNC, ProbeKind.TRAINING)
        self._earlier_batch = batch if is_next_checked else None

    def _try_batches(self, *batches: Any) -> None:
        earlier, present = (try_batch(self.trainer, batch) for batch in batches)
        if earlier is None or present is None:
            return
        (earlier_loss, _), (loss, embedded) = earlier, present
        # Of 16 bits few digits are left, which agree by chance.
        if self._facts.has_new_batch and (loss != earlier_loss or loss.element_size() > 2):
            self._facts.depends_on_batch = bool(loss != earlier_loss)
        if embedded and (tokens := self._count_tokens(batches[1])):
            self._facts.embedded_fraction = embedded.total() / tokens
            if token_owner(self.module, self.trainer.datamodule) is None:  # type: ignore[attr-defined]
                # The vocabulary's: tables of positions are smaller.
                largest = max(embedded, key=lambda part: part.weight.numel())
                self._facts.uncounted_fraction = embedded[largest] / tokens - 1

    def on_before_backward(self, *_: Any) -> None:
        # By hand, a step may go on adding up the gradients of earlier batches.
        if self._is_probing and self._facts.kept_gradient_count is None and self.module.automatic_optimization:
            kept = norms({name: parameter.grad for name, parameter in self._trainable.items()})
            self._facts.kept_gradient_count = sum(norm != 0 for norm in kept.values())

    def on_after_backward(self, *_: Any) -> None:
        # Without an optimizer's step (mode forward_backward) this is the last moment at which gradients exist.
        if self._is_probing:
            self._backward_count += 1
            self._check([name for name in self._trainable if name not in self._stepped])
        else:
            self._record_warmup_norm()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._is_probing:
            self._record_warmup_norm(optimizer)
            return
        # Check parameters of this optimizer, and those of none, which never move: the check is there to find them.
        others = {id(p) for o in trainer.optimizers for p in parameters_of(o)}
        others -= {id(p) for p in parameters_of(optimizer)}
        checked = {name: p for name, p in self._trainable.items() if id(p) not in others and name not in self._stepped}
        self._check(checked, optimizer)
        self._stepped |= {name for name in checked if self._gradient_norms.get(name)}
        if not self._before:
            self._scale = loss_scale(trainer)
        self._before |= fingerprints({name: p.detach() for name, p in checked.items() if p.grad is not None})

    def _remaining_scale(self, optimizer: Optimizer | None) -> float:
        """The loss scale that gradients still have: at an optimizer's step only a fused one has not removed it."""
        return loss_scale(self.trainer) if optimizer is None or unscales_itself(optimizer) else 1.0

    def _record_warmup_norm(self, optimizer: Optimizer | None = None) -> None:
        """Record the gradient norm in the last warm-up step; the step's last call covers all micro-batches."""
        session = self.session
        is_last = session.stage is Stage.WARMUP and session.steps_done == session.schedule.warmup_steps - 1
        if not is_last or session.only_watches:
            return
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        # Mode `forward` has no gradients, though Lightning calls the hook.
        if gradients:
            self.run.warmup.gradient_norm = float(total_norm(gradients)) / self._remaining_scale(optimizer)

    def _check(self, names: Iterable[str], optimizer: Optimizer | None = None) -> None:
        taken, scale = norms({name: self._trainable[name].grad for name in names}), self._remaining_scale(optimizer)
        # A gradient of an earlier step stays.
        known = self._gradient_norms
        known |= {name: norm / scale for name, norm in taken.items() if norm or name not in known}

    def step_ended(self) -> None:
        if self._is_probing:
            self._note_step()
            next(self._steps, None)

    def _check_steps(self) -> Iterator[None]:
        """Check a step, others while parameters are left, and with automatic optimization the one after these.

        Goes on when a step was noted. The step after the others is recorded if it alone is idle.
        """
        is_automatic = self.module.automatic_optimization
        self._begin()
        for left in range(_MOST_ADDED, -1, -1):
            yield
            facts = self._facts
            # By hand, an optimizer may step in another batch.
            is_partial = self._stepped < self._trainable.keys()
            if is_automatic:
                is_partial = not facts.is_idle and bool(facts.missing_gradients or facts.zero_gradients)
            # Ranks may see other gradients, and all have to take as many steps.
            if not self.trainer.strategy.broadcast(left > 0 and bool(facts.is_skipped or is_partial)):
                break
            if facts.is_skipped:
                self._begin()
            self.session.repeat_probe()
        if is_automatic:
            # Every second step may leave out its work.
            self._looks_at_batches = False
            self._begin()
            self.session.repeat_probe()
            yield
            if self._facts.is_idle and not facts.is_idle:
                for name in ("has_new_batch", "depends_on_batch", "embedded_fraction", "uncounted_fraction"):
                    setattr(self._facts, name, getattr(facts, name))
            else:
                self.run.probe.training = facts

    def _note_step(self) -> None:
        """Note what the step did with the parameters."""
        facts, is_automatic = self._facts, self.module.automatic_optimization
        note_gradients(facts, self._trainable, self._gradient_norms)
        # Without a loss, Lightning skips the backward pass.
        has_loss = self._backward_count > 0 or not is_automatic
        if has_loss and is_automatic:
            facts.backward_count = self._backward_count / self._batch_count
        if self._before or not has_loss:
            after = fingerprints({name: self._trainable[name].detach() for name in self._before})
            facts.unmoved_parameters = [name for name, before in self._before.items() if after[name] == before]
            # The scaler lowers its scale exactly when it found an infinity and skipped the update.
            facts.is_skipped = not has_loss or loss_scale(self.trainer) < self._scale

    def probe_ended(self, kind: ProbeKind) -> None:
        self.listen(False)
