"""Reads what a method computes, by symbolic execution of its source with every name resolved.

A small language is understood: the module's own parts and parameters, known functions of torch, arithmetic, plain
attributes (branches on them are decided now, and the attributes watched later), and loops over own modules. Everything
else ends the reading: an unknown name, a branch on the input, a mode or a global variable, a generator, a write to
state.

A lenient reading continues after what it does not understand, with an unknown value, and so finds what one linear
receives from another in the middle of a longer method.
"""

from __future__ import annotations

import ast
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from .expressions import BINARY, Expressions, same_value
from .polynomials import TooLarge, atom
from .sources import tree_of
from .state import Frame
from .values import PLAIN, Formula, Known, Listed, NotUnderstood, Part, Unknown

_MOST_CALLS = 200
_MISSING = object()


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Reader(Expressions):
    """One reading of a block. :class:`State` lists its results."""

    def input(self, width: int | None, name: str = "x") -> Formula:
        """A tensor argument of the method."""
        return Formula(atom("input", name), width, borrowed=True)

    def read(self, method: Callable[..., Any], *args: Any) -> Any:
        """What the method returns when called with the block and these values.

        Raises:
            NotUnderstood: it does something that is no formula; the message quotes the line.
        """
        try:
            result = self.inlined(method, (Part("", self.block), *args), {})
            self._escape([result])
            return result
        except TooLarge:
            raise NotUnderstood("computes a larger formula than any that is known") from None

    def inlined(self, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """The result of a Python function, executed step by step."""
        self._calls += 1
        if self._calls > _MOST_CALLS or len(self._frames) > 20:
            raise NotUnderstood("calls too many functions")
        tree = tree_of(function)
        frame = Frame(
            typing.cast(types.FunctionType, function), tree, self._bound(function, tree, args, options),
            of_block=self._is_of_block(function, args),
        )  # fmt: skip
        if self._frames:
            self._frames[-1].called.setdefault(self._frames[-1].calling, []).append(frame)
        else:
            self.outermost = frame
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

    def _is_of_block(self, function: Any, args: Sequence[Any]) -> bool:
        """Whether it is a method of the block, or a function called by one; the forward of a child is neither."""
        if args and args[0] == Part("", self.block):
            return True
        called = bool(self._frames) and self._frames[-1].of_block
        return called and not (args and isinstance(args[0], Part) and function.__name__ == "forward")

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
        if self.lenient and not self._frames:
            # Callers of the method may pass other values.
            bound = {name: self.unknown() for name in bound}
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

    def _body(self, body: Sequence[ast.stmt], frame: Frame) -> None:
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

    def _statement(self, node: ast.stmt, frame: Frame) -> None:
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
            self._with_try_or_while(node, frame)
        elif isinstance(node, ast.Match) and self.lenient:
            self.value(node.subject, frame)
            for case in node.cases:
                self._maybe(case.body, frame, node)
        elif not isinstance(node, ast.Pass):
            raise NotUnderstood(f"has a {type(node).__name__.lower()} statement")

    def _with_try_or_while(self, node: ast.With | ast.Try | ast.While, frame: Frame) -> None:
        """A with, try or while statement: its body runs under a mode, until something is raised, or several times."""
        self._misses += 1
        if not isinstance(node, ast.With):
            self._escape_lost(node, frame, inside=True)
        if isinstance(node, ast.While):
            # Each iteration starts from what the previous one left.
            self._forget(node, frame)
        for each in node.items if isinstance(node, ast.With) else ():
            self.value(each.context_expr, frame)
            if each.optional_vars is not None:
                self._forget(each.optional_vars, frame)
        handlers = [each.body for each in node.handlers] if isinstance(node, ast.Try) else []
        others = [*handlers, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
        returned: _Return | None = None
        try:
            self._body(node.body, frame)
        except _Return as result:
            # It may raise before it returns, and the code after it runs then.
            self._escape_behind(node, frame)
            returned = result
        for body in others:
            self._maybe(body, frame, node)
        if returned is not None:
            raise returned
        self._misses += 1
        self._escape_lost(node, frame)
        self._forget(node, frame)

    def _maybe(self, body: Sequence[ast.stmt], frame: Frame, node: ast.stmt) -> None:
        """Statements that may or may not run: afterwards nothing is known of what ``node``, which contains them,
        writes."""
        try:
            self._body(body, frame)
        except _Return as result:
            self._escape([result.value])
        self._misses += 1
        self._escape_lost(node, frame)
        self._forget(node, frame)

    def _assign(self, target: ast.expr, value: Any, frame: Frame) -> None:
        if isinstance(target, ast.Name):
            frame.locals[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = self._items(value)
            starred = any(isinstance(each, ast.Starred) for each in target.elts)
            if values is None or starred or len(values) != len(target.elts):
                if not self.lenient:
                    raise NotUnderstood("takes apart what is no tuple of so many")
                self._escape([value])
                values = tuple(self.unknown() for _ in target.elts)
            for each, part in zip(target.elts, values, strict=True):
                self._assign(each.value if isinstance(each, ast.Starred) else each, part, frame)
        elif self.lenient and isinstance(target, ast.Attribute) and self._writes_a_number(target, value, frame):
            pass
        else:
            raise NotUnderstood("writes to state")

    def _writes_a_number(self, target: ast.Attribute, value: Any, frame: Frame) -> bool:
        """Whether a statement writes a number, such as a counter, to an attribute, which is unknown from then on."""
        owner = self.value(target.value, frame)
        if isinstance(owner, Known) and owner.path is not None:
            self.written.add(f"{owner.path}.{target.attr}")
            # The same object may be known by another name.
            self._misses += 1
        if not isinstance(owner, Part) or type(owner.module).__setattr__ is not nn.Module.__setattr__:
            return False
        self.written.add(owner.inner(target.attr))
        frame.counts = True
        return isinstance(value, Known) and type(value.value) in PLAIN

    def _augmented(self, node: ast.AugAssign, frame: Frame) -> None:
        name = BINARY.get(type(node.op))
        if isinstance(node.target, ast.Attribute) and self.lenient:
            number = self.value(node.value, frame)
            if self._writes_a_number(node.target, number, frame):
                return
        if not isinstance(node.target, ast.Name) or name is None:
            raise NotUnderstood("writes to state")
        old = self.value(ast.copy_location(ast.Name(node.target.id, ast.Load()), node), frame)
        if isinstance(old, (Unknown, Listed)):
            raise NotUnderstood("overwrites what is not known")
        new = self._binary(type(node.op), old, self.value(node.value, frame))
        frame.values.setdefault(node, []).extend((old, new))
        if isinstance(old, Formula):
            self._overwrite(old, new)
        else:
            frame.locals[node.target.id] = new

    def _branch(self, node: ast.If, frame: Frame) -> None:
        test = self._tested(node.test, frame)
        if test is not None:
            self._body(node.body if test else node.orelse, frame)
            return
        before = dict(frame.locals)
        ends: list[dict[str, Any]] = []
        returned: list[Any] = []
        for body in (node.body, node.orelse):
            frame.locals = dict(before)
            if any(isinstance(each, ast.Raise) for each in body) and self.lenient:
                # A handler may use the names in it.
                for each in body:
                    self._escape_names(each, frame)
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
                if one is not two and not same_value(one, two):
                    if not self.lenient:
                        raise NotUnderstood("computes something else in one of two cases")
                    self._escape([one, two])
                    frame.locals[name] = self.unknown()

    def _loop(self, node: ast.For, frame: Frame) -> None:
        values = self._items(self.value(node.iter, frame))
        if values is None and self.lenient:
            # Each iteration starts from what the previous one left.
            self._misses += 1
            self._escape_lost(node, frame, inside=True)
            self._forget(node, frame)
            self._maybe(node.body, frame, node)
            self._maybe(node.orelse, frame, node)
            return
        if node.orelse or any(isinstance(each, (ast.Break, ast.Continue)) for each in ast.walk(node)):
            raise NotUnderstood("leaves a loop early")
        if values is None:
            raise NotUnderstood("loops over what is not known")
        for value in values:
            self._assign(node.target, value, frame)
            self._body(node.body, frame)

    def _escape_behind(self, node: ast.With | ast.Try | ast.While, frame: Frame) -> None:
        """What is read after the body of a statement, or in its other branches, counts as used there."""
        last = node.body[-1].end_lineno or 0
        names = [each for each in ast.walk(frame.tree) if isinstance(each, ast.Name) and each.lineno > last]
        self._escape([frame.locals.get(each.id) for each in names])

    def _escape_lost(self, node: ast.stmt, frame: Frame, *, inside: bool = False) -> None:
        """What a statement may write is used unseen if it is read behind it, in a loop around it, or ``inside``."""
        nodes = set(ast.walk(node))
        loops = (each for each in ast.walk(frame.tree) if isinstance(each, (ast.For, ast.While)) and each is not node)
        again = any(node in ast.walk(loop) for loop in loops)
        read = set()
        for each in ast.walk(frame.tree):
            target = each.target if isinstance(each, ast.AugAssign) else each
            if isinstance(target, ast.Name) and (target is not each or isinstance(target.ctx, ast.Load)):
                behind = (target.lineno, target.col_offset) > (node.end_lineno, node.end_col_offset)
                if behind or (inside if target in nodes else again):
                    read.add(target.id)
        self._escape([frame.locals.get(name) for each in nodes for name in _bound_by(each) if name in read])

    def _forget(self, node: ast.AST, frame: Frame) -> None:
        """After a statement that was not understood, what it writes is unknown."""
        for each in ast.walk(node):
            for name in _bound_by(each):
                frame.locals[name] = self.unknown()
            if isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load):
                owner = frame.locals.get(each.value.id) if isinstance(each.value, ast.Name) else None
                if isinstance(owner, Part):
                    self.written.add(owner.inner(each.attr))
            if not isinstance(each, ast.Name) or not isinstance(each.ctx, ast.Load):
                continue
            value = frame.locals.get(each.id)
            if isinstance(value, (Formula, Listed, dict)):
                # It may have been overwritten.
                self._escape([value])
                self._poison([value])


def _bound_by(node: ast.AST) -> list[str]:
    """The names that a statement, or a part of one, assigns or deletes."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.alias):
        return [node.asname or node.name.partition(".")[0]]
    # Names of functions and classes, of caught exceptions, and of match patterns.
    names = (getattr(node, field, None) for field in ("name", "rest"))
    return [name for name in names if isinstance(name, str)]


def _with_line(reason: NotUnderstood, statement: ast.stmt) -> NotUnderstood:
    if getattr(reason, "line", None) is None:
        text = ast.unparse(statement).splitlines()[0]
        reason = NotUnderstood(f"{reason} in `{text[:100]}`")
        reason.line = statement.lineno  # type: ignore[attr-defined]
    return reason


def functions_of(kind: type[nn.Module]) -> Iterator[tuple[str, types.FunctionType]]:
    """The methods that a class and its bases define, up to ``nn.Module``; the first in the MRO of each name."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for name, value in vars(base).items():
            if isinstance(value, types.FunctionType) and name not in seen:
                seen.add(name)
                yield name, value
