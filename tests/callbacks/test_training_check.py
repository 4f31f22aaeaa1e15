"""Which steps are checked: the last one of the warm-up for its gradient norm, and one that the scaler does not skip."""

from __future__ import annotations

import pytest
import torch
from fit_process import SMALL, bench, measure_here, statuses
from lightning.pytorch.plugins import MixedPrecision
from strangers import ByHand, Data, OwnLoaders, Regression, TokenModel, TokenPairs
from tables import cases
from torch import nn

from lmbench.callbacks import Observer
from lmbench.instruments.window import ProbeKind


@cases("mode", "train_step", "forward_backward")
def test_windows_of_any_length_leave_the_same_gradient_norm_of_the_warmup(mode, tmp_path):
    words = f"--measure.mode={mode}", *SMALL
    others = ("steps=2", "steps=7", "warmup_steps=0")
    short, long, none = (bench(tmp_path, *words, f"--measure.{other}").record for other in others)
    assert short.warmup == long.warmup
    assert short.warmup.gradient_norm > 0
    assert short.probe.training.gradient_norm != long.probe.training.gradient_norm
    assert none.warmup.gradient_norm is None


class Overflow(Observer):
    """Makes the gradients of the first steps that are checked infinite."""

    def __init__(self, left):
        self.left = left

    def on_after_backward(self, trainer, module):
        if self.session.probe_kind is ProbeKind.TRAINING and self.left:
            self.left -= 1
            for parameter in module.parameters():
                parameter.grad.fill_(float("inf"))


@cases("""
- [skipped, is_checked]
- [0, true]
- [2, true]
- [100, false]
""")
def test_after_steps_that_the_scaler_skipped_the_next_one_is_checked(skipped, is_checked):
    trainer = {"precision": "16-mixed", "callbacks": [Overflow(skipped)]}
    record = measure_here(trainer=trainer, probe_steps=1).record
    assert record.probe.training.is_skipped == (not is_checked)
    assert [statuses(record)[name] for name in ("inputs", "trained")] == ["pass", "pass" if is_checked else "n/a"]


def test_a_step_without_a_loss_is_not_checked():
    # Every second batch has none, and the sixth step is the first that is probed.
    run = measure_here(Regression(answer="none"), Data(), warmup_steps=2, steps=3, probe_steps=1)
    assert run.record.probe.training.is_skipped is False
    assert statuses(run.record)["gradients"] == "pass"


class Compiling(TokenModel):
    def __init__(self):
        super().__init__()
        self.body = torch.compile(self.body, backend="eager")


def test_a_module_that_compiles_itself_is_not_warned_of_hooks_of_the_check(recwarn):
    run = measure_here(Compiling(), TokenPairs(), warmup_steps=2, steps=3, probe_steps=1)
    assert statuses(run.record)["outputs"] == "pass"
    assert not [warning for warning in recwarn if "hooks" in str(warning.message)]


class Unusual(OwnLoaders):
    """Multiplies by one weight of an unusual kind."""

    def __init__(self, weight):
        super().__init__()
        self.net = weight

    def training_step(self, batch, batch_idx):
        rows = batch[0]
        if isinstance(self.net, nn.Embedding):
            return self.net(rows.abs().long()).pow(2).mean()
        return (rows * self.net).abs().pow(2).mean()


@cases("weight", nn.Parameter(torch.ones(16) + 1j), nn.Embedding(9, 2, sparse=True))
def test_complex_parameters_and_sparse_gradients_are_checked_like_others(weight):
    run = measure_here(Unusual(weight), probe_steps=1).record
    training = run.probe.training
    assert (training.parameters, training.missing_gradients, training.zero_gradients) == (1, [], [])
    assert (run.warmup.gradient_norm > 0, training.gradient_norm > 0) == (True, True)


class Flip(torch.optim.SGD):
    """Turns the sign of every weight, which leaves its norm as it is."""

    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.neg_()
        return loss


def test_parameters_that_change_their_sign_have_moved():
    module = OwnLoaders()
    module.configure_optimizers = lambda: Flip(module.parameters(), lr=0.1)
    assert measure_here(module, probe_steps=1).record.probe.training.unmoved_parameters == []


class Blind(OwnLoaders):
    """Sees only noise."""

    def training_step(self, batch, batch_idx):
        return nn.functional.dropout(self.net(torch.ones(4, 16))).pow(2).mean()


def test_dropout_is_no_dependence_on_the_batch():
    training = measure_here(Blind(), probe_steps=1).record.probe.training
    assert (training.has_new_batch, training.depends_on_batch) == (True, False)


class Claiming(TokenModel):
    """Counts more tokens than it takes, by a factor, or takes only a part of the batch."""

    def __init__(self, factor=1, rows=4):
        super().__init__()
        self.factor, self.rows = factor, rows

    def tokens_per_batch(self, batch):
        return self.factor * batch[0].numel()

    def training_step(self, batch):
        return super().training_step([part[: self.rows] for part in batch])


@cases("""
- [claim, status, message]
- [{}, pass, '']
- [{factor: 2}, warn, at least 50% of the tokens that count reach no embedding of the step]
- [{rows: 1}, warn, at least 75% of the tokens that count reach no embedding of the step]
""")
def test_tokens_that_count_without_being_computed_are_told(claim, status, message):
    batches = [tuple(pair) for pair in torch.randint(50, (20, 2, 4, 8))]
    run = measure_here(Claiming(**claim), batches, probe_steps=1).record
    guard = {guard.name: guard for guard in run.guards}["tokens"]
    assert (guard.status, guard.message) == (status, message)


