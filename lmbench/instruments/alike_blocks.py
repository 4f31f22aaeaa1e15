"""The lists of alike blocks of a module, such as a Transformer's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parameter import is_lazy

#: A list is cut only from this length on; cutting a shorter one saves no time.
LEAST_BLOCKS = 6


def block_lists(module: nn.Module) -> list[nn.Sequential]:
    """The outermost lists of a module whose members are alike, or have a class of the model's own in common.

    Some layers of a Transformer may have experts, or a state in place of attention: these layers are the blocks, though
    the experts in each are alike. Where no list is such, the members of any class of PyTorch's are blocks.
    """
    return _outermost_lists(
        module, lambda blocks: _are_alike(blocks) or _are_akin(blocks, nn.Sequential)
    ) or _outermost_lists(module, lambda blocks: _are_akin(blocks, nn.Module))


def _outermost_lists(module: nn.Module, is_wanted: Callable[[nn.Sequential], bool]) -> list[nn.Sequential]:
    lists: list[nn.Sequential] = []
    nested: set[nn.Module] = set()
    for child in module.modules():
        if not isinstance(child, nn.ModuleList | nn.Sequential) or child in nested or len(child) < 2:
            continue
        blocks = cast(nn.Sequential, child)
        if not any(map(is_lazy, child.parameters())) and is_wanted(blocks):
            lists.append(blocks)
            nested |= set(child.modules())
    return lists


def _are_alike(blocks: nn.Sequential) -> bool:
    signatures = {
        (type(block), tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()))
        for block in blocks
    }
    return len(signatures) == 1 and bool(next(iter(signatures))[1])


def _are_akin(blocks: nn.Sequential, beyond: type[nn.Module]) -> bool:
    """Whether blocks are made of modules, and have a class in common that is none of the classes of `beyond`."""
    common = set.intersection(*(set(type(block).__mro__) for block in blocks)) - set(beyond.__mro__)
    return bool(common) and all(list(block.children()) for block in blocks)


class AlikeBlocks:
    """The lists of a module's blocks that have parameters of the same names, shapes and types.

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
        lists = [blocks for blocks in block_lists(self._module) if _are_alike(blocks) and len(blocks) >= LEAST_BLOCKS]
        if len({len(blocks) for blocks in lists}) == 1:
            self.lists, self.count = lists, len(lists[0])
            for blocks in lists if self._keep_blocks is not None else []:
                del blocks[self._keep_blocks :]
