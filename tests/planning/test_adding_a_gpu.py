"""What a new GPU has to touch: a file of figures and a column in the tables of tiles. No rule names an architecture.

The dummy GPU is called sm_77. Its file and its column are laid over a copy of the package, and then the planner takes
kernels on it, with its own tiles, at the sizes that its file names.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_house import ROOT, python_files

FIGURES = '''
"""Measured on a dummy."""

from dataclasses import replace

from . import MaxSim, WeightGradient, other

FIGURES = replace(
    other.FIGURES,
    ceilings={"Dummy 9000": (100e12, 1e12)},
    maxsim=MaxSim(faster_from={False: (2**20, 2**18)}, widest=64),
    weight_gradient=WeightGradient(
        faster_from={True: (2**30, 2**28), False: None}, most_weights=2**18, alone_faster_from=(2**30, 2**28),
        many_rows=2**15, most_weights_alone=(2**18, 2**18), narrow=256, summed_from=(2**30, 2**28),
        summed_columns=2048,
    ),
)
'''
NEW_FILE = "planning/measured/sm_77.py"
# (file of kernels/tuning, before, after): the column.
COLUMN = [
    (
        "gemm_gemm.py",
        '    ("other", 16, False): _SMALL_16_BIT,\n',
        '    ("sm_77", 16, False): _SMALL_16_BIT,\n    ("other", 16, False): _SMALL_16_BIT,\n',
    ),
    (
        "gemm_reduce.py",
        '    ("other", 16): ((_ANY,',
        '    ("sm_77", 16): ((_ANY, ReduceConfig(32, 64, 32, 4, 1)),),\n    ("other", 16): ((_ANY,',
    ),
    (
        "grouped_gemm.py",
        '    ("other", 16):',
        '    ("sm_77", 16): GroupedTiles(32, 64, 32, 4, 3),\n    ("other", 16):',
    ),
]

PLANNED = """
from dataclasses import replace
from types import SimpleNamespace
import torch
import triton
from fusedlayers import devices
from fusedlayers.bench.selftest.trials import all_trials, covered
from fusedlayers.planning import Device, LinearProblem, MaxSimProblem, WeightGradientProblem, plan

found = SimpleNamespace(name="Dummy 9000", major=7, minor=7, multi_processor_count=64)
torch.cuda.get_device_properties = lambda device: found
device = devices.describe(torch.device("cuda", 0))
release = tuple(map(int, triton.__version__.split(".")[:2]))
assert device == Device("cuda", "Dummy 9000", "sm_77", sms=64, triton=True, triton_release=release), device
# As if its kernels were the warp-specialised ones, which alone are chosen unasked.
device = replace(device, backend="sm90")

large = WeightGradientProblem(M=65_536, O=512, K=256, dtype="bfloat16")
made = plan(large, device)
assert made.path == "fused"
assert made.tiles.block_m == 32 and made.tiles.num_stages == 3
assert made.floor_seconds == made.flops / 100e12
small = plan(replace(large, M=1024), device)
assert "faster than torch from 1,073,741,824 on when launched one by one" in dict(small.rejected)["fused"]

scores = MaxSimProblem(queries=64, documents=64, query_tokens=2048, document_tokens=8192, K=64, dtype="bfloat16")
assert plan(scores, device).path == "fused"
assert plan(scores, replace(device, backend="generic"), "triton").forward_tiles.block_p == 32
for change in ({"K": 128}, {"needs_query_gradient": True}):
    assert plan(replace(scores, **change), device).path == "torch"

# What its file lacks is left to torch; costs are there, for whoever asks for kernels.
linear = LinearProblem(M=64, N=64, K=65_536, dtype="bfloat16", captured=True)
assert "linear was not measured on sm_77" in plan(linear, device).why_torch(device)
assert plan(linear, device, "triton").path == "fused"

