"""README and docs: their code and commands run as written, tables are those of the results, links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from docs import tables
from fusedlayers.bench.__main__ import build_parser
from fusedlayers.kernels.activations import ACTIVATIONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text() for page in tables.pages()}
# bash and python run as written; text is for a GPU, several processes, or an hour.
KINDS = {"bash", "python", "text"}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> dict[str, list[str]]:
    """Those of one kind, by page, in order."""
    found = {page: [body for name, body in _BLOCK.findall(text) if name == kind] for page, text in PAGES.items()}
    return {page: bodies for page, bodies in found.items() if bodies}


def commands(kind: str) -> list[str]:
    """The lines that are commands; others are drawings, or Python."""
    lines = [line for bodies in blocks(kind).values() for body in bodies for line in body.splitlines()]
    return [line for line in lines if re.match(r"([A-Z_]+=\S+ )*(python|torchrun|accelerate|make|pytest) ", line)]


# Its C++ compiler takes longer than all other pages; test_compiled.py compiles the operations with other backends.
COMPILED = ("docs/compile.md",)


# Runs each script in a fork of one process: what all of them import takes longer than what they do.
IN_FORKS = """
import os, runpy, sys, traceback
import fusedlayers, torch
for script in sys.argv[1:]:
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{script} failed")
        continue
    status = 1
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
"""


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param([page for page in blocks("python") if page not in COMPILED], id="most pages"),
        pytest.param(COMPILED, id=" ".join(COMPILED), marks=pytest.mark.full),
    ],
)
def test_its_python_runs_in_order(pages: Sequence[str], tmp_path: Path) -> None:
    scripts = []
    for page in pages:
        code = "\n".join(blocks("python")[page])
        if "transformers" in code and not importlib.util.find_spec("transformers"):
            continue
        scripts.append(tmp_path / page.replace("/", " "))
        scripts[-1].write_text(code)
    # That nothing was replaced is a warning, and would make the example untrue.
    command = [sys.executable, "-W", "error:nothing was replaced", "-c", IN_FORKS, *map(str, scripts)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSEDLAYERS_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is committed, with an environment that has what the text installs, but for the library itself."""
    copy = tmp_path_factory.mktemp("documentation") / "fusedlayers"
    copy.mkdir()
    for name in ("fusedlayers", "kernels", "train_examples", "tests", "configs", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, copy)
    home = copy.parent / "environment"
    # With the pip and the setuptools of this environment: to install them takes longer than everything else here.
    venv.create(home, with_pip=False)
    command = home / "bin" / "pip"
    command.write_text(
        f"#!{home / 'bin' / 'python'}\nfrom pip._internal.cli.main import main\nraise SystemExit(main())\n"
    )
    command.chmod(0o755)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    here = [path for path in sys.path if path.endswith("site-packages")]
    # A line that imports an editable installation stays behind, so that the library is the one that is installed here.
    (packages / "packages.pth").write_text("\n".join(here) + "\n")
    return copy


# Runs that take long; other tests make such runs with smaller models, and all commands are looked at below.
SLOW = ("docs/examples.md", "docs/models.md", "docs/results.md")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.full) if page in SLOW else page for page in blocks("bash")]
)
def test_its_commands_run_as_written(page: str, clone: Path) -> None:
    binaries = clone.parent / "environment" / "bin"
    ours = ("FUSEDLAYERS_", "TRITON_", "MAKE")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        # pip finds everything where it is, and asks no index.
        "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    for body in blocks("bash")[page]:
        # What make would do would install an environment, or run this test again.
        script = re.sub(r"^make ", "make --dry-run ", body, flags=re.MULTILINE)
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{body}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_commands_are_understood() -> None:
    from hydra import compose, initialize_config_dir

    checked = 0
    for line in commands("text") + commands("bash"):
        words = shlex.split(line)
        if words[:1] == ["make"]:
            subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        if "-m" not in words:
            continue
        module, arguments = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
        assert importlib.util.find_spec(module), line
        checked += 1
        if module == "fusedlayers.bench":
            build_parser().parse_args(arguments)
        name = module.rpartition(".")[2]
        if (ROOT / "configs" / f"{name}.yaml").exists():
            importlib.import_module(module)
            with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
                compose(name, overrides=[word for word in arguments if "=" in word])
    assert checked > 10


def test_every_block_says_what_it_is() -> None:
    # The first page opens with a drawing.
    kinds = {kind for text in PAGES.values() for kind, _ in _BLOCK.findall(text)}
    assert kinds - {""} == KINDS
    assert all(len(blocks(kind)) > 3 for kind in KINDS)


@pytest.mark.parametrize("page", PAGES)
def test_its_tables_are_those_of_the_results(page: str) -> None:
    assert tables.written(PAGES[page]) == PAGES[page], "make docs"


def test_every_table_is_shown_once() -> None:
    shown = re.findall(r"<!-- table: (.+?) -->", "\n".join(PAGES.values()))
    assert sorted(shown) == sorted(tables.TABLES)
    with pytest.raises(ValueError, match="table 'another' is not known; known are"):
        tables.written("<!-- table: another -->\n<!-- end of the table -->\n")


def test_every_record_is_shown() -> None:
    text = "\n".join(PAGES.values())
    records = [*(ROOT / "fusedlayers" / "bench" / "results").rglob("*.json")]
    records += (ROOT / "train_examples" / "results").glob("*.json")
    in_tables = {path for place in tables.PLACES.values() for path in place.paths()}
    assert not [path for path in records if path.name not in text and path not in in_tables]


def test_a_table_has_the_records_of_every_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of every release of Triton; the first page shows the most complete one of the usual release."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    folder = tmp_path / "steps"
    folder.mkdir()
    for name, complete, started in (
        ("h100-bf16.json", 2, "1"), ("h200-bf16.json", 2, "2"), ("h100-bf16-triton-3.9.json", 2, "3"),
        ("h100-bf16-others.json", 9, "4"),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps({"name": name, "complete": complete, "started": started}))
    names = ["h100-bf16-triton-3.9.json", "h100-bf16.json", "h200-bf16.json"]
    assert [path.name for path in tables.PLACES["whole steps"].paths()] == names
    assert [path.name for path in tables.Place("steps", "-others").paths()] == ["h100-bf16-others.json"]
    shown = tables.Place("steps", markdown=lambda found: f"{found['name']}\n").shown()
    assert shown == "\n\n".join(names)
    found = tables._most_complete("whole steps", lambda found: int(found["complete"]))
    assert found["name"] == "h200-bf16.json"


def test_the_first_page_is_short() -> None:
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 250
    rows = "".join("|" if line.startswith("|") else " " for line in lines).split()
    # A heading and its rule, and twelve rows.
    assert max(map(len, rows)) <= 14


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        place, _, title = link.partition("#")
        if place.startswith("http"):
            continue
        target = (ROOT / page).parent / place if place else ROOT / page
        if not target.exists() or (title and title not in _anchors(target.read_text())):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_it_names_are_there(page: str) -> None:
    named = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|json|txt))`", PAGES[page])
    # Folders of the package are named without it.
    assert [name for name in named if not (ROOT / name).is_file() and not (ROOT / "fusedlayers" / name).is_file()] == []


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_activation_has_a_row() -> None:
    table = PAGES["docs/how-it-works.md"].partition("## Activations")[2]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(ACTIVATIONS)
