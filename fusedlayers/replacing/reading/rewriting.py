"""Edits the syntax trees of the methods that contain an FFN, so that the FFN is one call.

Between the calls of the first and the last linear, a method passes a hidden on. In its place goes the input of the FFN:
a call of the first linear becomes its argument, an operation on the hidden becomes its operand, and the call of the
last linear becomes a call of the FFN. Everything else stays as its author wrote it. A child that takes the hidden and
calls the last linear is given the result of the FFN instead, and its forward is edited likewise.

The edits are valid as long as the methods and what was read in them are; a hidden that is used for anything else ends
the search.
"""

from __future__ import annotations

import ast
import copy
import functools
import pickle
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from .formulas import FFN
from .polynomials import Polynomial, linears_in
from .reader import Reader
from .shapes import Halves
from .sources import compiled, tree_of, without_decorators
from .state import Frame
from .values import Formula, Method, NotUnderstood, Part, Unknown

# The closure variable that edited methods call: a tuple of the FFN, then each edited method.
_FUSED = "__fused__"
# A method that calls these may read a variable unseen.
_PEEKING = {"locals", "vars", "eval", "exec", "dir"}
_TESTING = (ast.If, ast.Assert, ast.While)


class EditedMethod(NamedTuple):
    """A method: class, name, a checksum of its source, and its edited tree, pickled."""

    owner: type[nn.Module]
    name: str
    source: int
    tree: bytes


def edits_for(reader: Reader, ffn: FFN, owner: type[nn.Module], name: str) -> tuple[EditedMethod, ...]:
    """The method that was read, and those that it calls on the way, edited to run this FFN as one call.

    Raises:
        NotUnderstood: the method uses its hidden for something else, too.
    """
    methods: list[EditedMethod] = []
    edits = _Edits(reader, ffn, methods, reader.outermost)
    edits.add(owner, name)
    if not edits.downs:
        raise NotUnderstood(f"calls {ffn.down} in code that cannot be edited")
    return tuple(methods)


def reads_for(reader: Reader, ffn: FFN) -> dict[str, list[Any]]:
    """What was read in methods of the block, in those that contain its FFN, and between its linears.

    Keys of the reader's ``watched``, ``methods`` and ``functions``, under these names.
    """
    paths = {ffn.up, ffn.gate, ffn.down}
    misses = {call.misses for call in reader.linears if call.path in paths}
    frames = set(_frames_with(reader.outermost, paths))
    spans = list(_spans(reader, ffn))
    found: dict[str, dict[Any, None]] = {"watched": {}, "methods": {}, "functions": {}}
    for read in reader.reads:
        near = read.frame in frames or read.misses in misses
        if read.kind == "watched" and reader.is_written(read.key):
            # A value that is only written to an attribute decides nothing.
            targets = getattr(read.statement, "targets", [getattr(read.statement, "target", None)])
            if near and not all(isinstance(each, ast.Attribute) for each in targets):
                raise NotUnderstood(f"reads {read.key}, which it writes")
        elif near or read.frame.of_block:
            found[read.kind][read.key] = None
            within = any(begin < read.linears <= end for begin, end in spans)
            between = within and not isinstance(read.statement, _TESTING)
            number = read.kind == "watched" and type(reader.watched[read.key]) in (int, float)
            if between and number and read.misses and read.key != ffn.dropout:
                raise NotUnderstood(f"reads {read.key} behind what is not understood, and may write it")
    return {kind: list(keys) for kind, keys in found.items()}


def _spans(reader: Reader, ffn: FFN) -> Iterator[tuple[int, int]]:
    """(first, last) index of the linear calls of an FFN, each time that it occurs."""
    begin = None
    for place, call in enumerate(reader.linears):
        if call.path in (ffn.up, ffn.gate):
            begin = place if begin is None else begin
        elif call.path == ffn.down and begin is not None:
            yield begin, place
            begin = None


def _frames_with(frame: Frame, paths: set[str | None]) -> Iterator[Frame]:
    """The functions in which one of these linears is called, directly or not."""
    inner = [each for frames in frame.called.values() for called in frames for each in _frames_with(called, paths)]
    parts = (each for values in frame.values.values() for each in values if isinstance(each, Part))
    if inner or any(part.path in paths for part in parts):
        yield from (frame, *inner)


