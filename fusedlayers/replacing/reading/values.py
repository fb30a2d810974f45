"""What names stand for while a method is read: tensors in normal form, parts of the module, known constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .polynomials import Polynomial


class _Absent:
    """What stands for an attribute that there must not be."""

    def __repr__(self) -> str:
        return "absent"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


# What is the same in every call, and compared by value.
PLAIN = (bool, int, float, str, type(None))


class NotUnderstood(Exception):
    """What a method does that no formula says, in words that follow "it" or name the line."""


@dataclass(frozen=True)
class Formula:
    """A tensor ``[..., width]`` that follows from the input.

    Args:
        value: in normal form.
        width: the size of the last dimension, 1 for one number a row, None where nobody knows it.
        shaped: whether the dimensions before it are those of the input, and not all in one.
        wide: whether it was cast to float32.
        given: whether it is the caller's or a parameter, which must not be overwritten.
    """

    value: Polynomial
    width: int | None
    shaped: bool = True
    wide: bool = False
    given: bool = False

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter of the module as it is."""
        found = self.value.single
        return found is not None and found[0] == "parameter"

    def with_value(self, value: Polynomial, width: int | None = None) -> Formula:
        """Another tensor of the same rows."""
        return dataclasses.replace(self, value=value, width=self.width if width is None else width, given=False)


class Listed(tuple[Any, ...]):
    """A list that a method has made: whoever is given it may write into it."""


@dataclass(frozen=True)
class Known:
    """A value of Python's that is the same in every call: a constant, or what an attribute at ``path`` holds."""

    value: Any
    path: str | None = None


@dataclass(frozen=True)
class Part:
    """The module at this path in the block that is read; the block itself has the path ""."""

    path: str
    module: nn.Module

    def inner(self, name: str) -> str:
        """The path of what it has under a name."""
        return f"{self.path}.{name}" if self.path else name


@dataclass(frozen=True)
class Method:
    """A method of a part, or of a tensor, before it is called."""

    owner: Part | Formula
    name: str
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Training:
    """The flag ``training`` of a part: a dropout may be told, and nothing may ask."""

    path: str


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor, or the dimensions before its last one."""

    of: Formula
    leading: bool = False


@dataclass(frozen=True)
class Dtype:
    """The dtype of a tensor: float32 where it was cast to that, else the dtype in which the module is called."""

    wide: bool


@dataclass(frozen=True)
class Unknown:
    """What only a reading that looks for one FFN in a longer method may meet: it may be anything."""

    number: int
