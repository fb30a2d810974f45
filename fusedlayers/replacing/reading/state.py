"""The state of a reading, and what becomes of values that it loses track of."""

from __future__ import annotations

import ast
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


class LinearCall(typing.NamedTuple):
    """A call of a linear: its input and output, and ``misses``, the number of things not understood before it."""

    path: str
    input: Polynomial
    output: Polynomial
    misses: int
    # The value passed in: two tensors may have one formula, as two dropouts of one tensor do.
    given: Any = None


class Frame:
    """A function that is being read, and the values of its names.

    A lenient reading records the values of each expression, the functions that each call entered, and whether the
    function writes a counter to an attribute.
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
    """(names that nested functions may reassign at any call; whether any expression has a walrus)."""
    nodes = list(ast.walk(tree))
    shared = {name for each in nodes if isinstance(each, ast.Nonlocal) for name in each.names}
    return shared, any(isinstance(each, ast.NamedExpr) for each in nodes)


class Read(typing.NamedTuple):
    """A record that a lenient reading has read something: the dictionary of :class:`State` that holds it, its key
    there, and the function and statement that read it.

    ``misses`` and ``linears`` are the numbers of things not understood, and of linears called, before it.
    """

    kind: str
    key: Any
    misses: int
    linears: int
    frame: Frame
    statement: ast.stmt | None


class State:
    """One reading of a block: its results, and the values of names.

    Attributes:
        watched: attributes that were read, by path, with the values for which the reading holds.
        methods: the methods that were read besides forward, by class and name.
        functions: the user's functions that were read, by module and name.
        linears: the calls of linears, in order.
        activations: (path, input, output) of activations that are parts, attributes or functions of torch; "" for a
            function.
        norms: for each call of a fused norm of torch, whether all of its tensors were cast to float32.
        handed: the children that were called with tensors, by path, and each tensor.
        reads: each read that is recorded in ``watched``, ``methods`` or ``functions``, in order.
        asks_class: the statement that inspects the class of the block, or None.
        written: paths of attributes in which the block counts something, and of objects and parts passed to unknown
            code.
    """

    def __init__(self, block: nn.Module, *, lenient: bool = False, dtype: torch.dtype | None = None) -> None:
        # With ``dtype``, the reading holds only for input and parameters of that dtype.
        self.block, self.lenient, self.dtype = block, lenient, dtype
        self.watched: dict[str, Any] = {}
        self.methods: dict[tuple[type[nn.Module], str], Any] = {}
        self.functions: dict[tuple[str, str], Any] = {}
        self.linears: list[LinearCall] = []
        self.norms: list[bool] = []
        self.handed: list[tuple[str, Polynomial]] = []
        self.reads: list[Read] = []
        self.outermost: Frame
        self.activations: list[tuple[str, Polynomial, Polynomial]] = []
        # Linears whose results went to code that a lenient reading does not follow.
        self.escaped: set[str] = set()
        # Value -> the first statement that computes it, for errors.
        self.lines: dict[Polynomial, ast.stmt] = {}
        self._operands: list[list[Any]] = []
        self._frames: list[Frame] = []
        self._viewed: list[Formula] = []
        self._numbers = itertools.count()
        # The number of things that a lenient reading did not understand.
        self._misses = 0
        # The statement that inspects the class of the block.
        self.asks_class: str | None = None
        self.written: set[str] = set()
        # Whether the input was cast, perhaps to another dtype than the one that the block is called with.
        self.casts = False
        self._calls = 0

    def inlined(self, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """The result of a Python function, executed step by step."""
        raise NotImplementedError

    def value(self, node: ast.expr, frame: Frame) -> Any:
        """The value of an expression."""
        raise NotImplementedError

    def path_of(self, activation: str, activated: Polynomial) -> str | None:
        """The path of the part or attribute that computes this activation of ``activated``; None if none does."""
        result = function(activation, activated)
        paths = [path for path, given, gave in self.activations if path and given == activated and gave == result]
        # If a module calls another one, the outer one, unless the inner one is its child, which may be replaced.
        plain = [path for path in paths if not getattr(part_of(self.block, path), "_modules", None)]
        return min(plain or paths, key=len, default=None)

    def unknown(self) -> Unknown:
        """An unknown value."""
        return Unknown(next(self._numbers))

    def _escape(self, values: Iterable[Any]) -> None:
        """The results of linears in these values go to code that is not understood."""
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
        """The arguments of an unknown function may have been overwritten or modified."""
        for each in values if self.lenient else ():
            if isinstance(each, (tuple, dict)):
                self._poison(each.values() if isinstance(each, dict) else each)
            if isinstance(each, (Formula, Listed, dict)):
                self._replace(each, self.unknown())
            elif isinstance(each, Part) or (isinstance(each, Known) and each.path and hasattr(each.value, "__dict__")):
                self.written.add(str(each.path))

    def is_written(self, path: str) -> bool:
        """Whether the attribute at this path may have changed since the method began."""
        return any(not each or path == each or path.startswith(f"{each}.") for each in self.written)

    def _overwrite(self, old: Formula, new: Any) -> None:
        """A tensor was changed in place: every name for it now refers to the new value."""
        if any(call.given is old for call in self.linears):
            # The fused call would pass the changed tensor to that linear.
            self._misses += 1
        if old.borrowed or any(each is old for each in self._viewed):
            raise NotUnderstood("overwrites a tensor that has another name")
        self._replace(old, new)

    def _replace(self, old: Any, new: Any) -> None:
        for frame in self._frames:
            frame.locals = {name: _replaced(value, old, new) for name, value in frame.locals.items()}

    def _look_at_class(self) -> None:
        """The method inspects the class of the block, which is another one once it is fused."""
        statement = self._frames[-1].statement
        self.asks_class = "" if statement is None else ast.unparse(statement).splitlines()[0]

    def _watch(self, path: str, value: Any) -> Known:
        self._note("watched", path, value)
        return Known(value, path)

    def _note(self, kind: str, key: Any, value: Any) -> None:
        """Record that the reading holds only while this keeps its value."""
        getattr(self, kind)[key] = value
        if self.lenient:
            frame = self._frames[-1]
            self.reads.append(Read(kind, key, self._misses, len(self.linears), frame, frame.statement))


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """A value, however nested, with ``old`` replaced by ``new``."""
    if value is old:
        return new
    if isinstance(value, tuple) and type(value) in (tuple, Listed):
        changed = type(value)(_replaced(each, old, new) for each in value)
        return value if all(one is two for one, two in zip(value, changed, strict=True)) else changed
    if isinstance(value, dict):
        return {key: _replaced(each, old, new) for key, each in value.items()}
    return value
