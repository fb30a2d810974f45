"""Reads what a method computes: its source, step by step, over symbols, with every name resolved.

A small language is understood: the module's own parts and parameters, functions of torch that are known, arithmetic,
plain attributes, whose branches are decided now and watched later, and loops over own modules. Everything else ends the
reading: an unknown name, a branch on the input, on a mode or on a global variable, a generator, a write to state.

A lenient reading goes on behind what it does not understand, with a value of which nothing is known, and so finds what
one linear gets from another in the middle of a longer method.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import itertools
import math
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...modules import class_name, class_path
from . import operations
from .activation_modules import known_activation
from .polynomials import Polynomial, TooLarge, atom, function, linears_in
from .sizes import linears, sizes_of_linear
from .sources import tree_of
from .values import ABSENT, Dtype, Formula, Known, Method, NotUnderstood, Part, Shape, Training, Unknown

PLAIN = (bool, int, float, str, type(None))
_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
# What may be the same memory as the tensor that it was called with.
_VIEWS = frozenset(
    ("chunk", "split", "unflatten", "view", "reshape", "view_as", "reshape_as", "flatten", "contiguous", "to", "float",
     "type_as", "dropout", "unbind", "clamp")
)  # fmt: skip
_MOST_CALLS = 200
# Of a part whose forward is read on the way through a longer method.
_MOST_CHILDREN = 8
_MISSING = object()


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


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Reader:
    """One reading of a block.

    Attributes:
        watched: attributes that were read, by path, with the values for which the reading holds.
        methods: the methods that were read besides forward, by their classes and names.
        functions: the user's functions that were read, by the names of their modules and their own.
        holders: paths of parts whose forward was read, and their classes.
        linears: the linears that were called, in this order.
        called: activations that are parts, attributes or functions of torch: the path, "" for a function, and what it
            gave for what.
        norms: for each of torch's fused norms that was called, whether all that it took was cast to float32.
    """

    def __init__(self, block: nn.Module, *, lenient: bool = False, dtype: torch.dtype | None = None) -> None:
        # Where ``dtype`` is given, the reading holds for input and parameters of that dtype alone.
        self.block, self.lenient, self.dtype = block, lenient, dtype
        self.watched: dict[str, Any] = {}
        self.methods: dict[tuple[type[nn.Module], str], Any] = {}
        self.functions: dict[tuple[str, str], Any] = {}
        self.holders: dict[str, type[nn.Module]] = {}
        self.linears: list[LinearCall] = []
        self.norms: list[bool] = []
        self.called: list[tuple[str, Polynomial, Polynomial]] = []
        # Linears whose results went where a lenient reading does not follow.
        self.escaped: set[str] = set()
        # What statements compute -> the first of them, for errors.
        self.lines: dict[Polynomial, ast.stmt] = {}
        self._operands: list[list[Any]] = []
        self._frames: list[_Frame] = []
        self._viewed: list[Formula] = []
        self._numbers = itertools.count()
        # How many things a lenient reading did not understand.
        self._misses = 0
        self._written: set[str] = set()
        self._calls = 0

    def input(self, width: int | None, name: str = "x") -> Formula:
        """An argument of the method that is a tensor."""
        return Formula(atom("input", name), width, given=True)

    def read(self, method: Callable[..., Any], *args: Any) -> Any:
        """What the method returns, called with the block and these values.

        Raises:
            NotUnderstood: it does what no formula says, with the line.
        """
        try:
            result = self.inlined(method, (Part("", self.block), *args), {})
            self._escape([result])
            return result
        except TooLarge:
            raise NotUnderstood("computes a larger formula than any that is known") from None

    # Functions

    def inlined(self, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """What a function of Python gives, step by step."""
        self._calls += 1
        if self._calls > _MOST_CALLS or len(self._frames) > 20:
            raise NotUnderstood("calls too many functions")
        tree = tree_of(function)
        frame = _Frame(typing.cast(types.FunctionType, function), self._bound(function, tree, args, options))
        self._frames.append(frame)
        self._operands.append([])
        try:
            self._body(tree.body, frame)
        except _Return as result:
            return result.value
        finally:
            self._frames.pop()
            self._operands.pop()
        return Known(None)

    def _bound(
        self, function: Any, tree: ast.FunctionDef, args: Sequence[Any], options: dict[str, Any]
    ) -> dict[str, Any]:
        given = tree.args
        names = [each.arg for each in (*given.posonlyargs, *given.args)]
        defaults = function.__defaults__ or ()
        bound = {
            name: self._default(value)
            for name, value in zip(names[len(names) - len(defaults) :], defaults, strict=True)
        }
        bound |= {name: self._default(value) for name, value in (function.__kwdefaults__ or {}).items()}
        if len(args) > len(names):
            raise NotUnderstood("takes arguments of any number")
        bound |= dict(zip(names, args, strict=False))
        known = {*names, *(each.arg for each in given.kwonlyargs)}
        if set(options) - known:
            raise NotUnderstood("takes options of any name")
        bound |= options
        for name in known - set(bound):
            if not self.lenient:
                raise NotUnderstood(f"takes another argument, {name}")
            bound[name] = self.unknown()
        if given.vararg or given.kwarg:
            if not self.lenient:
                raise NotUnderstood("takes arguments of any number")
            bound |= {each.arg: self.unknown() for each in (given.vararg, given.kwarg) if each is not None}
        return bound

    def _default(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return Known(value)
        if self.lenient:
            return self.unknown()
        raise NotUnderstood("has an argument whose default may change")

    def unknown(self) -> Unknown:
        """A value of which nothing is known."""
        return Unknown(next(self._numbers))

    # Statements

    def _body(self, body: Sequence[ast.stmt], frame: _Frame) -> None:
        for statement in body:
            frame.statement = statement
            try:
                self._statement(statement, frame)
            except NotUnderstood as reason:
                if not self.lenient:
                    raise _with_line(reason, statement) from None
                self._misses += 1
                self._escape_names(statement, frame)
                self._forget(statement, frame)

    def _statement(self, node: ast.stmt, frame: _Frame) -> None:
        if isinstance(node, ast.Return):
            raise _Return(Known(None) if node.value is None else self.value(node.value, frame))
        if isinstance(node, ast.Assign):
            value = self.value(node.value, frame)
            for target in node.targets:
                self._assign(target, value, frame)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self.value(node.value, frame), frame)
        elif isinstance(node, ast.AugAssign):
            self._augmented(node, frame)
        elif isinstance(node, ast.If):
            self._branch(node, frame)
        elif isinstance(node, ast.For):
            self._loop(node, frame)
        elif isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Constant):
                value = self.value(node.value, frame)
                if not self.lenient and not isinstance(value, (Formula, tuple)):
                    raise NotUnderstood("does something besides computing")
        elif isinstance(node, ast.Assert):
            if self._truth(self.value(node.test, frame)) is not True:
                raise NotUnderstood("asserts what is not known")
        elif isinstance(node, (ast.With, ast.Try, ast.While)) and self.lenient:
            self._body(node.body, frame)
            self._forget(node, frame)
        elif not isinstance(node, ast.Pass):
            raise NotUnderstood(f"has a {type(node).__name__.lower()} statement")

    def _assign(self, target: ast.expr, value: Any, frame: _Frame) -> None:
        if isinstance(target, ast.Name):
            frame.locals[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = value if isinstance(value, tuple) else None
            starred = any(isinstance(each, ast.Starred) for each in target.elts)
            if values is None or starred or len(values) != len(target.elts):
                if not self.lenient:
                    raise NotUnderstood("takes apart what is no tuple of so many")
                values = tuple(self.unknown() for _ in target.elts)
            for each, part in zip(target.elts, values, strict=True):
                self._assign(each.value if isinstance(each, ast.Starred) else each, part, frame)
        elif self.lenient and isinstance(target, ast.Attribute) and self._writes_a_number(target, value, frame):
            pass
        else:
            raise NotUnderstood("writes to state")

    def _writes_a_number(self, target: ast.Attribute, value: Any, frame: _Frame) -> bool:
        """Whether a statement counts something in an attribute, of which nothing is known from then on."""
        owner = self.value(target.value, frame)
        if not isinstance(owner, Part) or type(owner.module).__setattr__ is not nn.Module.__setattr__:
            return False
        self._written.add(owner.inner(target.attr))
        return isinstance(value, Known) and type(value.value) in PLAIN

    def _augmented(self, node: ast.AugAssign, frame: _Frame) -> None:
        name = _BINARY.get(type(node.op))
        if isinstance(node.target, ast.Attribute) and self.lenient:
            number = self.value(node.value, frame)
            if self._writes_a_number(node.target, number, frame):
                return
        if not isinstance(node.target, ast.Name) or name is None:
            raise NotUnderstood("writes to state")
        old = self.value(ast.copy_location(ast.Name(node.target.id, ast.Load()), node), frame)
        new = self._binary(type(node.op), old, self.value(node.value, frame))
        if isinstance(old, Formula):
            self._overwrite(old, new)
        else:
            frame.locals[node.target.id] = new

    def _branch(self, node: ast.If, frame: _Frame) -> None:
        test = self._truth(self.value(node.test, frame))
        if test is not None:
            self._body(node.body if test else node.orelse, frame)
            return
        before = dict(frame.locals)
        ends: list[dict[str, Any]] = []
        returned: list[Any] = []
        for body in (node.body, node.orelse):
            frame.locals = dict(before)
            if any(isinstance(each, ast.Raise) for each in body) and self.lenient:
                continue
            try:
                self._body(body, frame)
                ends.append(frame.locals)
            except _Return as result:
                returned.append(result.value)
        self._escape(returned)
        if not ends:
            if len(returned) == 2 and returned[0] == returned[1]:
                raise _Return(returned[0])
            raise _Return(self.unknown()) if self.lenient else NotUnderstood("returns one of several results")
        if returned and not self.lenient:
            raise NotUnderstood("returns in one of two cases")
        frame.locals = ends[0]
        for other in ends[1:]:
            for name in {*other, *frame.locals}:
                one, two = frame.locals.get(name, _MISSING), other.get(name, _MISSING)
                if one is not two and not _same(one, two):
                    if not self.lenient:
                        raise NotUnderstood("computes something else in one of two cases")
                    frame.locals[name] = self.unknown()

    def _loop(self, node: ast.For, frame: _Frame) -> None:
        values = self._items(self.value(node.iter, frame))
        if values is None and self.lenient:
            # What one round leaves is what the next one finds.
            self._forget(node, frame)
            self._body(node.body, frame)
            self._forget(node, frame)
            return
        if node.orelse or any(isinstance(each, (ast.Break, ast.Continue)) for each in ast.walk(node)):
            raise NotUnderstood("leaves a loop early")
        if values is None:
            raise NotUnderstood("loops over what is not known")
        for value in values:
            self._assign(node.target, value, frame)
            self._body(node.body, frame)

    def _items(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, tuple):
            return value
        if isinstance(value, Part) and _is_row(value.module):
            return tuple(self._child(value, name) for name in value.module._modules)
        if isinstance(value, Known) and isinstance(value.value, (tuple, range)) and len(value.value) < _MOST_CALLS:
            return tuple(map(Known, value.value))
        return None

    def _forget(self, node: ast.AST, frame: _Frame) -> None:
        """Behind a statement that was not understood nothing is known of what it writes."""
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                frame.locals[each.id] = self.unknown()
            elif isinstance(each, ast.Name) and isinstance(frame.locals.get(each.id), Formula):
                # It may have been overwritten.
                self._replace(frame.locals[each.id], self.unknown())

    # Values

    def value(self, node: ast.expr, frame: _Frame) -> Any:
        """What an expression stands for."""
        method = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if not self.lenient:
            if method is None:
                raise NotUnderstood(f"has an expression that is a {type(node).__name__.lower()}")
            return self._at_its_line(method(node, frame), frame)
        operands: list[Any] = []
        self._operands.append(operands)
        try:
            if method is None:
                self._misses += 1
                self._escape_names(node, frame)
                result: Any = self.unknown()
            else:
                result = method(node, frame)
        except NotUnderstood:
            self._misses += 1
            self._escape(operands)
            result = self.unknown()
        finally:
            self._operands.pop()
        if self._operands:
            self._operands[-1].append(result)
        return self._at_its_line(result, frame)

    def _at_its_line(self, value: Any, frame: _Frame) -> Any:
        if isinstance(value, Formula) and frame.statement is not None:
            self.lines.setdefault(value.value, frame.statement)
        return value

    def _escape(self, values: Iterable[Any]) -> None:
        """What linears gave is handed to what is not understood."""
        for value in values:
            if isinstance(value, Formula):
                self.escaped.update(str(found[1]) for found in linears_in(value.value))
            elif isinstance(value, (tuple, list)):
                self._escape(value)
            elif isinstance(value, dict):
                self._escape(value.values())

    def _escape_names(self, node: ast.AST, frame: _Frame) -> None:
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        self._escape([frame.locals.get(name) for name in names])

    def _of_constant(self, node: ast.Constant, frame: _Frame) -> Any:
        if node.value is not Ellipsis and type(node.value) not in PLAIN:
            raise NotUnderstood("has a constant of an unknown kind")
        return Known(node.value)

    def _of_name(self, node: ast.Name, frame: _Frame) -> Any:
        if node.id in frame.locals:
            return frame.locals[node.id]
        return self._around(node.id, frame)

    def _around(self, name: str, frame: _Frame) -> Any:
        """A name that is none of the function's own."""
        code, closure = frame.function.__code__, frame.function.__closure__ or ()
        if name in code.co_freevars or name in code.co_varnames:
            raise NotUnderstood(f"reads the variable {name} of a function around it" if closure else f"reads {name}")
        space = frame.function.__globals__
        if name not in space:
            if hasattr(builtins, name):
                return Known(getattr(builtins, name))
            raise NotUnderstood(f"reads the unknown name {name}")
        value = space[name]
        if isinstance(value, types.ModuleType):
            return Known(value)
        if isinstance(value, types.FunctionType) and not operations.is_known(value) and value is not typing.cast:
            # Somebody may put another function there: its name is watched.
            if vars(sys.modules.get(str(space.get("__name__")), builtins)) is not space:
                raise NotUnderstood(f"calls the function {name} of a module that nobody finds")
            self.functions[str(space.get("__name__")), name] = value
            return Known(value)
        if callable(value) or operations.torch_constant(value):
            return Known(value)
        raise NotUnderstood(f"reads the global variable {name}")

    def _of_attribute(self, node: ast.Attribute, frame: _Frame) -> Any:
        return self.attribute(self.value(node.value, frame), node.attr)

    def attribute(self, owner: Any, name: str) -> Any:
        """The attribute of a value."""
        if isinstance(owner, Part):
            return self._of_part(owner, name)
        if isinstance(owner, Formula):
            if name in ("shape", "dtype"):
                return Shape(owner) if name == "shape" else Dtype(owner.wide)
            return Method(owner, name)
        if isinstance(owner, Weight) and name == "dtype":
            return Dtype(False)
        if isinstance(owner, Known) and isinstance(owner.value, types.ModuleType):
            value = getattr(owner.value, name, _MISSING)
            if isinstance(value, types.ModuleType) or operations.is_known(value) or operations.torch_constant(value):
                return Known(value)
            if owner.value is math or owner.value is typing or (owner.value is torch and name == "Tensor"):
                return Known(value)
            raise NotUnderstood(f"reads {owner.value.__name__}.{name}")
        if isinstance(owner, Known) and owner.path is not None:
            return self._of_object(owner, name)
        raise NotUnderstood(f"reads the {name} of something")

    def _of_object(self, owner: Known, name: str) -> Any:
        """A plain value that an object among the attributes holds, such as a configuration."""
        value = getattr(owner.value, "__dict__", {}).get(name, _MISSING)
        if type(value) not in PLAIN:
            raise NotUnderstood(f"reads {owner.path}.{name}")
        return self._watch(f"{owner.path}.{name}", value)

    def _watch(self, path: str, value: Any) -> Known:
        self.watched[path] = value
        return Known(value, path)

    def _of_part(self, owner: Part, name: str) -> Any:
        module, path = owner.module, owner.inner(name)
        kind = type(module)
        if kind.__getattr__ is not nn.Module.__getattr__ or kind.__getattribute__ is not object.__getattribute__:
            raise NotUnderstood(f"reads attributes of a {class_name(module)}, which finds them in its own way")
        if path in self._written:
            raise NotUnderstood(f"reads {path}, which it writes")
        if name == "training":
            return Training(owner.path)
        held = vars(module).get(name, _MISSING)
        if held is _MISSING:
            for base in kind.__mro__:
                if name in vars(base):
                    return self._of_class(owner, name, vars(base)[name])
            if name in module._parameters:
                return self._parameter(path, module._parameters[name])
            if name in module._modules:
                return self._child(owner, name)
            raise NotUnderstood(f"reads {path}, which is a buffer or missing")
        return self._plain_or_callable(owner, path, held)

    def _plain_or_callable(self, owner: Part, path: str, value: Any) -> Any:
        if type(value) in PLAIN or (isinstance(value, tuple) and all(type(each) in PLAIN for each in value)):
            return self._watch(path, value)
        if isinstance(value, types.MethodType) and value.__self__ is owner.module:
            self.watched[path] = value
            return Method(owner, value.__name__, value.__func__)
        if isinstance(value, Tensor):
            raise NotUnderstood(f"reads the tensor {path}")
        if callable(value):
            self.watched[path] = value
        return Known(value, path)

    def _of_class(self, owner: Part, name: str, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return Method(owner, name, value)
        if isinstance(value, staticmethod):
            return self._plain_or_callable(owner, owner.inner(name), value.__func__)
        if isinstance(value, property) and value.fget is not None:
            self.methods[type(owner.module), name] = value
            return self.inlined(value.fget, (owner,), {})
        if hasattr(type(value), "__get__"):
            raise NotUnderstood(f"reads {owner.inner(name)}, which a descriptor computes")
        return self._plain_or_callable(owner, owner.inner(name), value)

    def _parameter(self, path: str, parameter: Tensor | None) -> Any:
        if parameter is None:
            self.watched[path] = None
            return Known(None, path)
        if parameter.dim() != 1:
            return Weight(path)
        return Formula(atom("parameter", path), parameter.shape[0], given=True)

    def _child(self, owner: Part, name: str) -> Any:
        child, path = owner.module._modules[name], owner.inner(name)
        if child is None:
            self.watched[path] = None
            return Known(None, path)
        return Part(path, child)

    def _of_subscript(self, node: ast.Subscript, frame: _Frame) -> Any:
        owner = self.value(node.value, frame)
        if isinstance(owner, operations.Halves):
            return owner.part(_half_at(node.slice, owner.interleaved))
        if isinstance(owner, Formula):
            place = _columns_at(node.slice) or self._half_by_bounds(node.slice, owner, frame)
            if place is None or owner.value.single is None or not owner.width or owner.width % 2:
                raise NotUnderstood("takes some rows or columns of a tensor")
            self._viewed.append(owner)
            half = owner.with_value(atom("half", owner.value.single, place), owner.width // 2)
            return dataclasses.replace(half, given=True)
        if isinstance(node.slice, ast.Slice):
            leading = ast.unparse(node.slice) == ":-1"
            if isinstance(owner, Shape) and leading and not owner.leading:
                return Shape(owner.of, leading=True)
            raise NotUnderstood("takes a part of something")
        place = self.value(node.slice, frame)
        if not isinstance(place, Known) or type(place.value) not in (int, str):
            raise NotUnderstood("takes a part of something")
        if isinstance(owner, Shape) and not owner.leading and place.value == -1 and owner.of.width:
            return Known(owner.of.width)
        if isinstance(owner, dict) and place.value in owner:
            return owner[place.value]
        if isinstance(owner, tuple) and type(place.value) is int and -len(owner) <= place.value < len(owner):
            return owner[place.value]
        if isinstance(owner, Part) and _is_row(owner.module):
            names = list(owner.module._modules)
            if type(place.value) is int and -len(names) <= place.value < len(names):
                return self._child(owner, names[place.value])
        if isinstance(owner, Part) and type(owner.module) is nn.ModuleDict and place.value in owner.module._modules:
            return self._child(owner, place.value)
        raise NotUnderstood("takes a part of something")

    def _half_by_bounds(self, node: ast.expr, owner: Formula, frame: _Frame) -> str | None:
        """Which half ``[..., :n]`` or ``[..., n:]`` is."""
        if not isinstance(node, ast.Tuple) or len(node.elts) != 2 or ast.unparse(node.elts[0]) != "...":
            return None
        columns = node.elts[1]
        if not isinstance(columns, ast.Slice) or columns.step is not None or not owner.width:
            return None
        bounds = [None if each is None else self.value(each, frame) for each in (columns.lower, columns.upper)]
        if not all(each is None or (isinstance(each, Known) and type(each.value) is int) for each in bounds):
            return None
        found = range(owner.width)[slice(*(each and each.value for each in bounds))]
        half = owner.width // 2
        return {range(half): "first", range(half, owner.width): "last"}.get(found)

    def _of_dict(self, node: ast.Dict, frame: _Frame) -> Any:
        keys = [None if each is None else self.value(each, frame) for each in node.keys]
        if not all(isinstance(each, Known) and type(each.value) in PLAIN for each in keys):
            raise NotUnderstood("has a dictionary whose keys are not known")
        values = [self.value(each, frame) for each in node.values]
        return {each.value: value for each, value in zip(keys, values, strict=True)}  # type: ignore[union-attr]

    def _of_tuple(self, node: ast.Tuple, frame: _Frame) -> Any:
        values: list[Any] = []
        for each in node.elts:
            if isinstance(each, ast.Starred):
                inner = self.value(each.value, frame)
                values += inner if isinstance(inner, tuple) else [inner]
            else:
                values.append(self.value(each, frame))
        return tuple(values)

    _of_list = _of_tuple

    def _of_ifexp(self, node: ast.IfExp, frame: _Frame) -> Any:
        test = self._truth(self.value(node.test, frame))
        if test is not None:
            return self.value(node.body if test else node.orelse, frame)
        one, two = self.value(node.body, frame), self.value(node.orelse, frame)
        if _same(one, two):
            return one
        raise NotUnderstood("computes something else in one of two cases")

    def _of_unaryop(self, node: ast.UnaryOp, frame: _Frame) -> Any:
        value = self.value(node.operand, frame)
        if isinstance(node.op, ast.Not):
            test = self._truth(value)
            return Undecided() if test is None else Known(not test)
        if isinstance(node.op, ast.USub):
            if isinstance(value, Formula):
                return value.with_value(-value.value)
            if isinstance(value, Known) and type(value.value) in (int, float):
                return Known(-value.value)
        raise NotUnderstood("computes with something else than tensors and numbers")

    def _of_binop(self, node: ast.BinOp, frame: _Frame) -> Any:
        return self._binary(type(node.op), self.value(node.left, frame), self.value(node.right, frame))

    def _binary(self, kind: type[ast.AST], one: Any, two: Any) -> Any:
        if isinstance(one, Formula) or isinstance(two, Formula):
            if kind not in _BINARY:
                raise NotUnderstood("combines tensors by an unknown operator")
            return operations.binary(_BINARY[kind], one, two)
        if isinstance(one, tuple) and isinstance(two, tuple) and kind is ast.Add:
            return one + two
        numbers = all(isinstance(each, Known) and type(each.value) in (int, float) for each in (one, two))
        if not numbers or kind not in _ARITHMETIC:
            raise NotUnderstood("computes with something else than tensors and numbers")
        try:
            return Known(_ARITHMETIC[kind](one.value, two.value))
        except (ArithmeticError, ValueError):
            raise NotUnderstood("computes a number that there is not") from None

    def _of_boolop(self, node: ast.BoolOp, frame: _Frame) -> Any:
        stop = isinstance(node.op, ast.Or)
        undecided = False
        value: Any = Known(not stop)
        for each in node.values:
            value = self.value(each, frame)
            test = self._truth(value)
            if test is stop and not undecided:
                return value
            undecided = undecided or test is None
        return Undecided() if undecided else value

    def _of_compare(self, node: ast.Compare, frame: _Frame) -> Any:
        if len(node.ops) != 1:
            raise NotUnderstood("compares several values at once")
        one, two, kind = self.value(node.left, frame), self.value(node.comparators[0], frame), type(node.ops[0])
        if isinstance(one, Dtype) or isinstance(two, Dtype):
            return Undecided() if self.dtype is None else Known(self._compared_dtypes(one, two, kind))
        if kind in (ast.Is, ast.IsNot) and Known(None) in (_bare(one), _bare(two)):
            same = _bare(one) == _bare(two)
            # What is read of a tensor, its gradient for one, may be None.
            if isinstance(one, (Unknown, Method)) or isinstance(two, (Unknown, Method)):
                raise NotUnderstood("asks whether something is None")
            return Known(same is (kind is ast.Is))
        if kind in (ast.In, ast.NotIn) and isinstance(one, Known):
            items = self._items(two)
            if items is not None and all(isinstance(each, Known) for each in items):
                return Known((one.value in [each.value for each in items]) is (kind is ast.In))
        plain = all(isinstance(each, Known) and type(each.value) in PLAIN for each in (one, two))
        if not plain or kind not in _ARITHMETIC:
            raise NotUnderstood("compares what is not known")
        return Known(bool(_ARITHMETIC[kind](one.value, two.value)))

    def _compared_dtypes(self, one: Any, two: Any, kind: type[ast.AST]) -> bool:
        """What a comparison of dtypes is, for the dtype of this reading."""
        others = self._items(two) if kind in (ast.In, ast.NotIn) else (two,)
        found = [
            (torch.float32 if each.wide else self.dtype) if isinstance(each, Dtype) else getattr(each, "value", None)
            for each in (one, *(others or ()))
        ]
        equal = kind in (ast.Eq, ast.Is, ast.In)
        if not all(map(operations.torch_constant, found)) or not (equal or kind in (ast.NotEq, ast.IsNot, ast.NotIn)):
            raise NotUnderstood("compares what is not known")
        return (found[0] in found[1:]) is equal

    def _truth(self, value: Any) -> bool | None:
        """What a condition is, None where it depends on dtypes alone, or on what a lenient reading does not know."""
        if isinstance(value, Known) and type(value.value) in PLAIN:
            return bool(value.value)
        if isinstance(value, Part):
            return True
        if isinstance(value, Undecided) or self.lenient:
            return None
        raise NotUnderstood("branches on what is not known")

    # Calls

    def _of_call(self, node: ast.Call, frame: _Frame) -> Any:
        called = self.value(node.func, frame)
        args = list(self._of_tuple(ast.Tuple(node.args, ast.Load()), frame))
        options = {}
        for each in node.keywords:
            if each.arg is None:
                self._poison((*args, *options.values()))
                raise NotUnderstood("gives options of any name")
            options[each.arg] = self.value(each.value, frame)
        try:
            return self.call(called, args, options)
        except NotUnderstood:
            self._poison((*args, *options.values(), called.owner if isinstance(called, Method) else None))
            raise

    def _poison(self, values: Sequence[Any]) -> None:
        """What an unknown function was given may have been overwritten."""
        for each in values if self.lenient else ():
            if isinstance(each, Formula):
                self._replace(each, self.unknown())

    def call(self, called: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """What a call gives."""
        if isinstance(called, Part):
            return self._call_part(called, args, options)
        if isinstance(called, Method):
            if isinstance(called.owner, Formula):
                return self._operation(called.name, None, (called.owner, *args), options)
            return self._call_method(called, args, options)
        if not isinstance(called, Known):
            raise NotUnderstood("calls what is not known")
        target = called.value
        if operations.is_known(target):
            result = self._operation(getattr(target, "__name__", ""), target, args, options)
            return self._noted(called.path or "", args, result)
        if isinstance(target, types.FunctionType):
            if target is typing.cast:
                return args[-1]
            return self._noted(called.path, args, self.inlined(target, args, options))
        if isinstance(target, types.MethodType) and target.__self__ is self.block and called.path is not None:
            # Of its class; what the attribute holds is watched, and stays that function.
            result = self.inlined(target.__func__, (Part("", self.block), *args), options)
            return self._noted(called.path, args, result)
        if callable(target) and not isinstance(target, type) and called.path is not None and len(args) == 1:
            name = known_activation(target)
            if name is not None and isinstance(args[0], Formula) and not options:
                return self._noted(called.path, args, args[0].with_value(function(name, args[0].value)))
        return self._call_builtin(target, args, options)

    def _noted(self, path: str | None, args: Sequence[Any], result: Any) -> Any:
        if path is not None and args and isinstance(args[0], Formula) and isinstance(result, Formula):
            self.called.append((path, args[0].value, result.value))
        return result

    def _operation(self, name: str, target: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """A function of torch, or a method of a tensor, in place or not."""
        inplace = options.get("inplace") == Known(True) or (name.endswith("_") and not name.endswith("__"))
        options = {option: value for option, value in options.items() if option != "inplace"}
        x = next((each for each in (*args, options.get("input")) if isinstance(each, Formula)), None)
        if target is None:
            result = operations.method(args[0], name.removesuffix("_"), args[1:], options)
        else:
            result = operations.call(target, args, options)
        if name in ("rms_norm", "layer_norm"):
            self.norms.append(all(each.wide for each in (*args, *options.values()) if isinstance(each, Formula)))
        if inplace and x is not None:
            self._overwrite(x, result)
        elif name.removesuffix("_") in _VIEWS and x is not None:
            self._viewed.append(x)
            if isinstance(result, Formula):
                return dataclasses.replace(result, given=True)
            if isinstance(result, tuple):
                return tuple(dataclasses.replace(each, given=True) for each in result)
        return result

    def _overwrite(self, old: Formula, new: Any) -> None:
        """A tensor was changed in place: every name for it now stands for the new value."""
        if old.given or any(each is old for each in self._viewed):
            raise NotUnderstood("overwrites a tensor that has another name")
        self._replace(old, new)

    def _replace(self, old: Formula, new: Any) -> None:
        for frame in self._frames:
            for name, value in frame.locals.items():
                if value is old:
                    frame.locals[name] = new

    def _call_method(self, called: Method, args: Sequence[Any], options: dict[str, Any]) -> Any:
        owner = typing.cast(Part, called.owner)
        if called.name == "forward" and owner.path:
            return self._call_part(owner, args, options)
        self.methods[type(owner.module), called.name] = called.function
        return self.inlined(typing.cast(Any, called.function), (owner, *args), options)

    def _call_part(self, part: Part, args: Sequence[Any], options: dict[str, Any]) -> Any:
        module = part.module
        [x] = (*args, *options.values()) if len(args) + len(options) == 1 else [None]
        if "forward" in vars(module):
            raise NotUnderstood(f"calls {part.path}, whose forward was set on the instance")
        if (sizes := sizes_of_linear(module)) is not None:
            return self._call_linear(part, sizes, x)
        if not isinstance(x, Formula):
            return self._inlined_part(part, args, options)
        if type(module) is nn.Dropout:
            self._viewed.append(x)
            dropped = x.with_value(atom("dropout", part.path, x.value))
            if module.inplace:
                raise NotUnderstood(f"calls {part.path}, which overwrites its input")
            return dataclasses.replace(dropped, given=True)
        name = known_activation(module)
        if name is not None:
            result = x.with_value(function(name, x.value)) if name != "identity" else x
            if getattr(module, "inplace", False):
                self._overwrite(x, result)
            return self._noted(part.path, (x,), result)
        if type(module) is nn.Identity:
            return x
        return self._noted(part.path, (x,), self._inlined_part(part, args, options))

    def _inlined_part(self, part: Part, args: Sequence[Any], options: dict[str, Any]) -> Any:
        if self.lenient and (
            any("." in path for path, _ in linears(part.module)) or len(part.module._modules) > _MOST_CHILDREN
        ):
            # It is a block of its own.
            raise NotUnderstood(f"calls {part.path}")
        self.holders[part.path] = type(part.module)
        return self.inlined(type(part.module).forward, (part, *args), options)

    def _call_linear(self, part: Part, sizes: tuple[int, int], x: Any) -> Formula:
        if isinstance(x, Unknown):
            x = Formula(atom("unknown", x.number), sizes[0])
        if not isinstance(x, Formula) or x.width not in (None, sizes[0]):
            raise NotUnderstood(f"calls {part.path} with something else than a tensor of {sizes[0]} columns")
        output = atom("linear", part.path, x.value)
        self.linears.append(LinearCall(part.path, x.value, output, self._misses))
        return dataclasses.replace(x, value=output, width=sizes[1], wide=False, given=False)

    def _call_builtin(self, target: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        if options:
            raise NotUnderstood("calls what is not known")
        if target is isinstance and len(args) == 2:
            kinds = [getattr(each, "value", None) for each in (args[1] if isinstance(args[1], tuple) else (args[1],))]
            if isinstance(args[0], (Formula, Weight)) and kinds == [torch.Tensor]:
                return Known(True)
            if isinstance(args[0], Part) and all(isinstance(kind, type) for kind in kinds):
                self.holders.setdefault(args[0].path, type(args[0].module))
                return Known(isinstance(args[0].module, tuple(kinds)))
        if target is hasattr and len(args) == 2 and isinstance(args[0], Part) and isinstance(args[1], Known):
            found = hasattr(args[0].module, args[1].value)
            if not found:
                self.watched[args[0].inner(args[1].value)] = ABSENT
            return Known(found)
        if target in (tuple, list, enumerate, zip, len) and args:
            items = [self._items(each) for each in args]
            if None not in items:
                found = typing.cast(Any, items)
                if target is len:
                    return Known(len(found[0]))
                if target is zip:
                    return tuple(zip(*found, strict=False))
                return found[0] if target is not enumerate else tuple(zip(map(Known, range(len(found[0]))), found[0]))
        numbers = [each.value for each in args if isinstance(each, Known) and type(each.value) in (int, float)]
        if len(numbers) == len(args) and (target in (int, float, min, max, abs, range) or _is_of_math(target)):
            return Known(target(*numbers))
        raise NotUnderstood(f"calls {getattr(target, '__name__', 'what is not known')}")


class _Frame:
    """A function that is being read, and what its names stand for."""

    def __init__(self, function: types.FunctionType, values: dict[str, Any]) -> None:
        self.function, self.locals = function, values
        self.statement: ast.stmt | None = None


def _is_row(module: nn.Module) -> bool:
    """Whether a module is iterated as torch's list or sequence of modules is; sharding derives a class from it."""
    own = type(module)
    return any(
        isinstance(module, kind) and own.__iter__ is kind.__iter__ and own.__getitem__ is kind.__getitem__  # type: ignore[attr-defined]
        for kind in (nn.ModuleList, nn.Sequential)
    )


def _is_of_math(target: Any) -> bool:
    return getattr(target, "__module__", None) == "math" and isinstance(target, types.BuiltinFunctionType)


def _bare(value: Any) -> Any:
    return Known(value.value) if isinstance(value, Known) and value.value is None else value


def _same(one: Any, two: Any) -> bool:
    """Whether two values are the same in all that a formula says; casts that autocast or a dtype decides are none."""
    if isinstance(one, Formula) and isinstance(two, Formula):
        return one.value == two.value and one.width == two.width and one.shaped == two.shaped
    return bool(type(one) is type(two) and one == two)


def _half_at(place: ast.expr, interleaved: bool) -> int:
    """Which half ``[..., i, :]`` is, or which columns ``[..., i]`` are."""
    text = ast.unparse(place).replace("(", "").replace(")", "")
    places = {"..., 0": 0, "..., 1": 1} if interleaved else {"..., 0, :": 0, "..., 1, :": 1}
    found = places.get(text)
    if found is None:
        raise NotUnderstood("takes some rows or columns of a tensor")
    return found


def _columns_at(place: ast.expr) -> str | None:
    """Whether ``[..., ::2]`` takes the even or the odd columns."""
    text = ast.unparse(place).replace("(", "").replace(")", "").replace(" ", "")
    return {"...,::2": "even", "...,0::2": "even", "...,1::2": "odd"}.get(text)


def _with_line(reason: NotUnderstood, statement: ast.stmt) -> NotUnderstood:
    if getattr(reason, "line", None) is None:
        text = ast.unparse(statement).splitlines()[0]
        reason = NotUnderstood(f"{reason} in `{text[:100]}`")
        reason.line = statement.lineno  # type: ignore[attr-defined]
    return reason


def functions_of(kind: type[nn.Module]) -> Iterator[tuple[str, types.FunctionType]]:
    """The methods that a class and its bases define, but for those of ``nn.Module``; the nearest of each name."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for name, value in vars(base).items():
            if isinstance(value, types.FunctionType) and name not in seen:
                seen.add(name)
                yield name, value


__all__ = ["LinearCall", "Reader", "class_path", "functions_of"]
