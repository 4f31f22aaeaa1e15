"""Blocks that are alike: a step with few of them tells what one with many of them takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

#: With fewer there is nothing to win.
LEAST_BLOCKS = 6


@dataclass(frozen=True)
class AlikeBlocks:
    """The lists of a module whose members are alike, all of one length; `count` is that."""

    lists: tuple[nn.ModuleList | nn.Sequential, ...]
    count: int

    def keep(self, count: int) -> None:
        """Cut every list to its first `count` members."""
        for blocks in self.lists:
            del blocks[count:]

    def parameters_at(self, index: int) -> list[nn.Parameter]:
        """The parameters of every list's member at a place."""
        return [parameter for blocks in self.lists for parameter in blocks[index].parameters()]


def find_alike_blocks(module: nn.Module) -> AlikeBlocks | None:
    """The outermost lists of alike blocks, None where there are none or of several lengths."""
    found: list[nn.ModuleList | nn.Sequential] = []
    inside: set[int] = set()
    for child in module.modules():
        if isinstance(child, nn.ModuleList | nn.Sequential) and id(child) not in inside and _is_alike(child):
            found.append(child)
            inside |= {id(member) for member in child.modules()}
    counts = {len(blocks) for blocks in found}
    return AlikeBlocks(tuple(found), counts.pop()) if len(counts) == 1 else None


def _is_alike(blocks: nn.ModuleList | nn.Sequential) -> bool:
    if len(blocks) < LEAST_BLOCKS:
        return False
    kinds = {
        (type(block), tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()))
        for block in blocks
    }
    return len(kinds) == 1 and bool(next(iter(kinds))[1])


def parameter_ids(parameters: list[nn.Parameter]) -> set[int]:
    """Identities of parameters, which are compared neither by value nor by name."""
    return {id(parameter) for parameter in parameters if isinstance(parameter, torch.nn.Parameter)}
