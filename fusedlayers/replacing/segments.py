"""Methods of a block, or the statements in them, that may hold its FFN, as functions of tensors alone.

A forward that is the FFN takes one tensor. A layer's takes masks, positions and caches beside it, of which nobody
knows what they may be; but the statements from the first linear of its FFN to the last one read only tensors. They are
cut out of the method's source and compiled by themselves, for a trial: a call of the block runs its own method.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from .formulas import names_read
from .trials import Method


class Segment(NamedTuple):
    """What to try.

    Args:
        name: of the method in which the FFN is.
        method: takes the block, and tensors of these widths.
        widths: in the block; all tensors get that of the FFN's input.
        whole: whether it is the whole forward of the block.
    """

    name: str
    method: Method
    widths: tuple[int, ...]
    whole: bool


def segments(block: nn.Module, pairs: Sequence[tuple[Any, Any]]) -> Iterator[Segment]:
    """What to try for a block where these may be the first and the last linear: its methods, and statements of them.

    Each linear has a path, ``inputs`` and ``outputs``.
    """
    widths = dict.fromkeys(up.inputs for up, down in pairs if up.inputs == down.outputs) or {pairs[0][0].inputs: None}
    heads = {site.path.partition(".")[0] for pair in pairs for site in pair}
    for name, function in _methods(type(block), heads):
        required = _required(function)
        for width in widths:
            if required:
                yield Segment(name, function, (width,) * required, name == "forward")
            for cut, tensors in _cuts(function, pairs):
                yield Segment(name, cut, (width,) * tensors, False)


def _methods(kind: type[nn.Module], heads: set[str]) -> list[tuple[str, Method]]:
    """The methods of a class that its forward may call, and that read one of these attributes; the forward first."""
    called = names_read(kind, "forward")
    methods: dict[str, Method | None] = {"forward": kind.forward}
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, function in vars(base).items():
            code = getattr(inspect.unwrap(function), "__code__", None) if inspect.isfunction(function) else None
            # What a class writes anew hides what its base has under that name.
            if name not in methods and name != "__init__":
                methods[name] = function if code is not None and name in called and heads & set(code.co_names) else None
    return [(name, function) for name, function in methods.items() if function is not None]


def _required(function: Method) -> int:
    """How many parameters besides self have no default."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return sum(each.default is each.empty and each.kind not in variadic for each in parameters)


def _cuts(function: Method, pairs: Sequence[tuple[Any, Any]]) -> Iterator[tuple[Method, int]]:
    """The statements from the call of one linear to that of another, as functions, and how many tensors they take."""
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or function.__code__.co_freevars:
        return
    self_name = definition.args.args[0].arg if definition.args.args else None
    seen: set[tuple[int, int]] = set()
    for up, down in pairs:
        first, last = (path.partition(".")[0] for path in (up.path, down.path))
        if first == last:
            continue
        for body in _bodies(definition):
            starts = [place for place, each in enumerate(body) if _reads(each, self_name, first)]
            stops = [place for place, each in enumerate(body) if _reads(each, self_name, last)]
            # A method may run its FFN several times, one after the other.
            ends = [*starts[1:], len(body)]
            if not starts or len(starts) != len(stops):
                continue
            if not all(start <= stop < end for start, stop, end in zip(starts, stops, ends, strict=True)):
                continue
            statements = body[starts[0] : stops[0] + 1]
            lines = (statements[0].lineno, statements[-1].lineno)
            if lines not in seen:
                seen.add(lines)
                yield from _compiled(function, self_name, definition, statements)


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements, the innermost ones last."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield body


def _reads(tree: ast.AST, self_name: str | None, attribute: str) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id == self_name
        for node in ast.walk(tree)
    )


def _compiled(
    function: Any, self_name: str | None, definition: ast.FunctionDef, statements: list[ast.stmt]
) -> Iterator[tuple[Method, int]]:
    local = set(function.__code__.co_varnames) | set(function.__code__.co_cellvars)
    read: list[str] = []
    written: list[str] = []
    for statement in statements:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id in local]
        # ``x += y`` reads x, too.
        both = {id(node.target) for node in ast.walk(statement) if isinstance(node, ast.AugAssign)}
        loaded = [node.id for node in names if isinstance(node.ctx, ast.Load) or id(node) in both]
        read += [name for name in loaded if name not in written]
        written += [node.id for node in names if not isinstance(node.ctx, ast.Load)]
    read = [name for name in dict.fromkeys(read) if name != self_name]
    returns = any(isinstance(node, ast.Return) for statement in statements for node in ast.walk(statement))
    # What the last statement writes is left to later ones; they must not ask for what the others wrote.
    everywhere = [node for node in ast.walk(definition) if isinstance(node, ast.Name)]
    begin, end = statements[-1].lineno, statements[-1].end_lineno or 0
    last = [node.id for node in everywhere if isinstance(node.ctx, ast.Store) and begin <= node.lineno <= end]
    inner = [name for name in written if name not in last]
    after = [node.id for node in everywhere if isinstance(node.ctx, ast.Load) and node.lineno > end]
    if not read or (not last and not returns) or set(inner) & set(after):
        return
    results = ast.Tuple(elts=[ast.Name(id=name, ctx=ast.Load()) for name in last], ctx=ast.Load())
    module = ast.parse(f"def cut({', '.join((str(self_name), *read))}): pass")
    [cut] = module.body
    cut.body = [*statements, ast.Return(value=results)]  # type: ignore[attr-defined]
    ast.fix_missing_locations(module)
    space: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, space)
    yield space["cut"], len(read)
