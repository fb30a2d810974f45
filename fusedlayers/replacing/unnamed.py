"""Blocks that look like an FFN although nothing says what their class computes, and why `replace` leaves them."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from .finding import widths


class _Linear(NamedTuple):
    """A linear layer by its name in the block, which has dots where a child holds it."""

    name: str
    inputs: int
    outputs: int


def why_unnamed(module: nn.Module, reason: str | None) -> str | None:
    """Why a module is left, if its parameters have the shapes of an FFN; else None.

    ``reason`` is what a trial of it showed, if there was one.
    """
    but = f"but {reason or 'no method of it runs them'}; if it is one, name it in an FFNRule"
    own = _linears(module)
    if pair := _pair(own):
        return f"looks like an FFN ({_described(*pair)}), {but}"
    for up in own:
        for down in own:
            inner, width = down.inputs, down.outputs
            if (up.inputs, up.outputs) == (width, 2 * inner) and inner > width:
                text = f"{up.name}, {down.name}: {width} -> 2 × {inner} -> {width}"
                return f"looks like a gated FFN ({text}), {but}"
    if experts := _experts(module):
        return (
            f"looks like the experts of a mixture ({experts}), which multiply batches of matrices; no rule fuses them"
        )
    # As in BERT: one linear in each of two children.
    held = [] if own else [
        _Linear(f"{name}.{linears[0].name}", *linears[0][1:])
        for name, child in module.named_children()
        if len(linears := _linears(child)) == 1
    ]  # fmt: skip
    if pair := _pair(held):
        return f"looks like an FFN in two children ({_described(*pair)}), {but}"
    return None


def _described(up: _Linear, down: _Linear) -> str:
    return f"{up.name}, {down.name}: {up.inputs} -> {up.outputs} -> {down.outputs}"


def _linears(module: nn.Module) -> list[_Linear]:
    return [_Linear(name, *pair) for name, child in module.named_children() if (pair := _sizes(child))]


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer of any making, transformers' ``Conv1D`` included; or None."""
    if pair := widths(module):
        return pair
    inputs, outputs = getattr(module, "nx", None), getattr(module, "nf", None)
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


def _pair(linears: list[_Linear]) -> tuple[_Linear, _Linear] | None:
    """The first linear that widens, and the one that goes back.

    Three that widen alike are the queries, keys and values of an attention.
    """
    for up in linears:
        alike = sum(other[1:] == up[1:] for other in linears)
        down = next((other for other in linears if other[1:] == (up.outputs, up.inputs)), None)
        # Besides a gate, an FFN has no other linear of its own, and a layer with one has hardly any.
        others = len(linears) - 1 - alike
        if down is not None and up.outputs > up.inputs and alike < 3 and others < 2:
            return up, down
    return None


def _experts(module: nn.Module) -> str | None:
    """The names and sizes of two parameters that hold a matrix for each expert, one applied to the other; or None."""
    parameters = [(name, each) for name, each in module._parameters.items() if each is not None and not is_lazy(each)]
    stacks = [(name, tensor.shape) for name, tensor in parameters]
    for (first, one), (second, other) in combinations(stacks, 2):
        if len(one) == len(other) == 3 and one[0] == other[0] > 1 and set(one[1:]) & set(other[1:]) - {1}:
            return f"{first}, {second}: {one[0]} experts"
    return None
