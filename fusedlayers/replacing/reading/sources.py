"""The syntax tree of a function, accepted only if it compiles to the code that runs."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import operator
import pickle
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from ..remembering import Remembered
from .values import NotUnderstood

# The compiler flags of all __future__ imports.
_FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
# What two equal functions share, besides constants. Exception handlers are in a table of their own.
_OF_CODE = (
    "co_code", "co_names", "co_varnames", "co_exceptiontable", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount"
)  # fmt: skip
# The fields of syntax trees that name variables or attributes.
_NAMING = frozenset(("id", "attr", "name", "asname", "rest"))
_trees: Remembered[ast.FunctionDef | str] = Remembered()


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def tree_of(function: Callable[..., Any]) -> ast.FunctionDef:
    """The definition of a function.

    Raises:
        NotUnderstood: it has no source, as in an extension, or its source compiles to other code.
    """
    if not isinstance(function, types.FunctionType):
        raise NotUnderstood(f"calls {getattr(function, '__qualname__', function)!s}, which has no source")
    if hasattr(function, "__wrapped__"):
        raise NotUnderstood(f"is wrapped: {function.__qualname__} has a decorator")
    found = _trees.get((function, function.__code__), lambda: _read(function))
    if isinstance(found, str):
        raise NotUnderstood(found)
    return found


def _read(function: types.FunctionType) -> ast.FunctionDef | str:
    """The definition of a function, with line numbers from 1; or why there is none."""
    name, first = function.__qualname__, function.__code__.co_firstlineno
    try:
        lines, _ = inspect.findsource(function)
        file = _parsed(tuple(lines))
        statements = [each for each in file.body if _is_at(each, first)]
        found = [place for each in statements for place in _functions_at(each, first, "")]
        named = [place for place in found if getattr(place[0], "name", "<lambda>") == function.__code__.co_name]
        definitions = [_copied(each, owner) for each, owner in named]
    except (OSError, TypeError, SyntaxError, ValueError, RecursionError):
        definitions = []
    if not definitions:
        return f"has no source for {name}"
    # A file is compiled as a whole, a notebook cell statement by statement.
    units = dict.fromkeys((_imports(file.body), _imports(statements)))
    same = [each for each in definitions if any(_compiles_to(each, function, imports) for imports in units)]
    # Several equal lambdas on one line are interchangeable.
    if same and all(ast.dump(each) == ast.dump(same[0]) for each in same[1:]):
        return ast.increment_lineno(same[0], 1 - first)
    return f"runs other code than the source of {name} says"


@functools.lru_cache(maxsize=4)
def _parsed(lines: tuple[str, ...]) -> ast.Module:
    """A parsed file, cached while several of its functions are read."""
    return ast.parse("".join(lines))


def _imports(statements: Iterable[ast.AST]) -> frozenset[str]:
    """The names that statements import, without those imported inside functions and classes."""
    found: set[str] = set()
    left = list(statements)
    while left:
        node = left.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(each.asname or each.name.partition(".")[0] for each in node.names)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            left += ast.iter_child_nodes(node)
    return frozenset(found - {"*"})


def _first_line(node: Any) -> int:
    """The first line of a function's code: that of its first decorator."""
    return min((each.lineno for each in getattr(node, "decorator_list", ())), default=node.lineno)


def _is_at(node: Any, line: int) -> bool:
    """Whether a node, or something in it, may be on a line."""
    return not hasattr(node, "lineno") or _first_line(node) <= line <= node.end_lineno


