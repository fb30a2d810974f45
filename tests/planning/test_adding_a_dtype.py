"""Adding a dtype: what names one, or its width, is a table; everything else asks ``kernels/tuning/dtypes.py``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusedlayers.kernels.tuning.dtypes import FORMATS, KERNEL_DTYPES, UNKNOWN

ROOT = Path(__file__).resolve().parents[2]
# Where a call with operands of a new dtype passes through.
FOLDERS = ("kernels", "fusedlayers/planning", "fusedlayers/functional")
NAMES = ("float16", "bfloat16", "half")
SIZES = ("itemsize", "element_size", "element_bytes", "bits")
MOST = 10


def touched(source: str) -> Iterator[str]:
    """Code that another dtype would change: names of those there are, comparisons of widths, columns of a table."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in NAMES and ast.unparse(node.value) in ("torch", "tl", "gl"):
            yield ast.unparse(node)
        if isinstance(node, ast.Constant) and node.value in NAMES[:2]:
            yield repr(node.value)
        if isinstance(node, ast.Compare) and any(size in ast.unparse(node.left) for size in SIZES):
            other = node.comparators[0]
            if isinstance(other, ast.Constant) and other.value in (1, 2, 4, 8, 16, 32):
                yield ast.unparse(node)
        if isinstance(node, ast.Dict):
            for key in filter(None, node.keys):
                if isinstance(key, ast.Tuple) and {"sm_90", "other"} & {getattr(e, "value", "") for e in key.elts}:
                    yield ast.unparse(key)


def test_few_files_change_with_a_dtype() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): sorted(set(touched(path.read_text()))) for path in files}
    named = {name: what for name, what in found.items() if what}
    assert "kernels/tuning/dtypes.py" in named
    assert len(named) <= MOST, "\n".join(f"{name}: {', '.join(what)}" for name, what in named.items())


@pytest.mark.parametrize(
    "source",
    [
        'x.dtype == "float16"',
        "x.to(torch.bfloat16)",
        "if x.element_size() == 2: pass",
        "if problem.element_bytes != 2: pass",
        'TABLE = {("sm_90", 16): 1}',
    ],
)
def test_what_names_a_dtype_is_found(source: str) -> None:
    assert list(touched(source))


def test_the_table_says_what_follows_from_a_width() -> None:
    assert KERNEL_DTYPES == ("float16", "bfloat16", "float32")
    assert {name: (found.bytes, found.narrow) for name, found in FORMATS.items()} == {
        "float16": (2, True), "bfloat16": (2, True), "float32": (4, False), "float64": (8, False),
        "float8_e4m3fn": (1, True),
    }  # fmt: skip
    assert not UNKNOWN.backends
