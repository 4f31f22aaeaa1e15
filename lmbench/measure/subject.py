"""What is being measured, as its own module and data tell it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lmbench.flops import FlopCount, mode_multiplier
from lmbench.hardware import peak_flops


def describe_model(module: LightningModule) -> dict[str, Any]:
    """Class, parameter counts, and whatever the module's own `describe() -> dict` adds (its shape, say)."""
    parameters = list(module.parameters())
    own = getattr(module, "describe", None)
    return {
        "name": f"{type(module).__module__}.{type(module).__qualname__}",
        "parameter_count": sum(p.numel() for p in parameters),
        "trainable_parameter_count": sum(p.numel() for p in parameters if p.requires_grad),
        **(own() if callable(own) else {}),
    }


def describe_flops(
    module: LightningModule, mode: str, precision: str, matmul_precision: str, gpu_name: str | None
) -> dict[str, Any]:
    """Model FLOPs per token for the mode, from the module's `flops_per_token() -> FlopCount`, and the device's peak.

    Every figure is null where nobody knows it.
    """
    tell = getattr(module, "flops_per_token", None)
    count: FlopCount | None = tell() if callable(tell) else None
    multiplier = mode_multiplier(mode)
    causal = count.causal_per_token_flops if count else None
    peak = peak_flops(gpu_name, precision, matmul_precision) if gpu_name else None
    return {
        "per_token_flops": count.per_token_flops * multiplier if count else None,
        "causal_per_token_flops": causal * multiplier if causal is not None else None,
        "multiplier": multiplier,
        "source": count.source if count else None,
        "peak_flops_per_s": peak.flops_per_s if peak else None,
        "peak_source": peak.source if peak else None,
    }


def describe_data(trainer: Trainer) -> dict[str, Any]:
    """What the data module's own `describe() -> dict` says; at least its class."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is None:
        return {"source": "the module's own loaders"}
    tell = getattr(data, "describe", None)
    return {
        "name": f"{type(data).__module__}.{type(data).__qualname__}",
        **(tell() if callable(tell) else {}),
    }
