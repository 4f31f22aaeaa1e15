"""A causal language model of Hugging Face's transformers, from a config, with random weights and without downloads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lmbench.errors import UsageError, check_divides
from lmbench.flop_counter import unsharded
from lmbench.model.attention import ATTENTION
from lmbench.model.network_module import NetworkModule
from lmbench.model.optimizers import choose_optimizer
from lmbench.records.vocabulary import Values

#: The default context length of lmbench's tokens, if the model takes that many.
_CONTEXT_LENGTH = 512
#: The names in transformers of the dimensions in lmbench's records.
_DIMENSIONS = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}


#: What transformers calls attention that is no back end of PyTorch's fused operator.
_ATTENTION = {"naive": "eager", "flex": "flex_attention"}


class HuggingFace(NetworkModule):
    """A causal language model of transformers with an optimizer.

    A batch is a pair (tokens, targets), or a mapping with `input_ids`, which goes to the model's own loss unchanged.
    The weights are random. They are float32, whatever dtype the config names, until the Trainer's precision converts
    them.

    Args:
        config: the model's config: a JSON file, a folder with a config.json, or the settings themselves, `model_type`
            among them.
        attention: as for lmbench's own model (naive, sdpa, sdpa_flash, ..., flex), or a name that only transformers
            has, such as flash_attention_2; null is transformers' choice.
        optimizer: any of torch.optim by name (AdamW, SGD with momentum, Muon for the hidden layers' matrices, ...).
        optimizer_variant: fused, foreach or loop; null is its default: fused for Adam, AdamW and SGD.
        learning_rate: the optimizer's learning rate.
        weight_decay: on every parameter; AdamW's is decoupled.

    Raises:
        UsageError: transformers is not installed or lacks a setting.
    """

    def __init__(
        self,
        *,
        config: str | Values,
        attention: str | None = None,
        optimizer: str = "AdamW",
        optimizer_variant: str | None = None,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.config = _read_config(config)
        #: The model's name in tables: that of the config's file, or of its folder.
        self.size: str | None = None
        if isinstance(config, str):
            path = Path(config).absolute()
            self.size = (path.parent if path.name == "config.json" else path).name.removesuffix(".json")
        self.attention = attention
        self._kind = ATTENTION.get(attention or "")
        text = self.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.max_context_length: int | None = getattr(text, "max_position_embeddings", None)
        self.optimizer = choose_optimizer(
            optimizer, optimizer_variant, lr=learning_rate, weight_decay=weight_decay, betas=(0.9, 0.95)
        )

    @classmethod
    def data_settings(cls, *, config: str | Values, **_: Any) -> Values:
        """Default settings of lmbench's tokens for a model of this config."""
        return cls(config=config).token_settings()

    def token_settings(self) -> Values:
        """Default settings of lmbench's tokens for this model."""
        longest = self.max_context_length or _CONTEXT_LENGTH
        return {"vocab_size": self.vocab_size, "context_length": min(_CONTEXT_LENGTH, longest)}

    def setup(self, stage: str) -> None:
        length = getattr(self.trainer.datamodule, "context_length", None)  # type: ignore[attr-defined]
        if length is not None and self.max_context_length is not None and length > self.max_context_length:
            raise UsageError(
                f"data.context_length is {length}, beyond the config's max_position_embeddings of "
                f"{self.max_context_length}; give less, or another config"
            )

    def build_network(self) -> Any:
        from transformers import AutoModelForCausalLM

        try:
            name = self.attention if self._kind is None else _ATTENTION.get(self._kind.name, "sdpa")
            return AutoModelForCausalLM.from_config(self.config, dtype=torch.float32, attn_implementation=name)
        except (ImportError, ValueError) as error:
            raise UsageError(f"transformers refuses: {_first_sentence(error)}") from error

    def forward(self, tokens: Tensor) -> Any:
        """Logits, ``batch seq vocab``."""
        return self._outputs(input_ids=tokens).logits

    def _outputs(self, **inputs: Any) -> Any:
        with nullcontext() if self._kind is None else self._kind.chosen():
            return self.network(**inputs, use_cache=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, Mapping) and "input_ids" in batch:
            return self._outputs(**{"labels": batch["input_ids"], **batch}).loss
        if isinstance(batch, Mapping) or len(batch) != 2:
            raise UsageError(
                "lmbench.HuggingFace takes batches of (tokens, targets), or mappings with input_ids; "
                f"this one is a {type(batch).__name__} of {len(batch)}"
            )
        tokens, targets = batch
        outputs = self._outputs(input_ids=tokens)
        # With the config's output_router_logits, transformers' own loss balances the experts too.
        balance = getattr(outputs, "aux_loss", None)
        # float32, as in transformers' own loss.
        logits = outputs.logits.flatten(0, 1).float()
        # Logits of a lower precision need not be kept beside them.
        del outputs
        loss = functional.cross_entropy(logits, targets.flatten())
        return loss if balance is None else loss + self.network.router_aux_loss_coef * balance

    validation_step = training_step

    def tokens_per_batch(self, batch: Any) -> int:
        """Tokens that one batch trains on, padding included."""
        return int((batch["input_ids"] if isinstance(batch, Mapping) else batch[0]).numel())

    def tensor_parallel_plan(self, size: int) -> dict[str, str]:
        """How modules are split over `size` devices, from transformers' plan for the model.

        Raises:
            UsageError: transformers has no plan for it, or the size does not divide its heads and widths.
        """
        text = self.config.get_text_config()
        names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        check_divides(size, **{name: value for name in names if (value := getattr(text, name, None))})
        plan = getattr(text, "base_model_tp_plan", None)
        if not plan:
            raise UsageError(f"transformers has no tensor-parallel plan for {text.model_type}")
        parents = {name.rpartition(".")[0]: "shared_input" for name in plan}
        prefix = f"network.{self.network.base_model_prefix}."
        return {prefix + name: style for name, style in {**parents, **plan}.items()}

    def describe(self) -> Values:
        """Shape and choices, for the run's record. `config` has the settings that are not transformers' defaults."""
        text = self.config.get_text_config()
        return {
            "name": unsharded(type(self.network)).__name__,
            "size": self.size,
            "vocab_size": self.vocab_size,
            **{name: getattr(text, attribute, None) for name, attribute in _DIMENSIONS.items()},
            "attention": self.network.config._attn_implementation if self._kind is None else self._kind.name,
            "checkpoint": "none",
            "optimizer": self.optimizer.label,
            "is_fresh": self.is_fresh,
            "config": json.loads(self.config.to_json_string(use_diff=True)),
        }


def _read_config(config: str | Values) -> Any:
    """A config of transformers, from its settings or from a file. Raises UsageError where that fails."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UsageError(
            "lmbench.HuggingFace needs transformers, which is not installed: pip install transformers"
        ) from error
    try:
        if isinstance(config, str):
            if not Path(config).exists():
                raise FileNotFoundError("no such file; give a model's config.json, which need not come with weights")
            return AutoConfig.from_pretrained(config, local_files_only=True)
        return AutoConfig.for_model(**config)
    except Exception as error:
        name = f"model.config {config!r}" if isinstance(config, str) else "model.config"
        raise UsageError(f"{name}: transformers refuses it: {_first_sentence(error)}") from error


def _first_sentence(error: Exception) -> str:
    # The sentences after the first list all models of transformers.
    return " ".join((str(error) or type(error).__name__).split()).split(". ")[0][:300]