class _Edits:
    """Edits one method and those that it calls. They go into ``methods``, and call each other by their index there."""

    def __init__(
        self, reader: Reader, ffn: FFN, methods: list[EditedMethod], frame: Frame, *, outermost: bool = True
    ) -> None:
        self.reader, self.ffn, self.methods, self.frame, self.outermost = reader, ffn, methods, frame, outermost
        # The variables that hold the hidden, and the number of calls of the last linear.
        self.names: set[str] = set()
        self.downs = 0

    def add(self, owner: type[nn.Module], name: str) -> int:
        """Edit the method; returns its index."""
        number, tree, code = len(self.methods), self.frame.tree, self.frame.function.__code__
        method = EditedMethod(owner, name, _number_of(tree), b"")
        self.methods.append(method)
        edited = self.edit(tree)
        own = set(code.co_varnames) - set(code.co_cellvars)
        if not {*self.names, code.co_varnames[0]} <= own or _PEEKING & set(code.co_names):
            raise NotUnderstood("keeps its hidden in a variable that others may read")
        if not self.outermost and self.downs > 1:
            raise NotUnderstood(f"calls {self.ffn.down} several times in one child")
        self.methods[number] = method._replace(tree=pickle.dumps(without_decorators(edited)))
        return number

    def edit(self, node: Any) -> Any:
        """The replacement of a statement, an expression or a list of them."""
        if isinstance(node, list):
            return [self.edit(each) for each in node]
        if not isinstance(node, ast.AST):
            return node
        if isinstance(node, ast.AugAssign) and self._is_hidden(node):
            if all(map(self._holds_hidden, self.frame.values[node])):
                return ast.copy_location(ast.Pass(), node)
            raise _used(node)
        if isinstance(node, ast.expr) and not isinstance(node, (ast.Tuple, ast.List)):
            if self._is_hidden(node):
                return self._of_hidden(node)
            if used := [each for each in self._parts(node) if self._is_hidden(each)]:
                return self._of_use(node, used)
            if isinstance(node, ast.Call) and (whole := self._of_whole(node)) is not None:
                return whole
        tested = node.test if isinstance(node, _TESTING) else node.value if isinstance(node, ast.AugAssign) else node
        if tested is not node and self._is_hidden(tested):
            raise _used(tested)
        new = copy.copy(node)
        for name, value in ast.iter_fields(node):
            setattr(new, name, self.edit(value))
        return new

    def _value(self, node: ast.AST) -> Any:
        """The last value of the expression; None if it was not read."""
        return (self.frame.values.get(node) or [None])[-1]

    def _holds_hidden(self, value: Any) -> bool:
        """Whether a value is the hidden or an intermediate on its way, or a tuple of these."""
        if isinstance(value, tuple):
            return bool(value) and all(map(self._holds_hidden, value))
        into = (self.ffn.up, self.ffn.gate)
        return isinstance(value, (Formula, Halves)) and any(
            found[1] in into for found in linears_in(_polynomial(value))
        )

    def _is_hidden(self, node: ast.AST) -> bool:
        """Whether an expression was a hidden each time it was read."""
        found = {self._holds_hidden(value) for value in self.frame.values.get(node, ())}
        if len(found) == 2 and not isinstance(node, ast.AugAssign):
            raise NotUnderstood(f"runs `{ast.unparse(node)}` for this FFN and for something else")
        return True in found

    def _parts(self, node: ast.AST) -> Iterator[ast.expr]:
        """The outermost expressions inside another one that were read."""
        for each in ast.iter_child_nodes(node):
            if each in self.frame.values and isinstance(each, ast.expr):
                yield each
            else:
                yield from self._parts(each)

    def _of_hidden(self, node: ast.expr) -> ast.expr:
        """The replacement of a hidden: its operand, and of the first one the input of the FFN."""
        value = self._value(node)
        if isinstance(node, ast.Name):
            self.names.add(node.id)
            return node
        if isinstance(node, ast.Subscript) and isinstance(self._value(node.value), tuple):
            return ast.copy_location(ast.Subscript(self.edit(node.value), node.slice, node.ctx), node)
        stays = self._argument(node, self._input_of(value)) or self._first_hidden(node)
        if stays is None:
            return self._of_call(node)
        if any(map(_counts, self.frame.called.get(node, ()))):  # type: ignore[call-overload]
            raise NotUnderstood(f"counts something in `{ast.unparse(node)}`")
        made: ast.expr = self.edit(stays)
        if isinstance(value, tuple) and not isinstance(self._value(stays), tuple):
            once = ast.Tuple([made], ast.Load())
            return ast.copy_location(ast.BinOp(once, ast.Mult(), ast.Constant(len(value))), node)
        return made

    def _input_of(self, value: Any) -> Any:
        """The value that is the input of the linears behind a hidden, which must be one tensor."""
        values = value if isinstance(value, tuple) else (value,)
        atoms = [found for each in values for found in linears_in(_polynomial(each))]
        given = [call.given for call in self.reader.linears if call.output.single in atoms]
        if not all(_is_same(given[0], each) for each in given):
            raise NotUnderstood("gives its gate and up projection two tensors")
        return given[0]

    def _argument(self, node: ast.expr, given: Any) -> ast.expr | None:
        """The argument of a call that returns a hidden, if it is the input of the FFN."""
        found = _arguments(node) if isinstance(node, ast.Call) else []
        return next((each for each in found if _is_same(self._value(each), given)), None)

    def _first_hidden(self, node: ast.expr) -> ast.expr | None:
        for each in self._parts(node):
            # The expression itself, or the owner of a method.
            for found in (each, each.value if isinstance(each, ast.Attribute) else each):
                if self._is_hidden(found):
                    return found
        return None

    def _of_use(self, node: ast.expr, used: list[ast.expr]) -> ast.expr:
        """A use of the hidden: only by the last linear, or by a child that calls it."""
        if not isinstance(node, ast.Call) or len(used) > 1 or used[0] not in _arguments(node):
            raise _used(node)
        self.downs += 1
        called = self._value(node.func)
        if not isinstance(called, Part) or called.path != self.ffn.down:
            return self._of_call(node, used[0])
        return self._ffn(used[0])

    def _of_whole(self, node: ast.Call) -> ast.expr | None:
        """A call of a method of the block that runs the whole FFN, and is edited itself; None for any other call."""
        block, called, frames = self.reader.block, self._value(node.func), self.frame.called.get(node, [])
        name = called.name if isinstance(called, Method) and called.owner == Part("", block) else ""
        for frame in frames:
            known = len(self.methods)
            inner = _Edits(self.reader, self.ffn, self.methods, frame)
            if frame not in _frames_with(frame, {self.ffn.down}):
                continue
            number = inner.add(type(block), name)
            if not inner.downs:
                # It only reads the last linear.
                del self.methods[known:]
                continue
            if len(frames) > 1:
                raise NotUnderstood(f"runs `{ast.unparse(node)}` for this FFN and for something else")
            if not name or not isinstance(node.func, ast.Attribute):
                raise NotUnderstood(f"runs its FFN in `{ast.unparse(node)}`, which is no method of it")
            self.downs += inner.downs
            given = [self.edit(each) for each in (node.func.value, *node.args)]
            return ast.copy_location(ast.Call(_fused(number + 1), given, self.edit(node.keywords)), node)
        return None

    def _ffn(self, hidden: ast.expr) -> ast.expr:
        """A call of the FFN with the replacement of the hidden; in a child this is already its result."""
        made: ast.expr = self.edit(hidden)
        if not self.outermost:
            return made
        block = ast.Name(self.frame.function.__code__.co_varnames[0], ast.Load())
        return ast.copy_location(ast.Call(_fused(0), [block, made], []), hidden)

    def _of_call(self, node: ast.expr, hidden: ast.expr | None = None) -> ast.expr:
        """A call of a method that is edited itself, and takes or returns a hidden."""
        called, frames = self._value(getattr(node, "func", node)), self.frame.called.get(node, [])  # type: ignore[call-overload]
        owner = called.owner if isinstance(called, Method) else called
        if not isinstance(node, ast.Call) or len(frames) != 1 or not isinstance(owner, Part):
            raise _used(node)
        itself, name = node.func, "forward"
        if isinstance(called, Method):
            if not isinstance(node.func, ast.Attribute):
                raise _used(node)
            itself, name = node.func.value, called.name
        inner = _Edits(self.reader, self.ffn, self.methods, frames[0], outermost=False)
        number = inner.add(type(owner.module), name)

        def given(each: ast.expr) -> ast.expr:
            return self._ffn(each) if each is hidden else self.edit(each)

        options = [ast.keyword(each.arg, given(each.value)) for each in node.keywords]
        return ast.copy_location(ast.Call(_fused(number + 1), [itself, *map(given, node.args)], options), node)