names = covered(all_trials(device), replace(device, backend="generic"))
assert any("GroupedTiles(block_m=32, block_n=64, block_inner=32," in name for name in names)
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the file and the column, and nothing else changed."""
    root = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("__pycache__", "kernels")
    shutil.copytree(ROOT / "fusedlayers", root / "fusedlayers", ignore=ignored)
    # Where an installed wheel has it.
    shutil.copytree(ROOT / "kernels", root / "fusedlayers" / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "fusedlayers" / NEW_FILE).write_text(FIGURES)
    for name, before, after in COLUMN:
        path = root / "fusedlayers" / "kernels" / "tuning" / name
        text = path.read_text()
        assert text.count(before) == 1, f"{name}: {before!r}"
        path.write_text(text.replace(before, after))
    return root


@pytest.mark.interpreter
def test_one_file_and_a_column_make_a_gpu_known(clone: Path) -> None:
    assert len({name for name, _, _ in COLUMN}) == len(COLUMN), "one row in each table"
    variables = {**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PLANNED], cwd=clone, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Architectures, cards, and the names of their generations.
NAMES = re.compile(
    r"sm_\d|gfx\d|compute_\d|\b(?:A|B|H|L|V|T|MI|GB|GH)\d{2,3}[a-z]?\b|GeForce|RTX|Tesla|Radeon|Instinct"
    r"|Hopper|Blackwell|Ampere|\bTuring|Volta|\bAda\b",
    re.IGNORECASE,
)
# What asks a device which one it is.
QUESTIONS = {"get_device_capability", "get_device_name", "gcnArchName", "major", "minor"}
# Kernels are written for an instruction set.
SCANNED = [
    path
    for path in python_files(ROOT / "fusedlayers")
    if "measured" not in path.relative_to(ROOT / "fusedlayers").parts
]
# The one file that asks a device for its architecture, and those that print the name of a device.
MAY_ASK = {"devices.py", "arguments.py", "verifying.py"}


def namings(tree: ast.AST, may_ask: bool) -> Iterator[str]:
    """What names an architecture or a card in code: texts, questions to the device, and comparisons of its name.

    Comments and docstrings may, as they say where a figure comes from or what a kernel is for.
    """
    documented = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documented:
            if found := NAMES.search(node.value):
                yield f"line {node.lineno}: {found.group()!r} in a text"
        elif isinstance(node, ast.Attribute) and node.attr in QUESTIONS and not may_ask:
            yield f"line {node.lineno}: {node.attr}"
        elif isinstance(node, ast.Attribute) and _is_architecture(node.value):
            yield f"line {node.lineno}: .{node.attr} of an architecture"
        elif isinstance(node, ast.Compare) and any(map(_is_architecture, (node.left, *node.comparators))):
            # Whether there is a file of figures is no name.
            yield from [f"line {node.lineno}: a comparison"] * (ast.unparse(node.comparators[0]) != "FIGURES")


def _is_architecture(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "architecture"


def test_no_rule_names_an_architecture_or_a_card() -> None:
    assert len(SCANNED) > 80
    faults = [
        f"{path.relative_to(ROOT)}, {fault}"
        for path in SCANNED
        for fault in namings(ast.parse(path.read_text()), path.name in MAY_ASK)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "source",
    [
        'fast = name == "NVIDIA H200"',
        'CEILINGS = {"H100": 1}',
        'text = f"{kind} on sm_90"',
        'tiles = table["gfx942"]',
        'if device.architecture == other: pass',
        'if device.architecture in (first, second): pass',
        'if device.architecture.startswith(prefix): pass',
        'wide = torch.cuda.get_device_capability() >= (9, 0)',
        'wide = found.major > 8',
        'why = "only Hopper has it"',
    ],
)  # fmt: skip
def test_a_rule_that_names_one_is_found(source: str) -> None:
    assert list(namings(ast.parse(source), may_ask=False))


def test_figures_and_comments_may_say_where_they_come_from() -> None:
    source = 'def f(device):\n    """Measured on an H200."""\n    return device.architecture in FIGURES  # an sm_90 one'
    assert not list(namings(ast.parse(source), may_ask=False))
