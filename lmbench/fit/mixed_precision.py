"""Lightning's mixed precision with two repairs, and fp8 linear layers by torchao on top of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn
from torch.distributed.tensor import DTensor

from lmbench.callbacks.events import LeanCallback
from lmbench.device import device_of
from lmbench.errors import UsageError
from lmbench.instruments.subject import token_counter
from lmbench.precision import PRECISIONS
from lmbench.records.run import Fp8Layers

#: The repairs of `RepairedMixedPrecision`, as the record lists them.
REPAIRS = (
    "autocast keeps its cache of cast weights (Lightning 2.6 turns it off: issue #21611)",
    "clipping works with a fused optimizer where there is no loss scaler (Lightning 2.6 refuses: issue #21435)",
)
#: What fp8 changes beside the layers, as the record lists it. The last applies only if Inductor compiles rowwise fp8.
FP8_CHANGES = (
    "validation runs under no_grad (torchao's tensors cannot be cast in inference mode)",
    "Inductor rounds wherever eager code does (else rowwise fp8 got NaN of a compiled norm: PyTorch issue #150859)",
)
#: `torch._scaled_mm` needs multiples of this: both sides of a weight, and the tokens that its gradient sums over.
FP8_MULTIPLE = 16
ROWWISE = "fp8-rowwise"


class RepairedMixedPrecision(MixedPrecision):
    """`MixedPrecision` with autocast's weight cache on, and clipping allowed for fused optimizers without a scaler."""

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=PRECISIONS[self.precision].compute_dtype())

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # Lightning refuses because a fused optimizer unscales gradients itself. Without a scaler it unscales nothing.
        owner = Precision if self.scaler is None else MixedPrecision
        owner.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


class Fp8Precision(RepairedMixedPrecision):
    """bf16-mixed whose linear layers are torchao's `Float8Linear` from `convert_module` to `teardown`.

    Three kinds of layers are not converted. The last layer is a language model's head, whose errors enter the loss
    directly (torchao's example and torchtitan leave it out too). `torch._scaled_mm` takes no sides that 16 does not
    divide. torchao would drop what a subclass adds to `nn.Linear`. The first layer is converted: in a language model it
    is inside a block, since an embedding multiplies nothing.

    Args:
        name: `fp8-tensorwise`, `fp8-rowwise`, or `fp8-tensorwise-fast`, whose products all accumulate in fewer bits.
        strategy: trains the module, on its device.

    Attributes:
        layers: which layers were converted; None before the conversion.

    Raises:
        UsageError: torchao is not installed, the strategy does not support fp8, the GPU has no fp8 units, or (in
            `convert_module`) no layer can be converted.
    """

    def __init__(self, name: str, strategy: Strategy) -> None:
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
            kind = type(strategy).__name__
            raise UsageError(f"precision {name} with trainer.strategy {kind}: not supported; allowed: auto, ddp, fsdp2")
        if (reason := device_of(strategy.root_device).why_no_fp8()) is not None:
            raise UsageError(f"precision {name} on {reason}")
        super().__init__("bf16-mixed", strategy.root_device.type)
        self.precision = cast(Any, name)
        self.layers: Fp8Layers | None = None
        self._originals = dict[str, nn.Linear]()
        self._settings = ExitStack()
        try:
            self._torchao = version("torchao")
        except PackageNotFoundError:
            raise UsageError(f"precision {name} needs torchao, which is not installed: pip install torchao") from None

    def convert_module(self, module: nn.Module) -> nn.Module:
        if self._originals:
            # A strategy that shards layers has converted them already, before Lightning's own call.
            return module
        from torch._inductor import config as inductor
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        linears = {
            name: child for name, child in module.named_modules(remove_duplicate=False) if isinstance(child, nn.Linear)
        }
        reasons = {name: _why_left_out(linear) for name, linear in linears.items()}
        if linears:
            reasons[list(linears)[-1]] = "the last"
        self._module, self._originals = module, {name: linears[name] for name in linears if not reasons[name]}
        left_out = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
        if not self._originals:
            reason = f": {', '.join(_count_alike(left_out))}" if left_out else ", which has none"
            raise UsageError(f"precision {self.precision} converts no linear layer of {type(module).__name__}{reason}")
        recipe = self.precision.removeprefix("fp8-")
        config = Float8LinearConfig.from_recipe_name(recipe.removesuffix("-fast"))
        if recipe.endswith("-fast"):
            # torchao accumulates fast in the forward pass alone.
            fast = config.gemm_config_output
            config = replace(config, gemm_config_grad_input=fast, gemm_config_grad_weight=fast)
        if self.precision == ROWWISE:
            self._settings.enter_context(inductor.patch(emulate_precision_casts=True))
        convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in self._originals)

        class OnCpu(Float8Linear):  # type: ignore[misc]
            """Casts its input under CPU autocast, since torchao looks only at CUDA's autocast and keeps float32."""

            def forward(self, input: torch.Tensor) -> torch.Tensor:
                is_cast = torch.is_autocast_enabled("cpu")
                output: torch.Tensor = super().forward(input.to(torch.bfloat16) if is_cast else input)
                return output

        if self.device == "cpu":
            for name in self._originals:
                module.get_submodule(name).__class__ = OnCpu
        self.layers = Fp8Layers(
            converted=_count_alike(self._originals),
            left_out=_count_alike(left_out),
            converted_count=len(self._originals),
            parameter_count=sum(linear.weight.numel() for linear in self._originals.values()),
            torchao=self._torchao,
        )
        return module

    def teardown(self) -> None:
        # Put the original layers back: a module that a notebook measured is still in use there.
        for name, linear in self._originals.items():
            parent, _, attribute = name.rpartition(".")
            linear._parameters.update(self._module.get_submodule(name)._parameters)
            setattr(self._module.get_submodule(parent), attribute, linear)
        self._originals = {}
        self._settings.close()


class Fp8Tokens(LeanCallback):
    """Raises UsageError for a batch whose number of tokens, if it can be counted, `FP8_MULTIPLE` does not divide."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count = token_counter(pl_module, trainer.datamodule)  # type: ignore[attr-defined]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        tokens = None if batch is None else self._count(batch)
        if (tokens or 0) % FP8_MULTIPLE:
            raise UsageError(
                f"precision {trainer.precision} with {tokens} tokens in a batch; give a multiple of {FP8_MULTIPLE}, "
                "as of --data.context_length"
            )


def _why_left_out(linear: nn.Linear) -> str:
    """Why a layer is not converted; empty for a layer that can be converted."""
    is_plain = type(linear).forward is nn.Linear.forward and isinstance(linear._parameters.get("weight"), nn.Parameter)
    if not is_plain or isinstance(linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "no plain nn.Linear"
    if isinstance(linear.weight, DTensor):
        return "sharded already"
    sides = (linear.in_features, linear.out_features)
    return f"{sides[0]} x {sides[1]}" if any(side % FP8_MULTIPLE for side in sides) else ""


def _count_alike(names: Iterable[str]) -> list[str]:
    """Count names that differ only in a number: `36 net.blocks.*.ffn.gate`."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return [name if count == 1 else f"{count} {name}" for name, count in counts.items()]