def _number_of(tree: ast.FunctionDef) -> int:
    return zlib.crc32(ast.dump(tree).encode())


def _used(node: ast.AST) -> NotUnderstood:
    return NotUnderstood(f"uses its hidden in `{ast.unparse(node)}`")


def _polynomial(value: Formula | Halves) -> Polynomial:
    return value.value if isinstance(value, Formula) else value.of_tensor.value


def _is_same(one: Any, two: Any) -> bool:
    """Whether two values are one tensor, not just two with the same formula."""
    return one is two or (isinstance(one, Unknown) and one == two)


def _arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(each.value for each in node.keywords)]


def _counts(frame: Frame) -> bool:
    """Whether a function, or one that it calls, writes to an attribute."""
    return frame.counts or any(_counts(each) for frames in frame.called.values() for each in frames)


def _fused(number: int) -> ast.expr:
    return ast.Subscript(ast.Name(_FUSED, ast.Load()), ast.Constant(number), ast.Load())


def edited(methods: Sequence[EditedMethod], original: Callable[..., Any], ffn: Callable[..., Any]) -> Any:
    """The first of the edited methods, to replace the original one; it calls ``ffn`` with the block and x.

    None if a source has changed since it was read, or if a decorator hides its function.
    """
    fused = types.CellType()
    found: list[Any] = [ffn]
    for number, method in enumerate(methods):
        outer: Any = getattr(method.owner, method.name, None) if number else original
        inner = outer
        while hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        try:
            same = _number_of(tree_of(inner)) == method.source
        except NotUnderstood:
            same = False
        found.append(_with_inner(outer, inner, _compiled(inner, method.tree, fused)) if same else None)
    if None in found:
        return None
    fused.cell_contents = tuple(found)
    return found[1]


