"""The rules of the house that no single test of an operation would notice: imports, files, the wheel, a bare import."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import fusedlayers

ROOT = Path(__file__).resolve().parent.parent
# Where the sources of a package lie in the clone.
SOURCES = {
    "fusedlayers": ROOT / "fusedlayers",
    "fusedlayers.kernels": ROOT / "kernels",
    "train_examples": ROOT / "train_examples",
    "benchmarks": ROOT / "benchmarks",
}
MOST_LINES = 400
# Of functions in kernels/, and of the kernels themselves.
MOST_PARAMETERS = {False: 20, True: 34}

# The parts, lowest first, and what a part may import besides itself. A name covers what lies below it; `fusedlayers`
# is the package itself with its public names. Nothing of the library imports bench, and nothing imports benchmarks.
EVERY_ROW_BUT_BENCH = {
    "kernels": set[str](),
    "closeness": set[str](),
    "planning": {"kernels.tuning"},
    "reference": {"kernels.activations", "kernels.dropout"},
    "sources": {"kernels"},
    "folders": set[str](),
    "calibrations": {"kernels.device", "planning", "sources", "folders"},
    "releases": {"kernels.device", "planning", "sources", "folders"},
    "devices": {"kernels.device", "kernels.hopper", "planning", "calibrations", "releases", "folders"},
    "functional": {"kernels", "planning", "reference", "devices", "releases", "sources"},
    "modules": {"kernels", "planning", "reference", "functional"},
    "parallel": {"functional", "modules"},
    "replacing": {"kernels", "closeness", "planning", "reference", "devices", "functional", "modules"},
    "explaining": {"planning", "devices", "functional", "modules", "replacing"},
    "verifying": {"closeness", "functional", "modules", "replacing"},
    "fusedlayers": {"functional", "modules", "explaining", "parallel", "replacing", "verifying"},
}
MAY_IMPORT = EVERY_ROW_BUT_BENCH | {
    "bench": set(EVERY_ROW_BUT_BENCH),
    "train_examples": set(EVERY_ROW_BUT_BENCH),
    "benchmarks": {*EVERY_ROW_BUT_BENCH, "bench", "train_examples"},
}
# The other packages that a part may import while it is imported itself, the longest name first; inside a function it
# may import what only an extra brings.
LIBRARIES = {
    "kernels.tuning": set[str](),
    "kernels": {"torch", "triton"},
    "planning": set[str](),
    "train_examples.recipes": {
        *("torch", "accelerate", "axolotl", "datasets", "lightning", "peft", "pydantic", "pylate", "tokenizers"),
        *("torchtitan", "transformers", "trl"),
    },
    "train_examples": {"torch", "hydra", "omegaconf", "lightning", "matplotlib", "rich", "tokenizers"},
    # The tables of models come from records that the tests of models make.
    "benchmarks.pages": {"tests"},
    "benchmarks": {"torch"},
    "": {"torch", "einops"},
}


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of library, examples and benchmarks; a package ends in __init__."""
    for package, folder in SOURCES.items():
        for path in python_files(folder):
            yield ".".join([package, *path.relative_to(folder).with_suffix("").parts]), path


