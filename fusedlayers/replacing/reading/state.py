"""What a reading has seen so far, and what becomes of values that it loses sight of."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...modules import part_of
from .polynomials import Polynomial, function, linears_in
from .values import Formula, Known, Listed, Method, NotUnderstood, Part, Unknown


@dataclasses.dataclass(frozen=True)
class Undecided:
    """A condition on dtypes, which is another in every call: what follows must be the same either way."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter that is no vector: its dtype is all that a formula may ask for."""

    path: str


class LinearCall(typing.NamedTuple):
    """A linear that was called, with what, and when: how many things were not understood before."""

    path: str
    input: Polynomial
    output: Polynomial
    time: int
    # What stood for the input: two tensors may have one formula, and two dropouts of one tensor have.
    given: Any = None


class Frame:
    """A function that is being read, and what its names stand for.

    A lenient reading remembers what each expression stood for, which functions each call led into, and whether the
    function counts something in an attribute.
    """

    def __init__(
        self, function: types.FunctionType, tree: ast.FunctionDef, values: dict[str, Any], *, of_block: bool
    ) -> None:
        self.function, self.tree, self.locals, self.of_block = function, tree, values, of_block
        self.statement: ast.stmt | None = None
        self.values: dict[ast.AST, list[Any]] = {}
        self.calling: ast.Call | None = None
        self.called: dict[ast.Call | None, list[Frame]] = {}
        self.counts = False
        self.shared, self.names_values = _bindings(tree)


@functools.lru_cache(maxsize=256)
def _bindings(tree: ast.FunctionDef) -> tuple[set[str], bool]:
    """(names that functions inside of this one may give to other values, whenever they are called; whether any
    expression gives a name to a value)."""
    nodes = list(ast.walk(tree))
    shared = {name for each in nodes if isinstance(each, ast.Nonlocal) for name in each.names}
    return shared, any(isinstance(each, ast.NamedExpr) for each in nodes)


class Read(typing.NamedTuple):
    """That a lenient reading has read something: in which of its dictionaries it is, and when and where that was.

    ``linears`` is the number of linears that were called before.
    """

    kind: str
    key: Any
    time: int
    linears: int
    frame: Frame
    statement: ast.stmt | None