def _compiled(function: Any, tree: bytes, fused: types.CellType) -> Any:
    """An edited method, with the closure of the original one."""
    old = function.__code__
    code = compiled(ast.increment_lineno(pickle.loads(tree), old.co_firstlineno - 1), function, _FUSED)
    cells = dict(zip(old.co_freevars, function.__closure__ or (), strict=True)) | {_FUSED: fused}
    return None if code is None else _function(function, code, tuple(cells[name] for name in code.co_freevars))


def _with_inner(outer: Any, inner: Any, function: Any) -> Any:
    """The decorated function with its inner function replaced; None if the inner one cannot be located."""
    if outer is inner or function is None:
        return function
    if not isinstance(outer, types.FunctionType):
        return None
    within: Any = outer.__wrapped__  # type: ignore[attr-defined]
    cells, made = outer.__closure__ or (), _with_inner(within, inner, function)
    holding = [cell.cell_contents is within for cell in cells]
    if made is None or holding.count(True) != 1:
        return None
    closure = tuple(types.CellType(made) if holds else cell for holds, cell in zip(holding, cells, strict=True))
    return _function(outer, outer.__code__, closure)


def _function(like: Any, code: types.CodeType, closure: tuple[types.CellType, ...]) -> types.FunctionType:
    made = types.FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure)
    functools.update_wrapper(made, like, updated=())
    made.__kwdefaults__ = like.__kwdefaults__
    # The same dict, not a copy: a decorator may keep counters there.
    made.__dict__ = like.__dict__
    return made
