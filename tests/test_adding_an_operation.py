"""What a new operation has to touch: files of its own, and at most four edits elsewhere.

The dummy operation in ``tests/dummy_operation`` has the files of a real one, in the folders where they belong. They are
laid over a copy of the package, the edits below are made, and then everything knows the operation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_house import MOST_LINES, ROOT, import_faults

DUMMY = Path(__file__).parent / "dummy_operation"
MOST_EDITS = 4
# (file, before, after): all that changes in files that are there already.
EDITS = [
    (
        "fusedlayers/functional/__init__.py",
        "from .maxsim import maxsim\n",
        "from .maxsim import maxsim\nfrom .row_sums import row_sums\n",
    ),
    ("fusedlayers/functional/__init__.py", '"maxsim", ', '"maxsim", "row_sums", '),
    (
        "fusedlayers/reference/__init__.py",
        "from .reductions import gemm_reduce, gemm_sum, maxsim\n",
        "from .reductions import gemm_reduce, gemm_sum, maxsim\nfrom .row_sums import row_sums\n",
    ),
]

# The call itself, through torch (auto) and through the kernel (triton).
CALLED = """
import os
import torch
from torch.utils.flop_counter import FlopCounterMode
import fusedlayers as fl
from fusedlayers.functional.dispatch import decisions
row_sums = fl.functional.row_sums
upstream = torch.randn(37)

def gradients(x, *dtypes):
    leaf = x.clone().requires_grad_()
    y = row_sums(leaf)
    (dx,) = torch.autograd.grad(y, leaf, upstream.to(y.dtype), create_graph=True)
    assert (y.dtype, dx.dtype) == dtypes, (y.dtype, dx.dtype)
    torch.testing.assert_close(y.float(), x.sum(1), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(dx, upstream[:, None].expand(37, 40), atol=1e-3, rtol=1e-3)

for backend, path in (("auto", "torch"), ("triton", "fused")):
    os.environ["FUSEDLAYERS_BACKEND"] = backend
    torch._dynamo.reset()
    x = torch.randn(37, 40)
    with decisions() as paths:
        torch.testing.assert_close(row_sums(x.T), x.sum(0))
        gradients(x, torch.float32, torch.float32)
        with torch.autocast("cpu", torch.float16):
            gradients(x, torch.float16, torch.float32)
        compiled = torch.compile(row_sums, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), x.sum(1))
        leaf = x.clone().requires_grad_()
        compiled(leaf).backward(upstream)
        torch.testing.assert_close(leaf.grad, upstream[:, None].expand(37, 40))
    assert {*paths} == {f"row_sums {path}"}, paths
    with FlopCounterMode(display=False) as counter:
        row_sums(x)
    assert path == "torch" or counter.get_total_flops() == x.numel()
    try:
        row_sums(x[0])
    except ValueError as error:
        assert "x of shape [40] and dtype torch.float32 on cpu: expected [M, N]" in str(error)
    else:
        raise AssertionError("a vector has no rows")

    text = fl.explain(row_sums, x.requires_grad_(), details=True)
    assert text.split("\\n", 1)[1].startswith("row_sums: y = Σ_n x\\n  problem "), text
    assert "M=37 (rows) N=40, float32, forward and backward\\n" in text
    assert ("16 rows × 32 columns" in text) == (path == "fused")

    found = fl.verify(row_sums, x)
    assert found.ok, found
    assert found.paths == {f"row_sums {path}": 1}
    assert {verdict.name for verdict in found.verdicts} == {"y", "d x"}
"""

# The trials of the self-test: which there are, that one is right, and that a failure is avoided.
TESTED = """
from dataclasses import replace
import torch
from fusedlayers import planning
from fusedlayers.bench.selftest import running
from fusedlayers.bench.selftest.trials import all_trials, covered, few_trials
device = planning.Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True, backend="sm90")
trials = [trial for trial in all_trials(device) if trial.case == "row_sums"]
names = covered(trials, device)
assert names == {f"row_sums tiles, {bits} bits: RowSumTiles(block_m=16, block_n=32)" for bits in (16, 32)}
problem = trials[0].plan(device).problem
plan = planning.plan(problem, replace(device, avoided=frozenset(names)), "triton")
assert plan.path == "torch"
assert "gave wrong numbers here in the self-test" in plan.unsupported
[trial] = [trial for trial in few_trials() if trial.case == "row_sums"]
assert running.run(trial, torch.device("cpu")) == running.Outcome({})
"""


def new_files() -> list[str]:
    return sorted(path.relative_to(DUMMY).as_posix() for path in DUMMY.rglob("*.py"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its tests, with the operation."""
    root = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("__pycache__", "kernels", "results", "dummy_operation")
    shutil.copytree(ROOT / "fusedlayers", root / "fusedlayers", ignore=ignored)
    shutil.copytree(ROOT / "tests", root / "tests", ignore=ignored)
    # Where an installed wheel has it; the clone's own is known to Python by its place.
    shutil.copytree(ROOT / "kernels", root / "fusedlayers" / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in new_files():
        place = root / (name if name.startswith("fusedlayers") else f"fusedlayers/{name}")
        assert not place.exists()
        shutil.copy(DUMMY / name, place)
    for name, before, after in EDITS:
        text = (root / name).read_text()
        assert text.count(before) == 1, f"{name}: {before!r}"
        (root / name).write_text(text.replace(before, after))
    return root


def run(clone: Path, *command: str, **environment: str) -> str:
    variables = {**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *command], cwd=clone, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_at_most_four_edits() -> None:
    assert len(EDITS) <= MOST_EDITS


@pytest.mark.parametrize("name", new_files())
def test_the_new_files_obey_the_house(name: str) -> None:
    source = (DUMMY / name).read_text()
    module = name.removesuffix(".py").replace("/", ".")
    assert not import_faults(module if module.startswith("fusedlayers") else f"fusedlayers.{module}", source)
    assert len(source.splitlines()) <= MOST_LINES


@pytest.mark.interpreter
def test_a_call_through_torch_and_through_the_kernel(clone: Path) -> None:
    run(clone, "-W", "error", "-c", CALLED, TRITON_INTERPRET="1")


@pytest.mark.full
@pytest.mark.interpreter
def test_the_selftest_has_its_trials(clone: Path) -> None:
    run(clone, "-W", "error", "-c", TESTED, TRITON_INTERPRET="1")


@pytest.mark.full
@pytest.mark.interpreter
def test_the_benchmark_verifies_it(clone: Path) -> None:
    said = run(clone, "-m", "fusedlayers.bench", "row_sums", "--verify", "--device", "cpu", TRITON_INTERPRET="1")
    assert "verify row_sums 130×70 fp32" in said
    assert "auto (torch path): green" in said
    assert "fused (fused path): green" in said
    assert "verification is green" in said


@pytest.mark.full
@pytest.mark.interpreter
def test_what_every_operation_is_tested_for_includes_it(clone: Path) -> None:
    """The tests of the copy that walk through all operations, trials and cases, none of them edited."""
    files = ("tests/verifying/test_verifying.py", "tests/bench/test_selftest.py")
    chosen = "row_sums or with_a_benchmark_case"
    said = run(clone, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen, TRITON_INTERPRET="1")
    assert said.splitlines()[-1].startswith("4 passed")
