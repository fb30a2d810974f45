"""The sizes of linear layers of any class, and their paths in a block."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def widths(module: nn.Module) -> tuple[int, int] | None:
    """(in_features, out_features) of a linear layer of any class; None for anything else."""
    return _integers(module, "in_features", "out_features")


def sizes_of_linear(module: nn.Module) -> tuple[int, int] | None:
    """:func:`widths`, also of transformers' ``Conv1D``."""
    return widths(module) or _integers(module, "nx", "nf")


def _integers(module: nn.Module, first: str, second: str) -> tuple[int, int] | None:
    kind = type(module)
    # nn.Module.__getattr__ takes longer to raise than everything else here.
    if first not in vars(module) and kind.__getattr__ is nn.Module.__getattr__ and not hasattr(kind, first):
        return None
    inputs, outputs = getattr(module, first, None), getattr(module, second, None)
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


def linears(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers of any class in a block, and their paths; not the layers inside such a layer."""
    for name, child in block.named_children():
        if sizes_of_linear(child) is not None:
            yield name, child
        else:
            yield from ((f"{name}.{path}", linear) for path, linear in linears(child))
