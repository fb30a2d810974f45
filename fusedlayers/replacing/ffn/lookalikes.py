"""Blocks that look like an FFN although none could be read in them, and why `replace` leaves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from torch import nn
from torch.nn.parameter import is_lazy

from .recognising import Site, candidates


def sites(module: nn.Module, taken: set[nn.Module]) -> list[Site]:
    """A module's own linears, and those of children that have just one; none in ``taken``."""
    found = [site for site in candidates(module, taken) if site.path.count(".") < 2]
    holders = Counter(site.path.partition(".")[0] for site in found)
    return [site for site in found if holders[site.path.partition(".")[0]] == 1]


def why_lookalike_left(module: nn.Module, taken: set[nn.Module], reason: str | None) -> str | None:
    """Why a module is left, if its parameters have the shapes of an FFN; else None.

    ``taken`` are the linears of FFNs inside it; ``reason`` is what its source computes, if it was read.
    """
    found = sites(module, taken)
    own = [site for site in found if "." not in site.path]
    # As in BERT: one linear in each of two children.
    where = "" if own else " in two children"
    if pair := _pair(own or found):
        (up, down), what = pair
        text = f"{up.path}, {down.path}: {up.inputs} -> {what}{down.inputs} -> {down.outputs}"
        gated = "a gated" if what else "an"
        return f"looks like {gated} FFN{where} ({text}), but {reason or 'no method of it runs them'}"
    if experts := _experts(module):
        return (
            f"looks like the experts of a mixture ({experts}), which multiply batches of matrices; no rule fuses them"
        )
    return None


def _pair(found: Sequence[Site]) -> tuple[tuple[Site, Site], str] | None:
    """The first linear that widens, and the one that goes back; and "2 × " if the first is twice as wide as needed.

    Three linears of equal size are the queries, keys and values of attention. Besides a gate, an FFN has no other
    linear of its own, and a layer that contains one has at most two others.
    """
    for times, what in ((1, ""), (2, "2 × ")):
        for up in found:
            alike = sum((other.inputs, other.outputs) == (up.inputs, up.outputs) for other in found)
            for down in found if alike < 3 and len(found) - alike < 3 else ():
                if (up.inputs, up.outputs) == (down.outputs, times * down.inputs) and down.inputs > up.inputs:
                    return (up, down), what
    return None


def _experts(module: nn.Module) -> str | None:
    """Two parameters that hold a matrix per expert and can be applied one after the other, with their sizes; or
    None."""
    parameters = [(name, each) for name, each in module._parameters.items() if each is not None and not is_lazy(each)]
    # A size of 1 makes it a stack of vectors, such as the scales of normed queries and keys.
    stacks = [(name, tensor.shape) for name, tensor in parameters if tensor.dim() == 3 and 1 not in tensor.shape]
    alike = Counter(shape for _, shape in stacks)
    # Three stacks of one shape are the queries, keys and values of attention, if each head is narrower than its input.
    if any(times > 2 and shape[1] != shape[2] for shape, times in alike.items()):
        return None
    for (first, one), (second, other) in combinations(stacks, 2):
        smaller, larger = sorted((one.numel(), other.numel()))
        # The first matrix may hold a gate, too, and so be twice as large.
        if one[0] == other[0] and set(one[1:]) & set(other[1:]) and larger in (smaller, 2 * smaller):
            return f"{first}, {second}: {one[0]} experts"
    return None
