"""The source of a function as a syntax tree, believed only where it compiles to the code that runs."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import operator
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

from ..remembering import Remembered
from .values import NotUnderstood

# The features of Python that a module may have asked for.
_FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
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
        NotUnderstood: it has no source, as in an extension, or its code is not that of the source.
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
    name = function.__qualname__
    if function.__name__ == "<lambda>":
        return _read_lambda(function) or f"has no source for {name}"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return f"has no source for {name}"
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, ast.FunctionDef):
        return f"has no source for {name}"
    if not _is_same(function, definition):
        return f"runs other code than the source of {name} says"
    return definition


def _read_lambda(function: types.FunctionType) -> ast.FunctionDef | None:
    """The only lambda on its line that compiles to this code, as a definition."""
    try:
        lines, _ = inspect.findsource(function)
        tree = ast.parse("".join(lines))
    except (OSError, TypeError, SyntaxError):
        return None
    first = function.__code__.co_firstlineno
    found = [each for each in ast.walk(tree) if isinstance(each, ast.Lambda) and each.lineno == first]
    made = [
        ast.copy_location(_definition("<lambda>", each.args, [ast.copy_location(ast.Return(each.body), each)]), each)
        for each in found
        if _compiles_to(each, function)
    ]
    return made[0] if len({ast.dump(each) for each in made}) == 1 else None


def _is_same(function: types.FunctionType, definition: ast.FunctionDef) -> bool:
    """Whether the definition compiles to the function's code, whatever decorators there are: they have been called."""
    return _compiles_to(without_decorators(definition), function)


def without_decorators(definition: ast.FunctionDef) -> ast.FunctionDef:
    """The same definition, of a function that nothing is done to."""
    return ast.copy_location(_definition(definition.name, definition.args, definition.body), definition)


def _definition(name: str, arguments: ast.arguments, body: list[Any]) -> ast.FunctionDef:
    """A definition with nothing else."""
    # A field of newer releases of Python.
    others: dict[str, Any] = {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}
    return ast.FunctionDef(name=name, args=arguments, body=body, decorator_list=[], **others)


def _compiles_to(bare: ast.FunctionDef | ast.Lambda, function: types.FunctionType) -> bool:
    """Whether a definition without decorators, or a lambda, compiles to the function's code."""
    found = compiled(bare, function)
    described = isinstance(bare, ast.FunctionDef) and ast.get_docstring(bare) is not None
    return found is not None and _alike(found, function.__code__, described=described)


def compiled(
    bare: ast.FunctionDef | ast.Lambda, function: types.FunctionType, *variables: str
) -> types.CodeType | None:
    """The code of a definition without decorators, or of a lambda, in the place of the function's.

    ``variables`` are names around it besides those that the function has.
    """
    code = function.__code__
    # A method that says super() takes its class from around it.
    parameters = [ast.arg(arg=name) for name in (*code.co_freevars, *variables)]
    around = ast.arguments(posonlyargs=[], args=parameters, kwonlyargs=[], kw_defaults=[], defaults=[])
    inner = bare if isinstance(bare, ast.FunctionDef) else ast.Expr(bare)
    outer = _definition("outer", around, [inner])
    # Calls of what a module imports compile to other instructions.
    modules = [name for name in code.co_names if isinstance(function.__globals__.get(name), types.ModuleType)]
    imports = [ast.Import(names=[ast.alias(name=name)]) for name in modules]
    module = ast.Module(body=[*imports, outer], type_ignores=[])
    ast.copy_location(inner, bare)
    ast.copy_location(outer, bare)
    ast.fix_missing_locations(module)
    flags = code.co_flags & _FUTURE
    try:
        whole = compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return _code_named(whole, code.co_name)


def _code_named(code: types.CodeType, name: str) -> types.CodeType | None:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    outer = next((each for each in inner if each.co_name == "outer"), None)
    inner = [] if outer is None else [each for each in outer.co_consts if isinstance(each, types.CodeType)]
    return next((each for each in inner if each.co_name == name), None)


def _alike(one: types.CodeType, other: types.CodeType, *, described: bool = False) -> bool:
    """Whether two codes do the same: their instructions, names and constants, and those of functions inside.

    The docstring of a function that is ``described`` may differ: the source of a method is indented.
    """
    if one.co_code != other.co_code or one.co_names != other.co_names or one.co_varnames != other.co_varnames:
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    for mine, theirs in [*zip(one.co_consts, other.co_consts, strict=True)][described:]:
        if isinstance(mine, types.CodeType) and isinstance(theirs, types.CodeType):
            if not _alike(mine, theirs):
                return False
        elif type(mine) is not type(theirs) or (mine != theirs and not _are_names_inside(mine, theirs)):
            return False
    return True


def _are_names_inside(one: Any, other: Any) -> bool:
    """Whether these are the names of one function inside of another, which Python 3.10 keeps among the constants."""
    inside = ".<locals>."
    both = isinstance(one, str) and isinstance(other, str) and inside in one and inside in other
    return both and one.rpartition(inside)[2] == other.rpartition(inside)[2]
