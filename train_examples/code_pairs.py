"""(docstring, code) pairs of the installed Python standard library, split by module.

A query is the first paragraph of a function's docstring; it should find the code of that function, from its decorators
to its last statement, without comments and docstrings.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from train_examples.data import position, standard_library_files
from train_examples.rules import SettingsError
from train_examples.settings import PairSettings, check_section

# Shorter texts cannot be searched for: "Return self.", a method that only raises or delegates.
LEAST_QUERY_WORDS = 3
LEAST_CODE_WORDS = 10
# Recall@10 among fewer says little, and a batch needs other pairs to tell a pair apart from.
LEAST_PAIRS = 20

# Ten modules hold almost half of the pairs. Of the prefixes tried, this one keeps them out of both held-out parts:
# these get 12% and 7% of the pairs on Python 3.11, and about the same on 3.10 to 3.13.
SPLIT = "code_search/"

# The parts of snake_case and CamelCase names: HTTPServer -> HTTP, Server. Punctuation is dropped.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Pair:
    """One function: its dotted name, its docstring and its code, and both of these as words."""

    name: str  # shutil.copyfile
    query: str
    code: str
    query_words: tuple[str, ...]
    code_words: tuple[str, ...]


@dataclass(frozen=True)
class Pairs:
    """Three lists in file order, with no top-level module in two of them; and one line about them."""

    training: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    description: str


def load_pairs(settings: PairSettings) -> Pairs:
    """Every pair of the installed standard library, split as ``settings`` says.

    Raises:
        SettingsError: names what is wrong: the kind, a fraction, or a part with too few pairs.
    """
    check_section("data", settings)
    held_out = settings.test_fraction + settings.validation_fraction
    folder = Path(sysconfig.get_path("stdlib"))
    parts: dict[str, list[Pair]] = {"training": [], "validation": [], "test": []}
    modules: dict[str, set[str]] = {name: set() for name in parts}
    for module, pair in distinct(pairs_in(folder)):
        where = position(SPLIT + module)
        part = "test" if where < settings.test_fraction else "validation" if where < held_out else "training"
        parts[part].append(pair)
        modules[part].add(module)
    for name, part in parts.items():
        if len(part) < LEAST_PAIRS:
            raise SettingsError(
                f"data=stdlib: {folder} gives {len(part)} pairs for {name} (data.validation_fraction="
                f"{settings.validation_fraction}, data.test_fraction={settings.test_fraction}); "
                f"expected at least {LEAST_PAIRS}"
            )
    sizes = ", ".join(f"{len(part):,} of {len(modules[name])} modules for {name}" for name, part in parts.items())
    return Pairs(**parts, description=f"(docstring, code) pairs of the Python standard library in {folder}: {sizes}")


def pairs_in(folder: Path) -> Iterator[tuple[str, Pair]]:
    """(top-level module, pair) of every function that has a docstring; files that Python cannot parse are skipped."""
    for path, source in standard_library_files(folder):
        # Code is shared mostly within a package: all its files go to one part.
        module = path.parts[0].removesuffix(".py")
        try:
            with warnings.catch_warnings():
                # Do not warn of invalid escapes in somebody else's file.
                warnings.simplefilter("ignore", SyntaxWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
                tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        for name, function in functions(tree, dotted(path)):
            pair = as_pair(name, function)
            if pair is not None:
                yield module, pair


def dotted(path: PurePath) -> str:
    """``email/header.py`` as ``email.header``."""
    return ".".join(part for part in path.with_suffix("").parts if part != "__init__")


def functions(scope: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """(dotted name, definition) of the functions and methods below ``scope``, without nested functions, which are part
    of the code of the outer one."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Function):
            yield f"{prefix}.{node.name}", node
        else:
            inner = f"{prefix}.{node.name}" if isinstance(node, ast.ClassDef) else prefix
            yield from functions(node, inner)


def as_pair(name: str, function: Function) -> Pair | None:
    """The pair of one function, or None if it has no docstring or one of the two is trivial."""
    docstring = ast.get_docstring(function)
    if not docstring:
        return None
    query = re.split(r"\n\s*\n", docstring.strip(), maxsplit=1)[0]
    code = code_without_docstrings(function)
    query_words, code_words = words(query), words(code)
    if len(query_words) < LEAST_QUERY_WORDS or len(code_words) < LEAST_CODE_WORDS:
        return None
    return Pair(name, " ".join(query.split()), code, query_words, code_words)


def code_without_docstrings(function: Function) -> str:
    """The source of ``function``, unparsed from its syntax tree, and so without comments. Strings that are statements
    (docstrings, and strings used as comments) are removed from the tree in place."""
    for node in ast.walk(function):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not is_text_alone(statement)] or [ast.Pass()]
    return ast.unparse(function)


def is_text_alone(statement: ast.AST) -> bool:
    """Whether a statement is only a string literal."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def distinct(pairs: Iterator[tuple[str, Pair]]) -> Iterator[tuple[str, Pair]]:
    """The pairs whose query and code are both new: a search could not tell equal ones apart, and none may be in two
    parts."""
    queries, codes = set(), set()
    for module, pair in pairs:
        if pair.query_words not in queries and pair.code_words not in codes:
            yield module, pair
        queries.add(pair.query_words)
        codes.add(pair.code_words)


def words(text: str) -> tuple[str, ...]:
    """The words of a text or of code in lower case, with names split into parts: ``readline_CRLF`` gives readline,
    crlf."""
    return tuple(word.lower() for word in WORD.findall(text))
