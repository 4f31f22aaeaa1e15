"""Model FLOPs: the formula against PyTorch's counter, and the counter on a user's modules."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning.pytorch import LightningModule
from strangers import TokenModel
from tables import cases
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lmbench.flop_counter import COUNTER_SOURCE, counter_flops
from lmbench.instruments.subject import count_flops
from lmbench.model.transformer import Transformer
from lmbench.records.run import Flops
from lmbench.sizes import SIZES, FlopCount, ModelShape, attention_flops, forward_flops

SHAPES = [
    (SIZES["tiny"], 16, 2),
    (SIZES["2.7B"], 512, 4),
    (ModelShape(96, 200, 3, 6, vocab_size=777), 33, 1),
]


@cases("shape | context_length | batch_size", *SHAPES)
def test_formula_equals_the_counter_forward_and_backward(shape, context_length, batch_size):
    with torch.device("meta"):
        network = Transformer(shape, context_length, "naive")
        tokens = torch.zeros(batch_size, context_length, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = network(tokens, tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    expected = forward_flops(shape, context_length).per_token_flops * tokens.numel()
    assert forward.get_total_flops() == expected
    # Backward has exactly twice the products: even the first layer's input, the embedding, needs a gradient.
    assert backward.get_total_flops() == 2 * expected


def test_fused_attention_counts_as_in_pytorch_also_with_fewer_heads_of_keys():
    query, key, value = (2, 8, 16, 32), (2, 2, 24, 32), (2, 2, 24, 64)
    assert attention_flops(query, key, value) == sdpa_flop_count(query, key, value)
    backward = sdpa_backward_flop_count((2, 8, 16, 64), query, key, value)
    assert attention_flops(query, key, value, is_backward=True) == backward


def test_causal_count_leaves_out_half_of_attention():
    shape = ModelShape(8, 16, num_layers=3, num_heads=2, vocab_size=10)
    count = forward_flops(shape, context_length=32)
    assert count.per_token_flops - count.causal_per_token_flops == 3 * (4 * 32 * 8) // 2


TINY_TOKENS = torch.zeros(2, 16, dtype=torch.long)


class TakesBatch(nn.Sequential):
    def forward(self, batch):
        return self[0](*batch)


def refuse(*_):
    raise AssertionError("compiled")


@cases("attention", "naive", "sdpa", "sdpa_flash", "sdpa_math")
def test_counter_on_a_fake_copy_counts_fused_attention_too_and_compiles_nothing(attention):
    network = Transformer(SIZES["tiny"], 16, attention)
    network.compile(backend=refuse)
    before = torch.get_rng_state()
    count = counter_flops(TakesBatch(network), (TINY_TOKENS, TINY_TOKENS), TINY_TOKENS.numel(), "forward")
    assert count.per_token_flops == forward_flops(SIZES["tiny"], 16).per_token_flops
    assert count.causal_per_token_flops is None
    assert "flop_counter" in count.source
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.gpu
def test_counting_for_a_gpu_is_not_misled_by_kernels_that_pad_head_dim():
    shape = ModelShape(d_model=40, d_ff=64, num_layers=1, num_heads=4, vocab_size=50)
    tokens = TINY_TOKENS.cuda()
    network = TakesBatch(Transformer(shape, 16).to("cuda", torch.bfloat16))
    count = counter_flops(network, (tokens, tokens), tokens.numel(), "forward")
    assert count.per_token_flops == forward_flops(shape, 16).per_token_flops


class Foreign(TokenModel):
    """Its step changes much of the module: it draws dropout, makes tensors on its device, sums up in a plain tensor as
    metrics do, counts steps and prints. It holds its data."""

    def __init__(self):
        super().__init__()
        self.body.append(nn.Dropout(0.5))
        self.total, self.steps = torch.zeros(()), 0
        self.dataset = TensorDataset(torch.ones(3))

    def training_step(self, batch):
        loss = super().training_step(batch) + torch.zeros(1, device=self.device)
        self.total += loss.sum()
        self.steps += 1
        print(f"loss {loss.item():.3f}")
        return loss


def test_counter_runs_a_foreign_training_step_and_leaves_it_as_it_was(capsys):
    module = Foreign()
    weights, attributes = copy.deepcopy(module.state_dict()), set(vars(module))
    count = counter_flops(module, (TINY_TOKENS, TINY_TOKENS), TINY_TOKENS.numel(), "training_step")
    assert count.per_token_flops == 2 * 8 * 50
    assert set(vars(module)) == attributes
    torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in module.parameters())
    assert (type(module.total), float(module.total), module.steps, module.kept) == (Tensor, 0.0, 0, [])
    assert capsys.readouterr().out == ""


@torch.library.custom_op("lmbench_test::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


class Applied(LightningModule):
    """Its step is a function of a layer and of the batch."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4, bias=False), function

    def training_step(self, batch):
        return self.function(self.linear, batch)


