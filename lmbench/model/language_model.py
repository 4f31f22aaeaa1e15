"""The Transformer as a LightningModule: the default model of ``lmbench fit``."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lmbench.errors import UsageError, check_at_least, check_divides, check_known, unknown
from lmbench.instruments.recomputing import RecomputeOptions, recomputed_flops
from lmbench.model.attention import Size, attention_kind
from lmbench.model.attention_check import check_again, check_attention, use_in
from lmbench.model.network_module import NetworkModule
from lmbench.model.optimizers import BY_MATRIX, choose_optimizer
from lmbench.model.transformer import Transformer
from lmbench.precision import PRECISIONS, find_precision
from lmbench.records.run import AttentionCheck
from lmbench.records.vocabulary import Values
from lmbench.sizes import DEFAULT_VOCAB_SIZE, FlopCount, forward_flops, resolve_shape, size_name

LOSSES = ("whole", "chunked")
#: How the layers of a block are split over devices (Shoeybi et al. 2019): the last projection of each by rows, all
#: others by columns, so that each layer needs one sum over devices.
SPLIT = {
    "attention": "shared_input", "attention.q": "colwise", "attention.k": "colwise", "attention.v": "colwise",
    "attention.output": "rowwise",
    "ffn": "shared_input", "ffn.gate": "colwise", "ffn.up": "colwise", "ffn.down": "rowwise",
}  # fmt: skip


class LanguageModel(NetworkModule):
    """A decoder-only Transformer with its optimizer. Batches are (tokens, targets), int64 of shape ``batch seq``.

    The network is built on the device, always from float32 weights, so that one seed gives the same initial weights in
    every precision. Steps return the loss, and neither log nor synchronize.

    Args:
        size: a named size. A dimension below replaces the size's; with null all dimensions are needed.
        d_model: width of the residual stream.
        d_ff: width of the feed-forward layer.
        num_layers: number of blocks.
        num_heads: attention heads per block; must divide d_model into an even head_dim.
        vocab_size: number of token ids.
        context_length: the longest sequence, in tokens.
        attention: naive, sdpa (PyTorch chooses), sdpa_flash, sdpa_efficient, sdpa_cudnn, sdpa_math, flex, or a function
            of your own, my_module:my_attention, called as PyTorch's scaled_dot_product_attention is.
        residual_dtype: bf16 keeps the residual stream in bfloat16 under bfloat16 autocast; null is the embedding's
            float32.
        fused_projections: one product computes q, k and v, another one gate and up; qkv fuses the first alone. The
            network stays the same, and weights of all forms load into each other.
        loss: whole, or chunked: computed in chunks of tokens, and again in the backward pass, so that only one chunk's
            logits are in memory.
        optimizer: any of torch.optim by name (AdamW, SGD with momentum, Muon for the hidden layers' matrices, ...).
        optimizer_variant: the implementation: fused (one kernel), foreach (horizontally fused) or loop (over
            parameters); null is fused for Adam, AdamW and SGD.
        learning_rate: the optimizer's learning rate.
        weight_decay: on every parameter; AdamW's is decoupled.
        betas: AdamW's averaging coefficients; the first is SGD's momentum.

    Raises:
        UsageError: a setting is out of its range, or (in ``setup``) the attention has no kernel on this device, or a
            function of your own is wrong.
    """

    #: Set while the backward pass computes blocks again.
    recompute_options: RecomputeOptions | None = None

    def __init__(
        self,
        *,
        size: str | None = "small",
        d_model: int | None = None,
        d_ff: int | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        context_length: int = 512,
        attention: str = "sdpa",
        residual_dtype: str | None = None,
        fused_projections: bool | Literal["qkv"] = False,
        loss: str = "whole",
        optimizer: str = "AdamW",
        optimizer_variant: str | None = None,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        self.shape = resolve_shape(
            size, vocab_size, d_model=d_model, d_ff=d_ff, num_layers=num_layers, num_heads=num_heads
        )
        self._kind = attention_kind(attention)
        self._attention_check: AttentionCheck | None = None
        check_known("loss", loss, LOSSES)
        if residual_dtype is not None:
            check_known("residual_dtype", residual_dtype, ["bf16"])
        if fused_projections not in (False, True, "qkv"):
            raise unknown("fused_projections", str(fused_projections), ["true", "false", "qkv"])
        check_at_least(1, "data", context_length=context_length)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.attention = attention
        self.residual_dtype = residual_dtype
        self.fused_projections = fused_projections
        self.loss = loss
        self.optimizer = choose_optimizer(
            optimizer, optimizer_variant, lr=learning_rate, weight_decay=weight_decay, betas=betas
        )
        name = self.optimizer.label.split()[0]
        if fused_projections and name in BY_MATRIX:
            raise UsageError(
                f"model.fused_projections makes one matrix of several, and {name} treats each matrix by itself: that "
                "is another training; leave out one of them"
            )

    def setup(self, stage: str) -> None:
        precision = find_precision(str(self.trainer.precision)) or PRECISIONS["bf16-mixed"]
        if self.residual_dtype and (precision.compute != "bfloat16" or not precision.is_mixed):
            raise UsageError(
                f"model.residual_dtype {self.residual_dtype} is for autocast to bfloat16, and trainer.precision is "
                f"{precision.name}; give bf16-mixed, or leave it out"
            )
        batch_size = getattr(self.trainer.datamodule, "batch_size", 1)  # type: ignore[attr-defined]
        size = Size(batch_size, self.shape.num_heads, self.context_length, self.shape.head_dim)
        self._use = use_in(self.trainer, size, True, stage, is_strided=True)
        self._attention_check = check_attention(self._kind, self._use)

    def check_again(self) -> None:
        """Check a user's attention function again after the run."""
        check_again(self._kind, self._use)

    def build_network(self) -> Transformer:
        return Transformer(
            self.shape,
            self.context_length,
            self.attention,
            residual_dtype=torch.bfloat16 if self.residual_dtype else None,
            fused=self.fused_projections,
            is_chunked=self.loss == "chunked",
        )

    def forward(self, tokens: Tensor) -> Any:
        """Logits, ``batch seq vocab``."""
        return self.network(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.network(*batch)

    validation_step = training_step

    def tokens_per_batch(self, batch: tuple[Tensor, Tensor]) -> int:
        """Tokens that one batch trains on."""
        return batch[0].numel()

    def flops_per_token(self) -> FlopCount:
        """Model FLOPs of one forward pass per token, at the model's context length."""
        # A chunked loss computes the head's product again.
        recomputed = 2 * self.shape.d_model * self.shape.vocab_size if self.loss == "chunked" else 0
        if self.recompute_options is not None:
            recomputed += recomputed_flops(
                self.recompute_options, self.shape, self.context_length, self._kind.is_written_out
            )
        return replace(forward_flops(self.shape, self.context_length), recomputed_per_token_flops=recomputed)

    def describe(self) -> Values:
        """Shape and choices, for the run's record."""
        return {
            "size": size_name(self.shape),
            **asdict(self.shape),
            "attention": self.attention,
            "attention_check": self._attention_check,
            "checkpoint": "none",
            "residual_dtype": self.residual_dtype,
            "fused_projections": self.fused_projections,
            "loss": self.loss,
            "optimizer": self.optimizer.label,
            "is_fresh": self.is_fresh,
        }

    def tensor_parallel_plan(self, size: int) -> dict[str, str]:
        """How modules are split over `size` devices: by each block's heads, and by the width of its feed-forward layer.

        Raises:
            UsageError: the size does not divide them, or projections are fused: a device's share of the fused matrix
                would not be that of its heads.
        """
        if self.fused_projections:
            raise UsageError("model.fused_projections cannot be split over devices by heads; leave it out")
        check_divides(size, num_heads=self.shape.num_heads, d_ff=self.shape.d_ff)
        return {f"network.blocks.*.{name}": style for name, style in SPLIT.items()}
