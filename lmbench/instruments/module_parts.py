"""Which parts of a module are looked at or changed one by one; most of them are the members of its lists of modules.

| done to the part | function | parts |
| --- | --- | --- |
| compiled, or sharded | `compile_targets` | what is called, or with `is_regional` the members of all lists in it |
| computed again | `block_lists` | blocks: members of a list that have a class in common |
| left out of a fake or timed step | `AlikeBlocks` | blocks of lists of at least six |
| marked in a probe step | `marked_modules` | members of all lists, and the modules beside these |
| hooked in a recording | `hooked_modules` | every part |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.parameter import is_lazy

#: A list is cut only from this length on; cutting a shorter one saves no time.
LEAST_BLOCKS = 6


def compile_targets(module: LightningModule, is_regional: bool) -> list[nn.Module]:
    """The modules to compile, each by itself.

    These are the answer of the module's `compile_targets()` if it has that method, else the module itself if it defines
    `forward`, else its children. With `is_regional` they are the members of the module lists inside those.
    """
    method = getattr(module, "compile_targets", None)
    if callable(method):
        targets: list[nn.Module] = list(method())
    elif type(module).forward is not LightningModule.forward:
        targets = [module]
    else:
        targets = list(module.children())
    if not is_regional:
        return targets
    members = [block for target in targets for blocks in outermost_lists(target, lambda _: True) for block in blocks]
    return members or targets


def is_compiled_whole(module: nn.Module) -> bool:
    """Whether a module is compiled as a whole: in place, or by `torch.compile(module)`, which wraps it."""
    return module._compiled_call_impl is not None or isinstance(module, OptimizedModule)


def hooked_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that take hooks at any time, by name.

    TorchScript's take none, and one that was compiled in place is compiled anew for its own by torch 2.14.
    """
    for name, child in module.named_modules():
        if name and not isinstance(child, torch.jit.ScriptModule) and child._compiled_call_impl is None:
            yield name, child


def marked_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules whose ends are marked: members of module lists, modules beside these lists (embedding, head), and
    each compiled module as a whole."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if is_called(child) and (is_list or is_compiled_whole(child) or not [*child.children()]):
            yield child
        else:
            yield from marked_modules(child)


def is_called(block: object) -> bool:
    """Whether a member of a list is a module with a forward; some lists also hold None."""
    return isinstance(block, nn.Module) and not isinstance(block, nn.ModuleList | nn.ModuleDict)


def outermost_lists(module: nn.Module, is_wanted: Callable[[nn.Sequential], bool]) -> list[nn.Sequential]:
    """The wanted lists of modules within a module that lie in no other wanted one.

    Modules are called one by one, and a list is not: layers that are lists themselves are no blocks.
    """
    lists = list[nn.Sequential]()
    nested = set[nn.Module]()
    for child in module.modules():
        if isinstance(child, nn.ModuleList | nn.Sequential) and child not in nested:
            blocks = cast(nn.Sequential, child)
            if all(map(is_called, blocks)) and is_wanted(blocks):
                lists.append(blocks)
                nested |= set(child.modules())
    return lists


def block_lists(module: nn.Module) -> list[nn.Sequential]:
    """The outermost lists of a module's blocks: of modules that are made of modules and have a class in common.

    Blocks may differ, as where some layers of a Transformer have experts, or a state in place of attention. A short
    list may be one of stages, which have lists of alike blocks themselves. These go before it.
    """
    layers = outermost_lists(module, lambda blocks: len(blocks) >= LEAST_BLOCKS and _are_akin(blocks))
    return layers or outermost_lists(module, _are_alike) or outermost_lists(module, _are_akin)


def _are_several(blocks: nn.Sequential) -> bool:
    """Whether there are two or more, whose parameters have their sizes."""
    return len(blocks) > 1 and not any(map(is_lazy, blocks.parameters()))


def _kinds(blocks: nn.Sequential) -> list[int]:
    """The kind of each block, as a number: those of one kind have parameters of the same names, shapes and types."""
    signatures = [
        (type(block), tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()))
        for block in blocks
    ]
    kinds = list(dict.fromkeys(signatures))
    return [kinds.index(signature) for signature in signatures]


def _are_alike(blocks: nn.Sequential) -> bool:
    """Whether several have parameters, and are of one kind."""
    return _are_several(blocks) and bool([*blocks[0].parameters()]) and not any(_kinds(blocks))


def _are_akin(blocks: nn.Sequential) -> bool:
    """Whether several are made of modules and have a class in common."""
    if not _are_several(blocks):
        return False
    common = set.intersection(*(set(type(block).__mro__) for block in blocks)) - set(nn.Module.__mro__)
    return bool(common) and all(list(block.children()) for block in blocks)


class AlikeBlocks:
    """The outermost lists of a module's blocks, which are cut where all blocks of a list are alike.

    Without such lists it is the last list of blocks of several kinds, as where some layers have experts.

    Args:
        module: the lists are cut now, or in `configure_model` if the module builds them there.
        keep_blocks: length to cut each list to; None cuts nothing. Lists of fewer than LEAST_BLOCKS stay as they are.

    Attributes:
        lists: the lists, empty when their lengths differ.
        kinds: the kind of each block of a list before the cut, as a number; empty without lists.
        count: blocks in each list before the cut; None unless all blocks are alike.
    """

    def __init__(self, module: LightningModule, keep_blocks: int | None) -> None:
        self.lists = list[nn.Sequential]()
        self.kinds = list[int]()
        self._module, self._keep_blocks = module, keep_blocks
        self._cut()
        if type(module).configure_model is not LightningModule.configure_model:
            configure = module.configure_model

            def configure_model() -> None:
                configure()
                self._cut()

            module.configure_model = configure_model  # type: ignore[method-assign]

    @property
    def count(self) -> int | None:
        return None if not self.kinds or any(self.kinds) else len(self.kinds)

    def _cut(self) -> None:
        if self.kinds:
            return
        lists = [blocks for blocks in block_lists(self._module) if len(blocks) >= LEAST_BLOCKS]
        lists = list(filter(_are_alike, lists)) or lists[-1:]
        if len({len(blocks) for blocks in lists}) == 1:
            self.lists, self.kinds = lists, _kinds(lists[-1])
            for blocks in lists if self.count is not None and self._keep_blocks is not None else []:
                del blocks[self._keep_blocks :]