#: FLOPs of a token in a layer of 4 x 4.
PRODUCT = 2 * 4 * 4


def counted(module, batch=None, tokens=4):
    """What forward and backward count."""
    batch = torch.ones(4, 4, requires_grad=True) if batch is None else batch
    return counter_flops(module, batch, tokens, "training_step", has_backward=True)


def test_operators_the_counter_cannot_know_are_named():
    count = counter_flops(Applied(lambda _, x: double(x) @ x), torch.ones(4, 4), 4, "training_step")
    assert count == FlopCount(PRODUCT, None, count.source)
    assert "not counted: lmbench_test::double" in count.source


def test_a_backward_that_no_fake_tensor_can_run_counts_as_two_forward_passes_which_the_source_says():
    flops, module = Flops(), Applied(lambda linear, x: double(linear(x)).sum())
    count_flops(flops, module, "train_step", "fit", torch.ones(4, 4), 4)
    assert flops.per_token_flops == 3 * PRODUCT
    assert flops.source.endswith("not counted: lmbench_test::double; the backward is taken as two forward passes")


@cases("kernel", "flash", "efficient", "cudnn")
def test_the_backward_of_a_fused_kernel_that_a_module_selects_counts_as_twice_its_forward(kernel):
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    options = (0.0, True) if kernel == "flash" else (None, True, 0.0, True)
    module = Applied(lambda _, x: operator(x, x, x, *options)[0].sum())
    count = counted(module, torch.ones(2, 4, 16, 8, requires_grad=True), 32)
    assert (count.per_token_flops, count.backward_per_token_flops) == (4 * 4 * 16 * 8, None)


@cases("kind, products", ("conv1d", 1), ("conv_transpose1d", 4))
def test_a_convolution_of_groups_counts_the_channels_of_each_group_backward_too(kind, products):
    convolve = getattr(nn.functional, kind)
    count = counted(Applied(lambda linear, x: convolve(x, linear.weight[:, None], groups=4).sum()), tokens=1)
    assert (count.per_token_flops, count.backward_per_token_flops) == (products * PRODUCT, None)


def test_an_encoder_of_pytorch_counts_in_inference_too():
    layer = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval()
    count = counter_flops(layer, torch.ones(1, 16, 4), 16, "forward")
    assert count.per_token_flops == 2 * (4 * 4 * 4 + 2 * 4 * 8) + 4 * 16 * 4


def test_a_gradient_that_the_step_takes_itself_is_no_recomputing():
    def penalty(linear, x):
        return torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)[0].sum()

    count = counted(Applied(penalty))
    assert (count.per_token_flops, count.backward_per_token_flops) == (2 * PRODUCT, None)
    assert count.recomputed_per_token_flops == 0


def test_a_backward_through_a_function_that_holds_the_modules_own_weights_leaves_them_without_gradients():
    module = Applied(lambda _, x: (2 * module.linear(x)).sum())
    count = counted(module, torch.ones(4, 4))
    assert (count.per_token_flops, module.linear.weight.grad) == (PRODUCT, None)


def test_a_module_that_is_called_without_a_graph_on_a_part_of_what_has_one_counts_once():
    def watched(linear, x):
        y = linear(x)
        with torch.no_grad():
            linear(y[:2])
        return y.sum()

    count = counted(Applied(watched))
    assert (count.per_token_flops, count.backward_per_token_flops) == (PRODUCT * 3 // 2, 2 * PRODUCT)


class Parts(nn.Module):
    """A part without a graph, a frozen one and a trained one that is computed again, and a product of no formula."""

    def __init__(self):
        super().__init__()
        self.teacher, self.frozen, self.trained = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)

    def training_step(self, x):
        with torch.no_grad():
            known = self.teacher(x)
        return (checkpoint(self.trained, self.frozen(x), use_reentrant=True) @ x[0] + known.sum()).sum()


