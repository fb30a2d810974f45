"""The proof that a rule says what a block computes: all results and gradients agree, on random numbers, in float64."""

from __future__ import annotations

from torch import Tensor, nn

from .. import reference
from ..modules import FFNPieces
from .finding import find_by_rule
from .rules import FFNRule
from .stand_ins import InsideFFN
from .trials import Bench, alike, gradients, tensors_in
from .uncomputed import computed


def why_not_proven(bench: Bench, rule: FFNRule) -> str | None:
    """Why the FFN that ``rule`` describes is not what the method of the bench computes, or None."""
    own, other = bench.copy(), bench.copy()
    before = _attributes(own)
    truth = bench.run(own)
    if rule.inside is None and _attributes(own) != before:
        return "its forward changes attributes of the block"
    pieces = find_by_rule(other, rule)
    if isinstance(pieces, str):
        return pieces
    inputs = bench.inputs()
    results = _whole(pieces, inputs) if rule.inside is None else _inside(bench, rule, pieces, other, inputs)
    if isinstance(results, str):
        return results
    expected = (*truth.results, *gradients(truth.results, truth.inputs, own))
    found = (*results, *gradients(results, inputs, other))
    same = len(found) == len(expected) and all(map(_same, found, expected))
    return None if same else "its results or gradients are not those of an FFN"


def _whole(pieces: FFNPieces, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (_ffn(pieces, inputs[0]),)


def _inside(
    bench: Bench, rule: FFNRule, pieces: FFNPieces, block: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...] | str:
    """The results of the method with the FFN in one piece, or how it uses its parts otherwise."""
    ran: list[Tensor] = []
    otherwise: list[str] = []

    def run(x: Tensor, dropout_p: float) -> Tensor:
        ran.append(x)
        return _ffn(pieces.with_dropout(dropout_p), x)

    function = pieces.activation if pieces.original is rule.activation else None
    inplace = getattr(pieces.original, "inplace", False)
    ffn = InsideFFN(block, rule.inside_places, inplace, run, otherwise.append, function, rule.gate_rows)
    results = tensors_in(computed(bench.method(ffn.stand_in(), *(x * 1 for x in inputs)), "as a result"))
    if otherwise:
        return otherwise[0]
    return results if len(ran) == 1 else f"its {rule.inside} runs the FFN {len(ran)} times"


def _ffn(pieces: FFNPieces, x: Tensor) -> Tensor:
    arguments = pieces.arguments(x)
    del arguments["recompute"]
    return reference.ffn(**arguments)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else alike(one, other)


def _attributes(block: nn.Module) -> set[tuple[str, int]]:
    """The names of what the block holds, and which objects these are."""
    return {(name, id(value)) for name, value in vars(block).items()}
