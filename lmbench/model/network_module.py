"""What lmbench's language models have in common: a network that is built once, and an optimizer by its name."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from lmbench.model.optimizers import ChosenOptimizer


class NetworkModule(LightningModule):
    """A module that builds its `network` on the device, and trains it with its `optimizer`."""

    network: Any
    optimizer: ChosenOptimizer
    #: Whether the network was built for this run: one that was trained before in this process is not fresh.
    is_fresh = True

    @abstractmethod
    def build_network(self) -> nn.Module:
        """The network, on the current device."""

    def configure_model(self) -> None:
        """Build the network once; Lightning calls this before fit and validate."""
        self.is_fresh = not hasattr(self, "network")
        if self.is_fresh:
            self.network = self.build_network()

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer.build(self.named_parameters())

    def compile_targets(self) -> list[nn.Module]:
        """The modules that ``--trainer.compile`` compiles: the network, as one region."""
        return [self.network]