def imported(module: str, tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether a function delays it, or it is for type checkers alone) of every import.

    Relative names are resolved.
    """
    later = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) or _for_type_checkers(node)]
    delayed = {inner for outer in later for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in delayed) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = [*module.split(".")[: -node.level]] if node.level else []
            origin += [node.module] if node.module else []
            yield from ((".".join([*origin, alias.name]), node in delayed) for alias in node.names)


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def inner_name(dotted: str) -> str | None:
    """The name that the tables know a module or a public name by; None for one from elsewhere."""
    top, *rest = dotted.split(".")
    if top == "fusedlayers":
        return ".".join(rest) if rest and rest[0] in MAY_IMPORT else top
    return dotted if top in ("train_examples", "benchmarks") else None


def covers(name: str, inner: str) -> bool:
    return f"{inner}.".startswith(f"{name}." if name else "")


def import_faults(module: str, source: str) -> list[str]:
    """One line for every import of a module that goes the wrong way."""
    own = inner_name(module)
    if own == "fusedlayers" and module != "fusedlayers.__init__":
        return [f"{module} has no row in the table of imports"]
    part = own.split(".")[0]
    libraries = next(names for name, names in LIBRARIES.items() if covers(name, own))
    faults = []
    for name, delayed in imported(module, ast.parse(source)):
        target, top = inner_name(name), name.split(".")[0]
        if target is None:
            right = top in libraries | sys.stdlib_module_names or (delayed and top not in {"kernels", "tests"})
        else:
            right = any(covers(allowed, target) for allowed in {part} | MAY_IMPORT[part])
        if not right:
            faults.append(f"{module} imports {name}")
    return faults


def test_imports_go_one_way() -> None:
    faults = [fault for module, path in modules() for fault in import_faults(module, path.read_text())]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fusedlayers.kernels.tiles", "import fusedlayers.planning"),
        ("fusedlayers.kernels.tiles", "from .. import functional"),
        ("fusedlayers.kernels.tuning.gemm_gemm", "import torch"),
        ("fusedlayers.planning.gemm_gemm", "import torch"),
        ("fusedlayers.planning", "from fusedlayers.kernels import gemm_gemm"),
        ("fusedlayers.reference", "from .functional import ffn"),
        ("fusedlayers.reference", "import triton"),
        ("fusedlayers.functional", "def f():\n    from fusedlayers.modules import FusedFFN"),
        ("fusedlayers.modules", "from fusedlayers import replace"),
        ("fusedlayers.modules", "from .parallel import FusedFFNParallel"),
        ("fusedlayers.modules", "from kernels import gemm_gemm"),
        ("fusedlayers.replacing", "from fusedlayers.bench import runner"),
        ("fusedlayers.replacing", "import transformers"),
        ("fusedlayers.__init__", "from . import bench"),
        ("fusedlayers.bench.runner", "import train_examples.data"),
        ("fusedlayers.bench.runner", "def f():\n    import benchmarks.plots"),
        ("benchmarks.plots", "import matplotlib"),
        ("benchmarks.replay", "import tests.models"),
        ("train_examples.loop", "import benchmarks.plots"),
        ("train_examples.loop", "import fusedlayers.bench.cases"),
        ("train_examples.loop", "import transformers"),
        ("fusedlayers.verifying", "from . import bench"),
        ("fusedlayers.helpers", ""),
    ],
)
def test_an_import_the_wrong_way_is_found(module: str, source: str) -> None:
    assert import_faults(module, source)


def test_the_table_of_imports_has_no_circle() -> None:
    rows = list(MAY_IMPORT)
    for part, names in MAY_IMPORT.items():
        assert {name.split(".")[0] for name in names} <= set(rows[: rows.index(part)])


def test_every_file_is_python_3_10() -> None:
    for path in python_files(*SOURCES.values(), ROOT / "tests"):
        ast.parse(path.read_text(), filename=str(path), feature_version=(3, 10))


def test_files_are_short_and_named_for_a_purpose() -> None:
    for path in python_files(*SOURCES.values(), ROOT / "tests"):
        lines = len(path.read_text().splitlines())
        assert lines <= MOST_LINES, f"{path.relative_to(ROOT)} has {lines} lines: make it a folder of that name"
        assert path.stem not in {"utils", "util", "helpers", "common", "misc"}, "a helper lives where it is needed"


def test_kernels_take_few_parameters() -> None:
    """What belongs together is one argument: the strides of a tensor, the numbers of a dropout."""
    functions = [
        (path.name, node.name, len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs))
        for path in SOURCES["fusedlayers.kernels"].rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 300
    assert [each for each in functions if each[2] > MOST_PARAMETERS[each[1].endswith("_kernel")]] == []


def test_functions_beside_device_code_are_typed() -> None:
    """mypy lets untyped functions pass in kernels/, for the sake of device code: the others are held to types here."""
    untyped = []
    for path in python_files(SOURCES["fusedlayers.kernels"]):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or any("jit" in ast.unparse(mark) for mark in node.decorator_list):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            bare = {argument.arg for argument in given if argument and not argument.annotation} - {"self", "cls"}
            if bare or node.returns is None:
                untyped.append(f"{path.name}:{node.lineno} {node.name}")
    assert not untyped


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that nothing left in the clone by an earlier build gets into it."""
    copy = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("fusedlayers", "kernels", "train_examples", "benchmarks", "tests", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = (copy / "dist").iterdir()
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.mark.sampled
@pytest.mark.parametrize("place", ["the clone", "elsewhere"])
@pytest.mark.parametrize("wheel_too", [True, False], ids=["with the wheel", "without"])
def test_it_imports_from_anywhere(place: str, wheel_too: bool, installed: Path, tmp_path: Path) -> None:
    """Also in the clone's own folder, which Python searches first, whether the wheel is installed or not."""
    script = [
        "import runpy, sys",
        # What an editable installation adds would hide that a clone alone cannot be imported.
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in f'{each} {type(each)}'.lower()]",
        "import fusedlayers.kernels.gemm_gemm",
        "print(fusedlayers.__file__, fusedlayers.kernels.__file__)",
        "sys.argv = ['bench', '--help']",
        "runpy.run_module('fusedlayers.bench', run_name='__main__')",
    ]
    paths = [*([str(installed)] if wheel_too else []), *([] if place == "the clone" else [str(ROOT)])]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(script)],
        cwd=ROOT if place == "the clone" else tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    package, kernels = done.stdout.splitlines()[0].split()
    cloned = place == "the clone" or not wheel_too
    assert Path(package).parent == (ROOT if cloned else installed) / "fusedlayers"
    assert Path(kernels).parent == (ROOT / "kernels" if cloned else installed / "fusedlayers" / "kernels")