def test_the_backward_counts_what_it_multiplies_and_products_without_a_formula_are_named():
    count = counted(Parts())
    # The frozen part has a gradient of its input alone, the trained one of its weight too.
    assert (count.per_token_flops, count.backward_per_token_flops) == (3 * PRODUCT, 3 * PRODUCT)
    assert count.recomputed_per_token_flops == PRODUCT
    assert "not counted: aten::mv" in count.source


class Experts(nn.Module):
    """A token takes `chosen` of the experts; `dispatch` names the way to find the tokens of each."""

    def __init__(self, dispatch, chosen):
        super().__init__()
        self.dispatch, self.chosen = getattr(self, dispatch), chosen
        self.router = nn.Linear(16, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(8))

    def training_step(self, x):
        weights, chosen = torch.topk(self.router(x).softmax(-1), self.chosen)
        out = torch.zeros_like(x)
        for expert, tokens in zip(self.experts, self.dispatch(weights, chosen), strict=True):
            out = out.index_add(0, tokens, expert(x[tokens]))
        return out.sum()

    def where(self, weights, chosen):
        return [torch.where(chosen == expert)[0] for expert in range(8)]

    def one_hot(self, weights, chosen):
        return [torch.where(mask)[1] for mask in nn.functional.one_hot(chosen, 8).permute(2, 1, 0)]

    def mask(self, weights, chosen):
        masks = [(chosen == expert).any(-1) for expert in range(8)]
        return [torch.arange(len(mask))[mask] if mask.any() else mask.nonzero()[:, 0] for mask in masks]

    def gates(self, weights, chosen):
        gates = torch.zeros(len(chosen), 8).scatter(1, chosen, weights)
        return [(gates[:, expert] > 0).nonzero()[:, 0] for expert in range(8)]

    def sort(self, weights, chosen):
        counts = torch.bincount(chosen.flatten(), minlength=8).tolist()
        return (chosen.flatten().argsort() // self.chosen).split(counts)


@cases("chosen", 1, 2)
@cases("dispatch", "where", "one_hot", "mask", "gates", "sort")
def test_a_token_counts_the_experts_that_a_loop_gives_it_to(dispatch, chosen):
    module = Experts(dispatch, chosen)
    count = counted(module, torch.ones(64, 16), 64)
    assert count.per_token_flops == 2 * 16 * 8 + chosen * 2 * 16 * 16
    assert count.source.endswith("; the same number of tokens for each expert")
    assert module.training_step(torch.rand(64, 16)).isfinite()


class Choosing(nn.Module):
    """Multiplies only some rows, which the batch and constants tell; `rows` names the way."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.table = getattr(self, rows), nn.Embedding(8, 16)
        self.head = nn.Linear(16, 16, bias=False)

    def training_step(self, batch):
        ids = batch["ids"]
        return self.head(self.rows(self.table(ids), batch)).sum()

    def labelled(self, rows, batch):
        return rows[batch["ids"] != 0]

    def random(self, rows, batch):
        chance = torch.rand(4, 1) * 0
        mask = torch.rand(4, 8) >= chance
        mask[batch["ids"] == 0] = False
        return rows[mask]

    def packed(self, rows, batch):
        return torch.cat([part[:-1] for part in rows.flatten(0, 1).split(batch["lengths"].tolist())])

    def found(self, rows, batch):
        places = batch["ids"].flatten().nonzero()[:, 0]
        return rows.flatten(0, 1)[: int(places[20])]

    def causal(self, rows, batch):
        mask = torch.full((8, 8), -torch.inf).triu(1)
        assert not torch.isnan(rows).any()
        return rows[:3] if bool((mask == nn.Transformer.generate_square_subsequent_mask(8)).all()) else rows


@cases("""
- [rows, count]
- [labelled, 24]
- [random, 24]
- [packed, 29]
- [found, 27]
- [causal, 24]
""")
def test_values_that_follow_from_the_batch_and_constants_are_known_to_a_count(rows, count):
    ids = torch.arange(32).view(4, 8) % 4
    batch = {"ids": ids, "lengths": torch.tensor([10, 2, 20])}
    counted_once = counted(Choosing(rows), batch, 32)
    assert counted_once.per_token_flops == 2 * 16 * 16 * count / 32
    assert counted_once.source == COUNTER_SOURCE
    assert torch.equal(ids, torch.arange(32).view(4, 8) % 4)
