"""Evaluates expressions."""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import operations, shapes
from .attributes import is_row
from .calls import Calls
from .polynomials import atom
from .state import Frame
from .values import PLAIN, Dtype, Formula, Known, Listed, Method, NotUnderstood, Part, Shape, Undecided, Unknown, Weight

BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip


class Expressions(Calls):
    """The part of the reader that evaluates expressions."""

    def value(self, node: ast.expr, frame: Frame) -> Any:
        """The value of an expression."""
        method = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if not self.lenient:
            if method is None:
                raise NotUnderstood(f"has an expression that is a {type(node).__name__.lower()}")
            return self._note_line(method(node, frame), frame)
        operands: list[Any] = []
        self._operands.append(operands)
        try:
            if method is None:
                self._misses += 1
                self._escape_names(node, frame)
                self._forget_named(node, frame)
                result: Any = self.unknown()
            else:
                result = method(node, frame)
        except NotUnderstood:
            self._misses += 1
            self._escape(operands)
            self._forget_named(node, frame)
            result = self.unknown()
        finally:
            self._operands.pop()
        if self._operands:
            self._operands[-1].append(result)
        frame.values.setdefault(node, []).append(result)
        return self._note_line(result, frame)

    def _forget_named(self, node: ast.AST, frame: Frame) -> None:
        """Mark every name that a walrus inside an expression may have assigned as unknown."""
        for each in ast.walk(node) if frame.names_values else ():
            if isinstance(each, ast.NamedExpr):
                frame.locals[each.target.id] = self.unknown()

    def _note_line(self, value: Any, frame: Frame) -> Any:
        if isinstance(value, Formula) and frame.statement is not None:
            self.lines.setdefault(value.value, frame.statement)
        return value

    def _of_constant(self, node: ast.Constant, frame: Frame) -> Any:
        if node.value is not Ellipsis and type(node.value) not in PLAIN:
            raise NotUnderstood("has a constant of an unknown kind")
        return Known(node.value)

    def _of_name(self, node: ast.Name, frame: Frame) -> Any:
        if node.id in frame.shared:
            raise NotUnderstood(f"reads {node.id}, which a function inside of it may write")
        if node.id in frame.locals:
            return frame.locals[node.id]
        return self._around(node.id, frame)

    def _of_attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        return self.attribute(self.value(node.value, frame), node.attr)

    def _of_subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        owner = self.value(node.value, frame)
        if isinstance(owner, shapes.Halves):
            return owner.part(_half_at(node.slice, owner.interleaved))
        if isinstance(owner, Formula):
            place = self._half_by_bounds(node.slice, owner, frame)
            if place is None or owner.value.single is None or not owner.width or owner.width % 2:
                raise NotUnderstood("takes some rows or columns of a tensor")
            self._viewed.append(owner)
            half = owner.with_value(atom("half", owner.value.single, place), owner.width // 2)
            return dataclasses.replace(half, borrowed=True)
        if isinstance(node.slice, ast.Slice):
            leading = ast.unparse(node.slice) == ":-1"
            if isinstance(owner, Shape) and leading and not owner.leading:
                return Shape(owner.of, leading=True)
            row = owner if isinstance(owner, Part) and is_row(owner.module) else None
            if row is not None and (bounds := self._bounds(node.slice, frame)) is not None:
                self._watch_length(row)
                return tuple(self._child(row, name) for name in list(row.module._modules)[bounds])
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
        if isinstance(owner, Part) and is_row(owner.module):
            names = list(owner.module._modules)
            if type(place.value) is int and -len(names) <= place.value < len(names):
                return self._child(owner, names[place.value])
        if isinstance(owner, Part) and type(owner.module) is nn.ModuleDict and place.value in owner.module._modules:
            return self._child(owner, place.value)
        raise NotUnderstood("takes a part of something")

    def _half_by_bounds(self, node: ast.expr, owner: Formula, frame: Frame) -> str | None:
        """Which half of the columns ``[..., start:stop:step]`` takes; None: none of them."""
        if not isinstance(node, ast.Tuple) or len(node.elts) != 2 or ast.unparse(node.elts[0]) != "...":
            return None
        columns = node.elts[1]
        if not isinstance(columns, ast.Slice) or not owner.width:
            return None
        bounds = self._bounds(columns, frame)
        if bounds is None or bounds.step not in (None, 1, 2):
            return None
        found = range(owner.width)[bounds]
        half = owner.width // 2
        if found.step == 1:
            return {range(half): "first", range(half, owner.width): "last"}.get(found)
        return {range(0, owner.width, 2): "even", range(1, owner.width, 2): "odd"}.get(found)

    def _bounds(self, node: ast.Slice, frame: Frame) -> slice | None:
        """The bounds of a slice; None if one of them is not known, or not valid."""
        given = [None if each is None else self.value(each, frame) for each in (node.lower, node.upper, node.step)]
        start, stop, step = (getattr(each, "value", each) for each in given)
        known = {type(start), type(stop), type(step)} <= {int, type(None)} and step != 0
        return slice(start, stop, step) if known else None

    def _of_dict(self, node: ast.Dict, frame: Frame) -> Any:
        keys = [None if each is None else self.value(each, frame) for each in node.keys]
        if not all(isinstance(each, Known) and type(each.value) in PLAIN for each in keys):
            raise NotUnderstood("has a dictionary whose keys are not known")
        values = [self.value(each, frame) for each in node.values]
        return {each.value: value for each, value in zip(keys, values, strict=True)}  # type: ignore[union-attr]

    def _of_tuple(self, node: ast.Tuple, frame: Frame) -> Any:
        values: list[Any] = []
        for each in node.elts:
            if isinstance(each, ast.Starred):
                inner = self.value(each.value, frame)
                if not isinstance(inner, tuple):
                    # A starred tensor would give its rows.
                    raise NotUnderstood("takes apart what is no tuple")
                values += inner
            else:
                values.append(self.value(each, frame))
        return tuple(values)

    def _of_list(self, node: ast.List, frame: Frame) -> Any:
        return Listed(self._of_tuple(ast.Tuple(node.elts, node.ctx), frame))

    def _of_namedexpr(self, node: ast.NamedExpr, frame: Frame) -> Any:
        frame.locals[node.target.id] = value = self.value(node.value, frame)
        return value

    def _of_ifexp(self, node: ast.IfExp, frame: Frame) -> Any:
        test = self._tested(node.test, frame)
        if test is not None:
            return self.value(node.body if test else node.orelse, frame)
        one, two = self.value(node.body, frame), self.value(node.orelse, frame)
        if same_value(one, two):
            return one
        raise NotUnderstood("computes something else in one of two cases")

    def _of_unaryop(self, node: ast.UnaryOp, frame: Frame) -> Any:
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

    def _of_binop(self, node: ast.BinOp, frame: Frame) -> Any:
        return self._binary(type(node.op), self.value(node.left, frame), self.value(node.right, frame))

    def _binary(self, kind: type[ast.AST], one: Any, two: Any) -> Any:
        if self.lenient and kind in BINARY and isinstance(one, Unknown) | isinstance(two, Unknown):
            # Whatever the result is, it overwrites nothing.
            self._escape([one, two])
            return self.unknown()
        if isinstance(one, Formula) or isinstance(two, Formula):
            if kind not in BINARY:
                raise NotUnderstood("combines tensors by an unknown operator")
            return operations.binary(BINARY[kind], one, two)
        if isinstance(one, tuple) and isinstance(two, tuple) and kind is ast.Add:
            return Listed(one + two) if isinstance(one, Listed) or isinstance(two, Listed) else one + two
        numbers = all(isinstance(each, Known) and type(each.value) in (int, float) for each in (one, two))
        if not numbers or kind not in _ARITHMETIC:
            raise NotUnderstood("computes with something else than tensors and numbers")
        try:
            return Known(_ARITHMETIC[kind](one.value, two.value))
        except (ArithmeticError, ValueError):
            raise NotUnderstood("computes a number that there is not") from None

    def _of_boolop(self, node: ast.BoolOp, frame: Frame) -> Any:
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

    def _of_compare(self, node: ast.Compare, frame: Frame) -> Any:
        if len(node.ops) != 1:
            raise NotUnderstood("compares several values at once")
        one, two, kind = self.value(node.left, frame), self.value(node.comparators[0], frame), type(node.ops[0])
        if isinstance(one, Dtype) or isinstance(two, Dtype):
            return Undecided() if self.dtype is None else Known(self._compared_dtypes(one, two, kind))
        if kind in (ast.Is, ast.IsNot) and Known(None) in (_bare(one), _bare(two)):
            same = _bare(one) == _bare(two)
            self._watch_presence(two if _bare(one) == Known(None) else one)
            # An attribute of a tensor, such as its gradient, may be None.
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
        """The result of comparing dtypes, for the dtype of this reading."""
        others = self._items(two) if kind in (ast.In, ast.NotIn) else (two,)
        found = [
            (torch.float32 if each.wide else self.dtype) if isinstance(each, Dtype) else getattr(each, "value", None)
            for each in (one, *(others or ()))
        ]
        equal = kind in (ast.Eq, ast.Is, ast.In)
        if not all(map(operations.is_dtype, found)) or not (equal or kind in (ast.NotEq, ast.IsNot, ast.NotIn)):
            raise NotUnderstood("compares what is not known")
        return (found[0] in found[1:]) is equal

    def _truth(self, value: Any) -> bool | None:
        """The value of a condition; None if it depends on dtypes alone, or on what a lenient reading does not know."""
        if isinstance(value, Known) and type(value.value) in PLAIN:
            return bool(value.value)
        if isinstance(value, Part) and not any(hasattr(type(value.module), name) for name in ("__bool__", "__len__")):
            self._watch_presence(value)
            return True
        if isinstance(value, Undecided) or self.lenient:
            return None
        raise NotUnderstood("branches on what is not known")

    def _tested(self, node: ast.expr, frame: Frame) -> bool | None:
        """The value of a branch's condition, as :meth:`_truth` gives it."""
        found = self._truth(self.value(node, frame))
        names = [frame.locals.get(each.id) for each in ast.walk(node) if isinstance(each, ast.Name)]
        if any(isinstance(each, Known) and each.path is None for each in names):
            # Its origin is unknown, so it cannot be watched.
            self._misses += 1
        return found

    def _watch_presence(self, value: Any) -> None:
        """Watch that a child exists: through an attribute that every module has."""
        if isinstance(value, Part) and value.path:
            self._watch(value.inner("dump_patches"), nn.Module.dump_patches)
        parameter = isinstance(value, Weight) or (isinstance(value, Formula) and value.is_parameter)
        if parameter and self.lenient:
            # What is watched must not refer to parameters.
            raise NotUnderstood("asks whether there is a parameter")

    def _of_call(self, node: ast.Call, frame: Frame) -> Any:
        called = self.value(node.func, frame)
        args = list(self._of_tuple(ast.Tuple(node.args, ast.Load()), frame))
        options: dict[str, Any] = {}
        for each in node.keywords:
            if each.arg is None:
                self._poison((*args, *options.values(), self.value(each.value, frame)))
                raise NotUnderstood("gives options of any name")
            options[each.arg] = self.value(each.value, frame)
        around, frame.calling = frame.calling, node
        try:
            return self.call(called, args, options)
        except NotUnderstood:
            # A part is not poisoned: what its methods write was read.
            tensor = called.owner if isinstance(called, Method) and isinstance(called.owner, Formula) else None
            self._poison((*args, *options.values(), tensor))
            raise
        finally:
            frame.calling = around


def _bare(value: Any) -> Any:
    return Known(value.value) if isinstance(value, Known) and value.value is None else value


def same_value(one: Any, two: Any) -> bool:
    """Whether two values have the same formula; casts that depend on autocast or a dtype do not count."""
    if isinstance(one, Formula) and isinstance(two, Formula):
        return one.value == two.value and one.width == two.width and one.shaped == two.shaped
    return bool(type(one) is type(two) and one == two)


def _half_at(place: ast.expr, interleaved: bool) -> int:
    """Which half ``[..., i, :]`` takes, or which columns ``[..., i]`` takes."""
    text = ast.unparse(place).replace("(", "").replace(")", "")
    places = {"..., 0": 0, "..., 1": 1} if interleaved else {"..., 0, :": 0, "..., 1, :": 1}
    found = places.get(text)
    if found is None:
        raise NotUnderstood("takes some rows or columns of a tensor")
    return found