def _functions_at(node: ast.AST, line: int, owner: str) -> Iterator[tuple[ast.FunctionDef | ast.Lambda, str]]:
    """The functions that begin on a line, each with the name of the innermost class around it."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda)) and _first_line(node) == line:
        yield node, owner
    for each in ast.iter_child_nodes(node):
        if _is_at(each, line):
            inside = isinstance(node, ast.ClassDef) and each in node.body
            yield from _functions_at(each, line, node.name if inside else owner)  # type: ignore[attr-defined]


def _copied(function: ast.FunctionDef | ast.Lambda, owner: str) -> ast.FunctionDef:
    """A copy of a definition, with private names mangled as in its class."""
    made: Any = pickle.loads(pickle.dumps(function))
    if isinstance(made, ast.Lambda):
        body = ast.copy_location(ast.Return(made.body), made)
        made = ast.copy_location(_definition("<lambda>", made.args, [body]), made)
    for each in (made.args, *made.body):
        _make_private(each, owner)
    return cast(ast.FunctionDef, made)


def _make_private(node: ast.AST, owner: str) -> None:
    """Mangle private names of attributes and variables as the compiler does within a class: ``__up`` is
    ``_Block__up``."""
    inner = node.name if isinstance(node, ast.ClassDef) else owner
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        node.names = [_private(each, owner) for each in node.names]
    for field, value in ast.iter_fields(node):
        # Names of keyword arguments and of modules are not mangled.
        if isinstance(value, str) and (field in _NAMING or isinstance(node, ast.arg)):
            setattr(node, field, _private(value, owner))
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                _make_private(each, inner if field == "body" else owner)


def _private(name: str, owner: str) -> str:
    """A name as the compiler mangles it within a class."""
    owner = owner.lstrip("_")
    hidden = owner and name.startswith("__") and not name.endswith("__") and "." not in name
    return f"_{owner}{name}" if hidden else name


def without_decorators(definition: ast.FunctionDef) -> ast.FunctionDef:
    """The same definition without decorators."""
    return ast.copy_location(_definition(definition.name, definition.args, definition.body), definition)


def _definition(name: str, arguments: ast.arguments, body: list[Any]) -> ast.FunctionDef:
    """A definition without decorators or annotations."""
    # A field that only newer Python releases have.
    others: dict[str, Any] = {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}
    return ast.FunctionDef(name=name, args=arguments, body=body, decorator_list=[], **others)


def _compiles_to(definition: ast.FunctionDef, function: types.FunctionType, imports: frozenset[str]) -> bool:
    """Whether a definition compiles to the function's code, ignoring decorators, which have already been applied."""
    found = compiled(without_decorators(definition), function, imports=imports)
    return found is not None and _alike(found, function.__code__)


def compiled(
    bare: ast.FunctionDef, function: types.FunctionType, *variables: str, imports: Iterable[str] = ()
) -> types.CodeType | None:
    """The code of a definition without decorators, compiled in the context of the function.

    ``variables`` are names of the enclosing scope besides the function's free variables. ``imports`` are the names that
    its file imports: a call of an attribute of an imported name compiles to other instructions.
    """
    code = function.__code__
    # A method that calls super() takes its class from the enclosing scope.
    parameters = [ast.arg(arg=name) for name in (*code.co_freevars, *variables)]
    around = ast.arguments(posonlyargs=[], args=parameters, kwonlyargs=[], kw_defaults=[], defaults=[])
    inner: Any = bare
    if bare.name == "<lambda>":
        result: Any = bare.body[0]
        inner = ast.Expr(ast.Lambda(bare.args, result.value))
    # Its own name is global, unless it is a nested function that calls itself.
    own = [] if bare.name in {"<lambda>", *code.co_freevars} else [ast.Global(names=[bare.name])]
    outer = _definition("outer", around, [*own, inner])
    imported: list[Any] = [ast.Import(names=[ast.alias(name=name)]) for name in imports]
    module = ast.Module(body=[*imported, outer], type_ignores=[])
    ast.copy_location(outer, bare)
    ast.fix_missing_locations(module)
    flags = code.co_flags & _FUTURE
    try:
        whole = compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return _code_named(whole, code.co_name)


def _code_named(code: types.CodeType, name: str) -> types.CodeType | None:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    outer = next((each for each in inner if each.co_name == "outer"), None)
    inner = [] if outer is None else [each for each in outer.co_consts if isinstance(each, types.CodeType)]
    return next((each for each in inner if each.co_name == name), None)


def _alike(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two code objects do the same: their instructions, names and constants, and those of nested functions."""
    if any(getattr(one, name, None) != getattr(other, name, None) for name in _OF_CODE):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    for mine, theirs in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(mine, types.CodeType) and isinstance(theirs, types.CodeType):
            if not _alike(mine, theirs):
                return False
        elif type(mine) is not type(theirs) or (mine != theirs and not _are_names_inside(mine, theirs)):
            return False
    return True


def _are_names_inside(one: Any, other: Any) -> bool:
    """Whether these are qualified names of one nested function, which Python 3.10 keeps among the constants."""
    inside = ".<locals>."
    both = isinstance(one, str) and isinstance(other, str) and inside in one and inside in other
    return both and one.rpartition(inside)[2] == other.rpartition(inside)[2]
