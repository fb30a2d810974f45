"""The values of names while a method is read: tensors in normal form, parts of the module, known constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .polynomials import Polynomial


class _Absent:
    """The value of an attribute that must not exist."""

    def __repr__(self) -> str:
        return "absent"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


# Types that are compared by value and cannot change in place.
PLAIN = (bool, int, float, str, type(None))


class NotUnderstood(Exception):
    """Something that a method does and no formula expresses; the message follows "it", or quotes the line."""


@dataclass(frozen=True)
class Formula:
    """A tensor ``[..., width]`` that is computed from the input.

    Args:
        value: its formula in normal form.
        width: the size of the last dimension: 1 for one number per row, None if unknown.
        shaped: whether the leading dimensions are those of the input, not flattened into one.
        wide: whether it was cast to float32.
        borrowed: whether it is the caller's, a parameter's or another tensor's memory, which must not be overwritten.
    """

    value: Polynomial
    width: int | None
    shaped: bool = True
    wide: bool = False
    borrowed: bool = False

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter of the module, unchanged."""
        found = self.value.single
        return found is not None and found[0] == "parameter"

    def with_value(self, value: Polynomial, width: int | None = None) -> Formula:
        """Another tensor with the same rows."""
        return dataclasses.replace(self, value=value, width=self.width if width is None else width, borrowed=False)


class Listed(tuple[Any, ...]):
    """A list that a method has made: code that receives it may change it."""


@dataclass(frozen=True)
class Known:
    """A Python value that is the same in every call: a constant, or the value of the attribute at ``path``."""

    value: Any
    path: str | None = None


@dataclass(frozen=True)
class Part:
    """The module at this path in the block that is read; the block itself has the path ""."""

    path: str
    module: nn.Module

    def inner(self, name: str) -> str:
        """The path of its attribute with this name."""
        return f"{self.path}.{name}" if self.path else name


@dataclass(frozen=True)
class Method:
    """A method of a part, or of a tensor, before it is called."""

    owner: Part | Formula
    name: str
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Training:
    """The ``training`` flag of a part: it may be passed to a dropout, but not branched on."""

    path: str


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor, or its leading dimensions."""

    of: Formula
    leading: bool = False


@dataclass(frozen=True)
class Dtype:
    """The dtype of a tensor: float32 if it was cast to that, else the one that the module is called with."""

    wide: bool


@dataclass(frozen=True)
class Unknown:
    """An unknown value, which occurs only in lenient readings."""

    number: int


@dataclass(frozen=True)
class Undecided:
    """A condition on dtypes, which may differ between calls: both branches must compute the same."""


@dataclass(frozen=True)
class Weight:
    """A parameter that is not a vector: a formula may ask only for its dtype."""

    path: str


@dataclass(frozen=True)
class Stage:
    """A named intermediate of a function that is read step by step; not a tensor that a formula may use."""

    name: str
