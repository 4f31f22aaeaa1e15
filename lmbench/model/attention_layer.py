"""Attention alone as a LightningModule. q, k and v are its parameters, and a fixed random gradient of the output starts
its backward pass."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend

from lmbench.errors import check_at_least
from lmbench.model.attention import ATTENTION, AttentionKind, Size, attention_kind, keep_mask
from lmbench.model.attention_check import check_again, check_attention, use_in
from lmbench.precision import find_precision
from lmbench.records.vocabulary import Values
from lmbench.sizes import FORMULA_SOURCE, FlopCount


class AttentionLayer(LightningModule):
    """softmax(q k^T / sqrt(head_dim)) v on random inputs, forward and backward: attention and nothing around it.

    q, k, v and the gradient of the output are drawn once, standard normal, in the precision's compute dtype, as a
    model's projections would give them. `training_step` returns an empty tensor, so that there is no loss to be
    computed, divided or copied; `backward` starts at the output with the drawn gradient. The mode is
    `forward_backward` unless set; there is nothing to optimize.

    Args:
        heads: attention heads.
        head_dim: width of a head.
        causal: no position sees a later one.
        attention: naive, sdpa (PyTorch chooses), sdpa_flash, sdpa_efficient, sdpa_cudnn, sdpa_math, flex, or a function
            of your own, my_module:my_attention, called as PyTorch's scaled_dot_product_attention is.
        batch_size: follows the data's.
        context_length: follows the data's.

    Raises:
        UsageError: a setting is out of its range, or (in ``setup``) the attention cannot do this shape and dtype on
            this device, or a function of your own is wrong.
    """

    q: nn.Parameter
    k: nn.Parameter
    v: nn.Parameter
    gradient: Tensor
    mask: Any

    def __init__(
        self,
        *,
        heads: int = 1,
        head_dim: int = 64,
        causal: bool = False,
        attention: str = "sdpa",
        batch_size: int = 4,
        context_length: int = 512,
    ) -> None:
        super().__init__()
        check_at_least(1, "model", heads=heads, head_dim=head_dim)
        check_at_least(1, "data", batch_size=batch_size, context_length=context_length)
        self.size = Size(batch_size, heads, context_length, head_dim)
        self.causal, self.attention, self._kind = causal, attention, attention_kind(attention)
        self.core = self._kind.core(head_dim, causal)
        self._output: Any = None

    def setup(self, stage: str) -> None:
        self._use = use_in(self.trainer, self.size, self.causal, stage, is_strided=False)
        self._check = check_attention(self._kind, self._use)

    def check_again(self) -> None:
        """Check a user's attention function again after the run."""
        check_again(self._kind, self._use)

    def configure_model(self) -> None:
        """Draw the inputs once, on the current device."""
        if hasattr(self, "q"):
            return
        self.q, self.k, self.v = (nn.Parameter(torch.randn(self.size, dtype=self._use.dtype)) for _ in "qkv")
        self.register_buffer("gradient", torch.randn(self.size, dtype=self._use.dtype), persistent=False)
        keep_mask(self, self._kind.mask(self.size.seq, self.causal))
        self._no_loss = torch.empty(0, device=self.q.device)

    def forward(self) -> Any:
        """The output, ``batch heads seq head_dim``."""
        with self._kind.chosen():
            return self.core(self.q, self.k, self.v, self.mask)

    def training_step(self, batch: tuple[int, int], batch_idx: int) -> Tensor:
        self._output = self()
        return self._no_loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Start the backward pass at the output with the drawn gradient; `loss` is empty."""
        output, self._output = self._output, None
        output.backward(self.gradient)

    def on_train_batch_end(self, outputs: Any, batch: tuple[int, int], batch_idx: int) -> None:
        # Without a backward pass the graph still exists. It must not be in memory during the next forward pass.
        self._output = None

    def validation_step(self, batch: tuple[int, int], batch_idx: int) -> None:
        self()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """An optimizer that frees gradients; it never steps."""
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def tokens_per_batch(self, batch: tuple[int, int]) -> int:
        """Positions in a batch."""
        return self.size.batch * self.size.seq

    def flops_per_token(self) -> FlopCount:
        """FLOPs of one forward pass for each token, by shape: two products of 2 * seq * head_dim for every head."""
        full = 4 * self.size.seq * self.size.heads * self.size.head_dim
        return FlopCount(full, full // 2 if self.causal else None, FORMULA_SOURCE, 0)

    def count_saved_bytes(self) -> int:
        """Run one forward pass and count the bytes that autograd saves besides the inputs, each storage once."""
        sizes = {}

        def count(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            # A softmax saves its own output, and would hold itself.
            return tensor.detach()

        # The output keeps saved tensors in memory, so that no two of them have the same address.
        with self.trainer.precision_plugin.train_step_context(), saved_tensors_hooks(count, lambda tensor: tensor):
            output = self()
        del output
        blocks = () if self.mask is None or isinstance(self.mask, Tensor) else self.mask.as_tuple()
        for input_part in (*self.parameters(), *self.buffers(), *blocks):
            if isinstance(input_part, Tensor):
                sizes.pop(input_part.untyped_storage().data_ptr(), None)
        return sum(sizes.values())

    def expected_saved_bytes(self) -> int | None:
        """Bytes that autograd saves besides the inputs in eager attention, by shape. None where unknown."""
        precision = find_precision(str(self.trainer.precision))
        has_float_softmax = precision is not None and precision.is_mixed and self._use.device.type != "cpu"
        return (self._chosen_by_pytorch() or self._kind).saved_bytes(self.size, self._use.dtype, has_float_softmax)

    def _chosen_by_pytorch(self) -> AttentionKind | None:
        """The back end that PyTorch chooses for `sdpa`. None for other attention, or for one without a name here."""
        if self._kind is not ATTENTION["sdpa"]:
            return None
        backend = SDPBackend(torch._fused_sdp_choice(self.q, self.k, self.v, is_causal=self.causal))
        return next((kind for kind in ATTENTION.values() if kind.backend == backend), None)

    def describe(self) -> Values:
        """Shape and choices, for the run's record."""
        backend = self._chosen_by_pytorch()
        return {
            "d_model": self.size.heads * self.size.head_dim,
            "num_heads": self.size.heads,
            "head_dim": self.size.head_dim,
            "is_causal": self.causal,
            "attention": self.attention,
            "attention_backend": None if backend is None else backend.name,
            "attention_check": self._check,
        }

    def compile_targets(self) -> list[nn.Module]:
        """The modules that ``--trainer.compile`` compiles."""
        return [self.core]