MOST_BYTES = 756 * 1024


def test_the_wheel_holds_the_library_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"fusedlayers-{fusedlayers.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    library = {module.replace(".", "/") + ".py" for module, _ in modules() if module.startswith("fusedlayers.")}
    about = f"fusedlayers-{fusedlayers.__version__}.dist-info"
    described = {f"{about}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "top_level.txt")}
    # No benchmarks of the documentation: their records and pictures are several times as large as the code.
    data = {f"fusedlayers/planning/data/{path.name}" for path in (ROOT / "fusedlayers/planning/data").glob("*.json")}
    assert len(data) >= 3
    assert set(names) == library | described | data | {"fusedlayers/py.typed"}
    assert "fusedlayers/kernels/gemm_gemm/__init__.py" in library


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES


def test_the_wheel_describes_itself(wheel: Path) -> None:
    about = metadata(wheel)
    assert about["Name"] == "fusedlayers"
    assert about["Version"] == fusedlayers.__version__
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.10"
    assert about["Summary"]
    assert about["Keywords"]
    # The page that a package index shows.
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload() == (ROOT / "README.md").read_text()
    assert {"examples", "models", "dev"} <= set(about.get_all("Provides-Extra"))
    pythons = re.findall(r"Python :: 3\.(\d+)", " ".join(about.get_all("Classifier")))
    assert pythons == ["10", "11", "12", "13"]


def test_the_changelog_knows_this_version() -> None:
    versions = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == ("Unreleased", "")
    # Between releases it is the next one's, with .dev0, so that a clone is told apart from the last release.
    here, last = Version(fusedlayers.__version__), Version(versions[1][0])
    assert here > last if here.is_devrelease else here == last
    dates = [date for _, date in versions[1:]]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", date) for date in dates)
    assert dates == sorted(dates, reverse=True)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"fusedlayers-{fusedlayers.__version__}.dist-info/METADATA").decode()
    return message_from_string(text)


def test_every_direct_dependency_is_pinned(wheel: Path) -> None:
    needed = {re.split(r"[^\w.-]", needs)[0] for needs in metadata(wheel).get_all("Requires-Dist")} - {"fusedlayers"}
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert {"torch", "pytest", "hydra-core"} <= needed <= pinned


# Any question to the driver fails, guarded or not: it could initialise CUDA, which a later fork would not survive.
NO_QUESTIONS = """
import torch
def refuse(*args, **kwargs):
    raise AssertionError("a device query during the import")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse
import fusedlayers
assert not torch.cuda.is_initialized()
"""
# As if Triton were not installed.
NO_TRITON = """
import sys
sys.modules["triton"] = None
"""
# Modules of an editable install, found where the wheel lacks one, would hide the gap.
ALL_FROM_THE_WHEEL = """
import os, sys, fusedlayers, fusedlayers.kernels.gemm_gemm
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "fusedlayers":
        assert module.__file__.startswith(os.environ["PYTHONPATH"]), (name, module.__file__)
"""
BACKWARD_LIKE_TORCH = """
import torch
layer = fusedlayers.FusedFFN(8, 16).double()
x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
(gradient,) = torch.autograd.grad(layer(x).square().sum(), x)
plain = torch.nn.Sequential(layer.up_proj, torch.nn.GELU(), layer.down_proj)
(expected,) = torch.autograd.grad(plain(x).square().sum(), x)
torch.testing.assert_close(gradient, expected)
"""


def test_the_import_is_silent_and_asks_no_device(installed: Path, run_python: Callable[..., object]) -> None:
    run_python(NO_QUESTIONS + ALL_FROM_THE_WHEEL, PYTHONPATH=str(installed), TRITON_INTERPRET=None)


def test_without_triton_everything_runs_through_torch(installed: Path, run_python: Callable[..., object]) -> None:
    code = NO_TRITON + ALL_FROM_THE_WHEEL + BACKWARD_LIKE_TORCH
    run_python(code, PYTHONPATH=str(installed), TRITON_INTERPRET=None)


@pytest.mark.usefixtures("poisoned_memory")
def test_uninitialised_memory_is_poisoned_on_request() -> None:
    some = torch.zeros(2, 3)
    for tensor in (torch.empty(2), torch.empty_like(some), some.new_empty(2), torch.empty_strided((2,), (1,))):
        assert tensor.isnan().all()
    assert torch.empty(2, requires_grad=True).requires_grad
    assert (torch.empty(2, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
