"""The Transformer as a LightningModule: what ``lmbench fit`` trains unless ``--model`` names another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lmbench.errors import UsageError
from lmbench.flops import FlopCount, forward_flops
from lmbench.model.attention import attention_kind, check_attention
from lmbench.model.transformer import Transformer
from lmbench.sizes import DEFAULT_VOCAB_SIZE, resolve_shape, size_name

# "loop" must turn both off: PyTorch takes foreach by itself where neither is set.
ADAMW_FLAGS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"fused": False, "foreach": False},
}


class LanguageModel(LightningModule):
    """A decoder-only Transformer with AdamW, on batches of (tokens, targets), int64 of shape ``batch seq``.

    The network is built in ``configure_model``, on the device and always from float32 weights, so that one
    seed gives the same initial weights in every precision. Steps return the loss and nothing else: no
    logging, no host sync.

    Args:
        size: a named size; the dimensions below override it one by one. With null all of them are needed.
        d_model: width of the residual stream.
        d_ff: width of the feed-forward layer.
        num_layers: number of blocks.
        num_heads: attention heads per block; must divide d_model into an even head_dim.
        vocab_size: number of token ids.
        context_length: the longest sequence, in tokens.
        attention: naive, sdpa (PyTorch chooses), sdpa_flash, sdpa_efficient, sdpa_cudnn or sdpa_math.
        optimizer: AdamW as one fused kernel, as foreach (horizontally fused) or as a plain loop over
            parameters.
        learning_rate: AdamW's learning rate.
        weight_decay: AdamW's decoupled weight decay, on every parameter.
        betas: AdamW's averaging coefficients.

    Raises:
        UsageError: a setting is out of its range, or (in ``setup``) the attention has no kernel on this
            device.
    """

    network: Transformer

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
        optimizer: Literal["fused", "foreach", "loop"] = "fused",
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        self.shape = resolve_shape(
            size,
            d_model=d_model,
            d_ff=d_ff,
            num_layers=num_layers,
            num_heads=num_heads,
            vocab_size=vocab_size,
        )
        attention_kind(attention)
        _check_settings(context_length, optimizer, learning_rate, weight_decay, betas)
        self.size = size
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.attention = attention
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = (betas[0], betas[1])

    def setup(self, stage: str) -> None:
        device = self.trainer.strategy.root_device
        check_attention(self.attention, self.shape, device, matmul_dtype(str(self.trainer.precision)))

    def configure_model(self) -> None:
        """Build the network once, on the current device; Lightning calls this before fit and validate."""
        if not hasattr(self, "network"):
            self.network = Transformer(self.shape, self.context_length, self.attention)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, ``batch seq vocab``."""
        logits: Tensor = self.network(tokens)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.network(*batch)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.network(*batch)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.network(*batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        flags: Any = ADAMW_FLAGS[self.optimizer]
        return torch.optim.AdamW(
            self.parameters(),
            lr=self.learning_rate,
            betas=self.betas,
            weight_decay=self.weight_decay,
            **flags,
        )

    def tokens_per_batch(self, batch: tuple[Tensor, Tensor]) -> int:
        """Tokens that one batch trains on."""
        return batch[0].numel()

    def flops_per_token(self) -> FlopCount:
        """Model FLOPs of one forward pass per token, at the model's context length."""
        return forward_flops(self.shape, self.context_length)

    def describe(self) -> dict[str, Any]:
        """Shape and choices, for the run's record."""
        return {
            "size": size_name(self.shape),
            **asdict(self.shape),
            "attention": self.attention,
            "optimizer": f"AdamW {self.optimizer}",
            "is_fresh": True,
        }

    def compile_targets(self) -> list[torch.nn.Module]:
        """What ``--trainer.compile`` compiles: the network with its loss, as one region."""
        return [self.network]


def matmul_dtype(precision: str) -> torch.dtype:
    """The dtype of matmuls under one of Lightning's precision strings."""
    dtypes = {"16": torch.float16, "32": torch.float32, "64": torch.float64}
    return dtypes.get(precision.partition("-")[0], torch.bfloat16)


def _check_settings(
    context_length: int, optimizer: str, learning_rate: float, weight_decay: float, betas: tuple[float, float]
) -> None:
    if context_length < 1:
        raise UsageError(f"context_length is {context_length}; it must be at least 1")
    if optimizer not in ADAMW_FLAGS:
        raise UsageError(f"unknown optimizer {optimizer!r}; choose one of {', '.join(ADAMW_FLAGS)}")
    if not learning_rate > 0:
        raise UsageError(f"learning_rate is {learning_rate}; it must be above 0")
    if not weight_decay >= 0:
        raise UsageError(f"weight_decay is {weight_decay}; it must not be negative")
    if not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"betas are {betas[0]} and {betas[1]}; each must be at least 0 and below 1")