class State:
    """One reading of a block: what it has found, and which names stand for what.

    Attributes:
        watched: attributes that were read, by path, with the values for which the reading holds.
        methods: the methods that were read besides forward, by their classes and names.
        functions: the user's functions that were read, by the names of their modules and their own.
        linears: the linears that were called, in this order.
        called: activations that are parts, attributes or functions of torch: the path, "" for a function, and what it
            gave for what.
        norms: for each of torch's fused norms that was called, whether all that it took was cast to float32.
        handed: the children that were called with tensors, by path, and each tensor.
        reads: each time that something was read which ``watched``, ``methods`` or ``functions`` has.
        asks_class: the statement that asks for the class of the block, or None.
        written: attributes in which the block counts something, and objects and parts that were handed to what is not
            known, by path.
    """

    def __init__(self, block: nn.Module, *, lenient: bool = False, dtype: torch.dtype | None = None) -> None:
        # Where ``dtype`` is given, the reading holds for input and parameters of that dtype alone.
        self.block, self.lenient, self.dtype = block, lenient, dtype
        self.watched: dict[str, Any] = {}
        self.methods: dict[tuple[type[nn.Module], str], Any] = {}
        self.functions: dict[tuple[str, str], Any] = {}
        self.linears: list[LinearCall] = []
        self.norms: list[bool] = []
        self.handed: list[tuple[str, Polynomial]] = []
        self.reads: list[Read] = []
        self.outermost: Frame
        self.called: list[tuple[str, Polynomial, Polynomial]] = []
        # Linears whose results went where a lenient reading does not follow.
        self.escaped: set[str] = set()
        # What statements compute -> the first of them, for errors.
        self.lines: dict[Polynomial, ast.stmt] = {}
        self._operands: list[list[Any]] = []
        self._frames: list[Frame] = []
        self._viewed: list[Formula] = []
        self._numbers = itertools.count()
        # How many things a lenient reading did not understand.
        self._misses = 0
        # Where it was asked of what class the block is.
        self.asks_class: str | None = None
        self.written: set[str] = set()
        # Whether the input was cast, perhaps to another dtype than the one in which the block is called.
        self.casts = False
        self._calls = 0

    def inlined(self, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """What a function of Python gives, step by step."""
        raise NotImplementedError

    def value(self, node: ast.expr, frame: Frame) -> Any:
        """What an expression stands for."""
        raise NotImplementedError

    def path_of(self, activation: str, activated: Polynomial) -> str | None:
        """What computes an activation of this: the path of a part or an attribute, None where none does."""
        result = function(activation, activated)
        paths = [path for path, given, gave in self.called if path and given == activated and gave == result]
        # Of a module that calls another one the outer one, unless that is a child of it, which may be replaced.
        plain = [path for path in paths if not getattr(part_of(self.block, path), "_modules", None)]
        return min(plain or paths, key=len, default=None)

    def unknown(self) -> Unknown:
        """A value of which nothing is known."""
        return Unknown(next(self._numbers))

    def _escape(self, values: Iterable[Any]) -> None:
        """What linears gave is handed to what is not understood."""
        for value in values:
            if isinstance(value, Formula):
                self.escaped.update(str(found[1]) for found in linears_in(value.value))
            elif isinstance(value, Method):
                self._escape([value.owner])
            elif isinstance(value, (tuple, list)):
                self._escape(value)
            elif isinstance(value, dict):
                self._escape(value.values())

    def _escape_names(self, node: ast.AST, frame: Frame) -> None:
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        self._escape([frame.locals.get(name) for name in names])

    def _poison(self, values: Iterable[Any]) -> None:
        """What an unknown function was given may have been overwritten, or written into."""
        for each in values if self.lenient else ():
            if isinstance(each, (tuple, dict)):
                self._poison(each.values() if isinstance(each, dict) else each)
            if isinstance(each, (Formula, Listed, dict)):
                self._replace(each, self.unknown())
            elif isinstance(each, Part) or (isinstance(each, Known) and each.path and hasattr(each.value, "__dict__")):
                self.written.add(str(each.path))

    def is_written(self, path: str) -> bool:
        """Whether the attribute at this path may be another one now than when the method began."""
        return any(not each or path == each or path.startswith(f"{each}.") for each in self.written)

    def _overwrite(self, old: Formula, new: Any) -> None:
        """A tensor was changed in place: every name for it now stands for the new value."""
        if any(call.given is old for call in self.linears):
            # Whoever calls that linear later would give it another tensor.
            self._misses += 1
        if old.given or any(each is old for each in self._viewed):
            raise NotUnderstood("overwrites a tensor that has another name")
        self._replace(old, new)

    def _replace(self, old: Any, new: Any) -> None:
        for frame in self._frames:
            frame.locals = {name: _replaced(value, old, new) for name, value in frame.locals.items()}

    def _look_at_class(self) -> None:
        """The class of the block was asked for: that of a fused one is another."""
        statement = self._frames[-1].statement
        self.asks_class = "" if statement is None else ast.unparse(statement).splitlines()[0]

    def _watch(self, path: str, value: Any) -> Known:
        self._note("watched", path, value)
        return Known(value, path)

    def _note(self, kind: str, key: Any, value: Any) -> None:
        """That the reading holds while this is what it was."""
        getattr(self, kind)[key] = value
        if self.lenient:
            frame = self._frames[-1]
            self.reads.append(Read(kind, key, self._misses, len(self.linears), frame, frame.statement))


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """A value, however nested, with ``new`` where it had ``old``."""
    if value is old:
        return new
    if isinstance(value, tuple) and type(value) in (tuple, Listed):
        changed = type(value)(_replaced(each, old, new) for each in value)
        return value if all(one is two for one, two in zip(value, changed, strict=True)) else changed
    if isinstance(value, dict):
        return {key: _replaced(each, old, new) for key, each in value.items()}
    return value