class Preferring(TokenModel):
    """Takes a chosen and a rejected text, of which only one counts."""

    def training_step(self, batch):
        return super().training_step([batch["chosen"]] * 2) - super().training_step([batch["rejected"]] * 2)


def test_tokens_that_are_computed_without_being_counted_are_told():
    batches = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in torch.randint(50, (20, 2, 4, 8))]
    run = measure_here(Preferring(), batches, probe_steps=1).record
    guard = {guard.name: guard for guard in run.guards}["uncounted_tokens"]
    assert (guard.status, guard.value, run.window.tokens) == ("warn", 1.0, 4 * 8 * run.window.steps)


@cases("dtype | answer", (torch.float32, False), (torch.bfloat16, None))
def test_equal_losses_of_16_bit_tell_nothing_of_their_batches(dtype, answer):
    class Rounded(Blind):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).to(dtype)

    assert measure_here(Rounded(), probe_steps=1).record.probe.training.depends_on_batch is answer


@cases("batch", (torch.eye(16).to_sparse(),), ("a batch",))
def test_batches_without_tensors_that_pytorch_compares_are_neither_new_nor_old(batch):
    class Counted(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step([torch.eye(16)], batch_idx)

    run = measure_here(Counted(), batch, probe_steps=1)
    assert (run.outcome, run.record.probe.training.has_new_batch) == ("ok", None)


def test_the_loss_scale_is_taken_only_out_of_gradients_that_still_have_it():
    def gradient_norm(**flags):
        module = ByHand()
        first, second = module.net
        # Lightning leaves the scale to fused optimizers alone.
        module.configure_optimizers = lambda: [
            torch.optim.SGD(first.parameters(), lr=1e-6, fused=True), torch.optim.SGD(second.parameters(), lr=1e-6)
        ]  # fmt: skip
        run = measure_here(module, Data(), precision=None, probe_steps=1, trainer=flags)
        return run.record.probe.training.gradient_norm

    torch.manual_seed(0)
    expected = gradient_norm()
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert gradient_norm(plugins=MixedPrecision("16-mixed", "cpu", scaler)) == pytest.approx(expected, rel=0.05)


class Adding(OwnLoaders):
    """Never zeroes its gradients."""

    def optimizer_zero_grad(self, *_):
        pass


@cases("""
- [optimizer, micro_batches, count, status]
- [SGD, 2, 1, pass]
- [LBFGS, 1, 4, warn]
""")
def test_an_optimizer_that_computes_each_batch_several_times_is_told(optimizer, micro_batches, count, status):
    module = OwnLoaders()
    options = {"max_iter": 4, "tolerance_grad": 0, "tolerance_change": 0} if optimizer == "LBFGS" else {}
    module.configure_optimizers = lambda: getattr(torch.optim, optimizer)(module.parameters(), lr=1e-3, **options)
    run = measure_here(module, probe_steps=1, trainer={"accumulate_grad_batches": micro_batches}).record
    assert (run.probe.training.backward_count, statuses(run)["closures"]) == (count, status)


class Rare(OwnLoaders):
    """Trains in eval mode, and updates with every second batch."""

    def on_train_start(self):
        self.eval()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer.step(optimizer_closure)
        else:
            optimizer_closure()


def test_gradients_that_add_up_and_batches_without_an_update_are_told_also_in_eval_mode():
    adding, rare = (measure_here(kind(), steps=4, probe_steps=1).record for kind in (Adding, Rare))
    assert [statuses(adding)[name] for name in ("kept_gradients", "updates")] == ["fail", "pass"]
    assert [statuses(rare)[name] for name in ("gradients", "updates")] == ["pass", "warn"]
    phases = [phase.mean_s for name, phase in rare.phases.items() if name != "step"]
    assert sum(phases) == pytest.approx(rare.phases.step.mean_s)


class Resting(OwnLoaders):
    """Leaves out the backward pass of every second batch."""

    is_resting = False

    def backward(self, loss):
        self.is_resting = not self.is_resting
        if not self.is_resting:
            super().backward(loss)


@cases("mode", "train_step", "forward_backward")
@cases("steps", 4, 5)
def test_work_that_every_second_step_leaves_out_fails_wherever_the_window_ends(steps, mode):
    run = measure_here(Resting(), warmup_steps=2, steps=steps, probe_steps=1, mode=mode).record
    assert statuses(run)["gradients"] == "fail"
    assert (run.probe.training.has_new_batch, run.probe.training.depends_on_batch) == (True, True)


class Experts(OwnLoaders):
    """Sends each batch to one of two experts in turn; a third one gets none."""

    def __init__(self, count):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 1) for _ in range(count))

    def training_step(self, batch, batch_idx):
        return self.experts[batch_idx % 2](batch[0]).pow(2).mean() + super().training_step(batch, batch_idx)


@cases("""
- [mode, count, silent, status]
- [train_step, 2, [], pass]
- [train_step, 3, [experts.2.weight, experts.2.bias], warn]
- [forward_backward, 2, [], pass]
""")
def test_an_expert_without_a_token_is_checked_in_a_later_step(mode, count, silent, status):
    record = measure_here(Experts(count), mode=mode, probe_steps=1).record
    assert (record.probe.training.missing_gradients, statuses(record)["gradients"]) == (silent, status)
    assert statuses(record)["trained"] == ("pass" if mode == "train_step" else "n/a")
