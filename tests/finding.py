"""Finds the tests of a kernel or an operation, by the names of files and by what they import.

``make test-kernel NAME=gemm_epilogue`` runs them; ``python -m tests.finding gemm_epilogue`` prints their files, and
with ``--gpu`` those that need a GPU. They are

- the files named after NAME, such as ``test_ffn_chunked.py`` after ``ffn``, and ``test_numbers.py`` where it is there,
- for a file or folder of ``kernels/`` also the files that import it, and those named after an operation that imports it
  or a kernel built on it,
- for what none of these are of, such as ``linear_log_probs``, the files that mention it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
from pathlib import Path

from fusedlayers.functional.operation import OPERATIONS, Operation
from tests.support.number_cases import NUMBERS

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {path.stem for path in (ROOT / "kernels").iterdir()} - {"__init__", "__pycache__"}
NAMES = KERNELS | set(OPERATIONS)
# The folders whose tests are about kernels and operations; other tests use some as examples.
FOLDERS = ("functional", "kernels", "planning")


def files(name: str, gpu: bool = False) -> list[str]:
    """The files of the tests of a kernel or an operation.

    Raises:
        ValueError: neither a kernel nor an operation has that name.
    """
    if name not in NAMES:
        raise ValueError(f"NAME is {name!r}; expected one of {', '.join(sorted(NAMES))}")
    all_files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if ("gpu" in path.parts) == gpu]
    about_kernels = [path for path in all_files if gpu or path.parent.name in FOLDERS]
    found = {path for path in all_files if name in _named(path)}
    if name in KERNELS:
        found |= {path for path in about_kernels if name in _imports(path)}
        # Only data lies in tuning, in files that have the names of kernels.
        built_on = {name} | {each for each in KERNELS - {"tuning"} if name in _imports(ROOT / "kernels" / each)}
        users = {each for each, operation in OPERATIONS.items() if built_on & _imports(_source(operation))}
        found |= {path for path in all_files if users & _named(path)}
    found = found or {path for path in about_kernels if re.search(rf"\b{name}\b", path.read_text())}
    return [path.relative_to(ROOT).as_posix() for path in sorted(found)]


def _named(path: Path) -> set[str]:
    """The kernels and operations in a file's name; ``linear_cross_entropy`` does not mean ``linear``, too."""
    if path.stem == "test_numbers":
        return {numbers.function for numbers in NUMBERS.values()}
    found = {name for name in NAMES if re.search(rf"_{name}(_|$)", path.stem)}
    return {name for name in found if not any(name in other for other in found - {name})}


def _source(operation: Operation) -> Path:
    """The file or folder of an operation."""
    file = Path(inspect.getfile(type(operation)))
    return file.parent if file.stem == "__init__" else file


@functools.cache
def _imports(module: Path) -> set[str]:
    """All names in the import statements of a module, which is a file or a folder."""
    files = sorted(module.rglob("*.py")) if module.is_dir() else [module.with_suffix(".py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name for node in imports for name in (*(node.module or "").split("."), *(each.name for each in node.names))}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.finding", description=__doc__)
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--gpu", action="store_true", help="those that need a GPU")
    given = parser.parse_args()
    try:
        print(*files(given.name, given.gpu))
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
