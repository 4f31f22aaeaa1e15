"""The lists of alike blocks of a module, such as a Transformer's layers."""

from __future__ import annotations

from typing import cast

from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parameter import is_lazy

#: A list is cut only from this length on; cutting a shorter one saves no time.
LEAST_BLOCKS = 6


def alike_lists(module: nn.Module) -> list[nn.Sequential]:
    """The outermost lists of a module whose members have parameters of the same names, shapes and types."""
    lists: list[nn.Sequential] = []
    nested: set[nn.Module] = set()
    for child in module.modules():
        if not isinstance(child, nn.ModuleList | nn.Sequential) or child in nested or len(child) < 2:
            continue
        if any(map(is_lazy, child.parameters())):
            continue
        signatures = {
            (type(block), tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()))
            for block in child
        }
        if len(signatures) == 1 and next(iter(signatures))[1]:
            lists.append(cast(nn.Sequential, child))
            nested |= set(child.modules())
    return lists


class AlikeBlocks:
    """The outermost lists of a module whose blocks have parameters of the same names, shapes and types.

    Args:
        module: the lists are cut now, or in `configure_model` if the module builds them there.
        keep_blocks: length to cut each list to; None cuts nothing. Lists of fewer than LEAST_BLOCKS stay as they are.

    Attributes:
        lists: the lists, empty when their lengths differ.
        count: blocks in each list before the cut; None without such lists or when their lengths differ.
    """

    def __init__(self, module: LightningModule, keep_blocks: int | None) -> None:
        self.lists: list[nn.Sequential] = []
        self.count: int | None = None
        self._module, self._keep_blocks = module, keep_blocks
        self._cut()
        if type(module).configure_model is not LightningModule.configure_model:
            configure = module.configure_model

            def configure_model() -> None:
                configure()
                self._cut()

            module.configure_model = configure_model  # type: ignore[method-assign]

    def _cut(self) -> None:
        if self.count is not None:
            return
        lists = [blocks for blocks in alike_lists(self._module) if len(blocks) >= LEAST_BLOCKS]
        if len({len(blocks) for blocks in lists}) == 1:
            self.lists, self.count = lists, len(lists[0])
            for blocks in lists if self._keep_blocks is not None else []:
                del blocks[self._keep_blocks :]
