"""A normal form for what a forward computes: a polynomial in atoms, over the last dimension.

Every tensor in a formula is a sum of products of atoms with coefficients. An atom is the input, a parameter, or the
result of a linear, an elementwise function, a mean over the last dimension or a dropout applied to another polynomial.
Products of sums are multiplied out, so that two ways to write one formula give one polynomial, and equal polynomials
compute the same for every input. Coefficients are compared to eight digits: some code writes constants with only ten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache

from ...kernels.activations import ACTIVATIONS, LEAKY_SLOPE

# (kind, parts, which may be polynomials).
Atom = tuple[Hashable, ...]
# (atom, positive integer exponent).
Monomial = frozenset[tuple[Atom, int]]

_ONE: Monomial = frozenset()
_DIGITS = 8
# No formula of a layer has this many terms; a power of a sum could.
MOST_TERMS = 64
# An input of a linear that is nested more deeply is an unknown tensor: no formula of a layer reaches that far back.
MOST_DEPTH = 16


class TooLarge(Exception):
    """A formula has more terms than any that the library recognises."""


class Polynomial:
    """A sum of products of atoms: hashable and immutable."""

    __slots__ = ("_compared", "_hash", "depth", "terms")

    def __init__(self, terms: dict[Monomial, float]) -> None:
        self.terms = {monomial: value for monomial, value in terms.items() if value != 0}
        if len(self.terms) > MOST_TERMS:
            raise TooLarge
        self._compared = {monomial: float(f"{value:.{_DIGITS}g}") for monomial, value in self.terms.items()}
        self._hash = hash(frozenset(self._compared.items()))
        self.depth = 1 + max((_depth(each) for monomial in self.terms for each, _ in monomial), default=0)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Polynomial) and self._compared == other._compared

    def __repr__(self) -> str:
        return " + ".join(f"{value:g}·{dict(monomial)}" for monomial, value in self.terms.items()) or "0"

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for monomial, value in other.terms.items():
            terms[monomial] = terms.get(monomial, 0.0) + value
        return Polynomial(terms)

    def __mul__(self, other: Polynomial) -> Polynomial:
        terms: dict[Monomial, float] = {}
        for one, value in self.terms.items():
            for two, factor in other.terms.items():
                monomial = _product(one, two)
                terms[monomial] = terms.get(monomial, 0.0) + value * factor
        return Polynomial(terms)

    def __neg__(self) -> Polynomial:
        return self * number(-1.0)

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + -other

    @property
    def constant(self) -> float | None:
        """The value of a constant polynomial; None if it contains an atom."""
        if not self.terms:
            return 0.0
        return self.terms.get(_ONE) if len(self.terms) == 1 else None

    @property
    def single(self) -> Atom | None:
        """The atom that this polynomial is, with coefficient 1; None if it is anything else."""
        if len(self.terms) != 1:
            return None
        [(monomial, value)] = self.terms.items()
        if value != 1.0 or len(monomial) != 1:
            return None
        [(found, exponent)] = monomial
        return found if exponent == 1 else None

    def atoms(self) -> Iterable[Atom]:
        """The distinct atoms in it, without those nested in them."""
        return dict.fromkeys(each for monomial in self.terms for each, _ in monomial)


def _depth(part: object) -> int:
    """Of the deepest polynomial in an atom, or in a part of one; 0 if there is none."""
    if isinstance(part, Polynomial):
        return part.depth
    return max(map(_depth, part), default=0) if isinstance(part, tuple) else 0


def _product(one: Monomial, two: Monomial) -> Monomial:
    if not one or not two:
        return one or two
    exponents = dict(one)
    for each, exponent in two:
        exponents[each] = exponents.get(each, 0) + exponent
    return frozenset(exponents.items())


def number(value: float) -> Polynomial:
    """A constant."""
    return Polynomial({_ONE: float(value)})


def atom(kind: str, *parts: Hashable) -> Polynomial:
    """An atom of this kind."""
    return Polynomial({frozenset({((kind, *parts), 1)}): 1.0})


def linear_result(path: Hashable, x: Polynomial) -> Polynomial:
    """The result of a linear, by its path."""
    return atom("linear", path, as_input(x))


def as_input(x: Polynomial) -> Polynomial:
    """x as it stands in the result of a linear: an atom of its own if its formula is nested too deeply."""
    return x if x.depth <= MOST_DEPTH else _unknown(x)


@lru_cache(maxsize=1024)
def _unknown(_: Polynomial) -> Polynomial:
    """The same atom for equal polynomials."""
    return atom("unknown", object())


def power(base: Polynomial, exponent: float) -> Polynomial:
    """``base`` to a power: multiplied out for integers from 0 to 4, else an atom."""
    if exponent == int(exponent) and 0 <= exponent <= 4:
        result = number(1.0)
        for _ in range(int(exponent)):
            result = result * base
        return result
    value = base.constant
    if value is not None:
        if value < 0 or (value == 0 and exponent < 0):
            raise TooLarge
        return number(value**exponent)
    if len(base.terms) == 1:
        [(monomial, factor)] = base.terms.items()
        [*found] = monomial
        # (c q^e)^f is c^f q^(e f) if e is not an integer: then q >= 0, or both sides are NaN.
        if factor > 0 and len(found) == 1 and found[0][0][0] == "power":
            (_, inner, first), times = found[0]
            if first != int(first):  # type: ignore[call-overload]
                return number(factor**exponent) * atom("power", inner, first * times * exponent)  # type: ignore[operator]
    return atom("power", base, exponent)


def is_of_rows(found: Atom) -> bool:
    """Whether an atom is one number per row, the same in all columns."""
    if found[0] == "mean":
        return True
    return found[0] in ("power", "function") and all(map(is_of_rows, _polynomial_of(found).atoms()))


def _polynomial_of(found: Atom) -> Polynomial:
    return next(each for each in found if isinstance(each, Polynomial))


def mean(base: Polynomial) -> Polynomial:
    """The mean over the last dimension, term by term; factors that are one number per row are moved out of it."""
    total = number(0.0)
    for monomial, value in base.terms.items():
        rows = frozenset(each for each in monomial if is_of_rows(each[0]))
        rest = monomial - rows
        outer = Polynomial({rows: value})
        total = total + (outer * atom("mean", Polynomial({rest: 1.0})) if rest else outer)
    return total


def function(name: str, base: Polynomial) -> Polynomial:
    """An elementwise function, or an activation, expanded into elementary functions."""
    if name in _WRITTEN:
        return _WRITTEN[name](base)
    return atom("function", name, base)


def _gelu(base: Polynomial) -> Polynomial:
    half = number(0.5) * base
    return half + half * atom("function", "erf", number(math.sqrt(0.5)) * base)


def _gelu_tanh(base: Polynomial) -> Polynomial:
    half = number(0.5) * base
    inner = number(math.sqrt(2 / math.pi)) * (base + number(0.044715) * power(base, 3))
    return half + half * atom("function", "tanh", inner)


_WRITTEN: dict[str, Callable[[Polynomial], Polynomial]] = {
    "identity": lambda base: base,
    "square": lambda base: base * base,
    "relu2": lambda base: power(function("relu", base), 2),
    "silu": lambda base: base * atom("function", "sigmoid", base),
    "quick_gelu": lambda base: base * atom("function", "sigmoid", number(1.702) * base),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "leaky_relu": lambda base: atom("function", f"leaky_relu {LEAKY_SLOPE:g}", base),
}


def activation_giving(value: Polynomial, argument: Polynomial, factor: Polynomial | None = None) -> str | None:
    """The activation whose value at ``argument``, times ``factor``, is this polynomial; None if there is none."""
    factor = number(1.0) if factor is None else factor
    return next((name for name in ACTIVATIONS if function(name, argument) * factor == value), None)


def linears_in(value: Polynomial, *, halves: bool = False) -> dict[Atom, None]:
    """The results of linears in a polynomial and in its functions' arguments; with ``halves`` also halves of them."""
    found: dict[Atom, None] = {}
    left, seen = [value], {value}
    while left:
        for each in left.pop().atoms():
            inner = each[1] if each[0] == "half" else each
            if inner[0] == "linear":  # type: ignore[index]
                found[each if halves else inner] = None  # type: ignore[index]
            else:
                new = [part for part in each if isinstance(part, Polynomial) and part not in seen]
                left += new
                seen.update(new)
    return found
