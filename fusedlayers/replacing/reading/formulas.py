"""Recognises the library's formulas in what was read."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from .operations import normalised
from .polynomials import Atom, Polynomial, activation_giving, linears_in
from .values import NotUnderstood

# How deep a formula is written in a message: a long sum of nested ones would have millions of words.
_MOST_WRITTEN = 4


class OtherFormula(NotUnderstood):
    """The method computes something else, as the message says."""


class FFN(NamedTuple):
    """``down(dropout(act(gate) * up))``, by the paths of its parts; dropouts by the path of their probability."""

    up: str
    down: str
    gate: str | None
    gate_rows: str | None
    activation: str
    # The input of the activation, and that of the FFN.
    activated: Polynomial
    input: Polynomial
    dropout: str | None
    output_dropout: str | None


def ffn_of(output: Polynomial, lines: Mapping[Polynomial, ast.stmt]) -> FFN:
    """The FFN that ``output`` is; the error quotes from ``lines`` of the source.

    Raises:
        OtherFormula: it is not an FFN.
    """
    inner, output_dropout = _undropped(output)
    last = inner.single
    if last is None or last[0] != "linear":
        raise OtherFormula(f"its result is {text(output)}, which no linear gives{_line(lines, output)}")
    _, down, hidden = last
    return ffn_before(down, hidden, lines)._replace(output_dropout=output_dropout)  # type: ignore[arg-type]


def ffn_before(down: str, hidden: Polynomial, lines: Mapping[Polynomial, ast.stmt]) -> FFN:
    """The FFN whose last linear is ``down``, with the input ``hidden``; the error quotes from ``lines`` of the source.

    Raises:
        OtherFormula: there is none.
    """
    inner, dropout = _undropped(hidden)
    # In the same order in every process, because without an activation either may be the gate.
    products = sorted(_products(inner), key=_path)
    for one in products:
        name = activation_giving(inner, _of(one)) if one[0] == "linear" else None
        if name not in (None, "identity"):
            return FFN(str(one[1]), down, None, None, str(name), _of(one), _input(one), dropout, None)
    for gate, up in permutations(products, 2):
        if _input(gate) != _input(up) or gate[0] != up[0]:
            continue
        if (name := activation_giving(inner, _of(gate), _of(up))) is None:
            continue
        if gate[0] == "linear":
            return FFN(str(up[1]), down, str(gate[1]), None, name, _of(gate), _input(gate), dropout, None)
        if gate[1] == up[1]:
            merged, rows = str(gate[1][1]), str(gate[2])  # type: ignore[index]
            return FFN(merged, down, None, rows, name, _of(gate), _input(gate), dropout, None)
    what = " or ".join(f"{text(_of(each))}" for each in products) or "a linear"
    raise OtherFormula(f"its {down} takes {text(hidden)}, which is no activation of {what}{_line(lines, hidden)}")


def _line(lines: Mapping[Polynomial, ast.stmt], value: Polynomial) -> str:
    return f" in `{ast.unparse(lines[value])}`" if value in lines else ""


def _undropped(value: Polynomial) -> tuple[Polynomial, str | None]:
    found = value.single
    if found is None or found[0] != "dropout":
        return value, None
    return found[2], str(found[1])  # type: ignore[return-value]


def _of(found: Atom) -> Polynomial:
    return Polynomial({frozenset({(found, 1)}): 1.0})


def _path(found: Atom) -> tuple[str, str]:
    """The path of an atom's linear, and which half of its result the atom is."""
    return (str(found[1]), "") if found[0] == "linear" else (str(found[1][1]), str(found[2]))  # type: ignore[index]


def _input(found: Atom) -> Polynomial:
    """The input of an atom's linear: the atom is a linear's result or a half of it."""
    linear = found if found[0] == "linear" else found[1]
    return linear[2]  # type: ignore[index]


def _products(value: Polynomial) -> list[Atom]:
    """The distinct results of linears, or halves of them, in a polynomial and in the arguments of its functions."""
    return list(linears_in(value, halves=True))


def text(value: Polynomial, depth: int = _MOST_WRITTEN) -> str:
    """A polynomial as a reader would write it, down to this depth."""
    if not depth:
        return "…"
    for name, inner in _written(value):
        return f"{name}({text(inner, depth - 1)})"
    terms = []
    for monomial, factor in value.terms.items():
        factors = [_text_of(found, depth) + (f"^{exponent}" if exponent > 1 else "") for found, exponent in monomial]
        terms.append(" * ".join([*([f"{factor:g}"] if factor != 1 or not factors else []), *sorted(factors)]))
    return " + ".join(terms) or "0"


def _written(value: Polynomial) -> Iterator[tuple[str, Polynomial]]:
    """The activation or norm that equals a polynomial, and its argument."""
    for found in _products(value):
        if (name := activation_giving(value, _of(found))) not in (None, "identity"):
            yield str(name), _of(found)
    for found in value.atoms():
        if found[0] == "power" and found[2] == -0.5:
            variance: Polynomial = found[1]  # type: ignore[assignment]
            eps = variance.terms.get(frozenset(), 0.0)
            means = [each[1] for each in variance.atoms() if each[0] == "mean"]
            for operation in ("layer_norm", "rms_norm"):
                yield from ((operation, each) for each in means if normalised(each, operation, eps) == value)  # type: ignore[arg-type, misc]


def _text_of(found: Sequence[object], depth: int) -> str:
    kind, *parts = found
    inner = [text(part, depth - 1) for part in parts if isinstance(part, Polynomial)]
    if kind in ("linear", "dropout"):
        return f"{parts[0]}({inner[0]})"
    if kind == "function":
        return f"{parts[0]}({inner[0]})"
    if kind == "half":
        return f"{_text_of(parts[0], depth)}[{parts[1]}]"  # type: ignore[arg-type]
    if kind == "power":
        return f"({inner[0]})^{parts[1]:g}"
    if kind == "mean":
        return f"mean({inner[0]})"
    return str(parts[0]) if kind != "unknown" else "something"
