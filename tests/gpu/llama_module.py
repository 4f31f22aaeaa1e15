"""transformers' Llama in a small LightningModule, as a stranger would write it: the foreign model of a GPU run.

    cd tests/gpu && lmbench fit --model llama_module.Llama --model.hidden_size 2048 --data.batch_size 4 \
        --data.context_length 1024 --trainer.precision bf16-mixed

Weights are random and nothing is fetched. It knows nothing of lmbench: tokens are counted by lmbench's data, FLOPs by
the counter on a fake copy.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


class Llama(LightningModule):
    """A LlamaForCausalLM from its configuration; by default 1.2 billion parameters.

    Args:
        vocab_size, context_length: token ids, and the longest sequence; follow the data's where lmbench makes it.
        attention: transformers' `attn_implementation`: sdpa or eager.
        checkpointing: recompute activations in the backward pass.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        intermediate_size: int = 8192,
        num_layers: int = 16,
        num_heads: int = 32,
        num_key_value_heads: int = 8,
        vocab_size: int = 32_000,
        context_length: int = 1024,
        attention: str = "sdpa",
        checkpointing: bool = False,
        learning_rate: float = 3e-4,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            vocab_size=vocab_size,
            max_position_embeddings=context_length,
            attn_implementation=attention,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)
        if checkpointing:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self.model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"], fused=self.hparams["fused"])
