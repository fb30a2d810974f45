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
from pathlib import Path

import pytest

from benchmarks import pages
from fusedlayers.bench.__main__ import build_parser
from fusedlayers.kernels.activations import ACTIVATIONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text() for page in pages.pages()}
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


def reading_order() -> list[str]:
    """README, the pages in the order in which its list of pages names them, and pages that it does not name."""
    named = re.findall(r"\]\((docs/[\w-]+\.md)\)", PAGES["README.md"].partition("## Documentation")[2])
    return list(dict.fromkeys(["README.md", *named, *PAGES]))


# What takes long; other tests make such runs with smaller models, and all commands are looked at below.
# Its C++ compiler takes longer than all other pages; test_compiled.py compiles the operations with other backends.
SLOW_PYTHON = {"docs/compile.md"}
SLOW_COMMANDS = {"docs/examples.md", "docs/models.md", "docs/results.md"}


# Runs each script that is named to it in a fork of one process, and says how it ended: what all of them import takes
# longer than what they do.
IN_FORKS = """
import os, runpy, sys, traceback
import fusedlayers, torch
for script in sys.stdin:
    child = os.fork()
    if child:
        print(os.waitpid(child, 0)[1], flush=True)
        continue
    os.dup2(2, 1)
    status = 1
    try:
        runpy.run_path(script.strip(), run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
"""


class Forks:
    """The process for scripts, in a folder and with an environment; what they print is in ``printed``."""

    def __init__(self, python: Path, folder: Path, environment: dict[str, str], printed: Path) -> None:
        self.printed = printed
        # That nothing was replaced is a warning, and would make the example untrue.
        command = [python, "-W", "error:nothing was replaced", "-c", IN_FORKS]
        pipe = subprocess.PIPE
        with printed.open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=errors, text=True
            )

    def run(self, script: Path) -> None:
        assert self.process.stdin is not None
        print(script, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "0\n", f"{script.name}\n{self.printed.read_text()[-3000:]}"

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is committed, with an environment that has what the text installs, but for the library itself."""
    copy = tmp_path_factory.mktemp("documentation") / "fusedlayers"
    copy.mkdir()
    for name in ("fusedlayers", "kernels", "train_examples", "benchmarks", "tests", "configs", "docs"):
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


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.full)], ids=["quick", "everything"])
def test_its_blocks_run_in_order(everything: bool, clone: Path, tmp_path: Path) -> None:
    """In one folder, each in the state that the text before it leaves."""
    home = clone.parent / "environment"
    # So that make installs nothing: the environment is newer than all that it is made from.
    (home / ".installed").touch()
    ours = ("FUSEDLAYERS_", "TRITON_", "MAKE")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        # pip finds everything where it is, and asks no index.
        "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        # What make reads: where the environment is, and a run of seconds.
        "VENV": str(home), "MODEL": "tiny", "STEPS": "2",
    }  # fmt: skip
    # Other targets would lint, or run this test again.
    shown = r"^make (?!train$)" if everything else r"^make "
    ran: list[str] = []
    forks: Forks | None = None
    for page in reading_order():
        for kind, body in _BLOCK.findall(PAGES[page]):
            if kind == "bash" and (everything or page not in SLOW_COMMANDS):
                script = re.sub(shown, "make --dry-run ", body, flags=re.MULTILINE)
                command = ["bash", "-euo", "pipefail", "-c", script]
                done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
                assert done.returncode == 0, f"{page}: {body}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
                ran.append(page)
            # The Python of a page is one script, which runs where its first block stands.
            code = tmp_path / f"{page.replace('/', ' ')}.py"
            if kind != "python" or code.exists() or (not everything and page in SLOW_PYTHON):
                continue
            code.write_text("\n".join(blocks("python")[page]))
            if "transformers" in code.read_text() and not importlib.util.find_spec("transformers"):
                continue
            forks = forks or Forks(home / "bin" / "python", clone, environment, tmp_path / "printed")
            forks.run(code)
            ran.append(page)
    forks.close()
    assert list(dict.fromkeys(ran)) == [page for page in reading_order() if page in ran]
    assert len(ran) > 8


def test_no_two_runs_share_a_folder() -> None:
    """A folder that holds a run is refused, and `make train` of README leaves two."""
    recipe = subprocess.run(["make", "--dry-run", "train"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    text = "\n".join([recipe, *commands("bash"), *commands("text")])
    folders = re.findall(r"language_model .*run\.directory=(\S+)", text)
    assert {"runs/torch", "runs/fused"} < set(folders)
    assert len(set(folders)) == len(folders)


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
        elif module.startswith("benchmarks."):
            importlib.import_module(module).build_parser().parse_args(arguments)
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
    assert pages.written(PAGES[page]) == PAGES[page], "make docs"


def test_every_table_is_shown_once() -> None:
    shown = re.findall(r"<!-- table: (.+?) -->", "\n".join(PAGES.values()))
    assert sorted(shown) == sorted(pages.TABLES)
    with pytest.raises(ValueError, match="table 'another' is not known; known are"):
        pages.written("<!-- table: another -->\n<!-- end of the table -->\n")


def test_every_record_is_shown() -> None:
    text = "\n".join(PAGES.values())
    records = [*pages.RESULTS.rglob("*.json")]
    records += (ROOT / "train_examples" / "results").glob("*.json")
    in_tables = {path for place in pages.PLACES.values() for path in place.paths()}
    assert not [path for path in records if path.name not in text and path not in in_tables]


def test_a_table_has_the_records_of_every_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of every release of Triton; the first page shows the most complete one of the usual release."""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    folder = tmp_path / "steps"
    folder.mkdir()
    for name, complete, started in (
        ("h100-bf16.json", 2, "1"), ("h200-bf16.json", 2, "2"), ("h100-bf16-triton-3.9.json", 2, "3"),
        ("h100-bf16-others.json", 9, "4"),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps({"name": name, "complete": complete, "started": started}))
    names = ["h100-bf16.json", "h100-bf16-triton-3.9.json", "h200-bf16.json"]
    assert [path.name for path in pages.PLACES["whole steps"].paths()] == names
    assert [path.name for path in pages.Place("steps", "-others").paths()] == ["h100-bf16-others.json"]
    shown = pages.Place("steps", markdown=lambda found: f"{found['name']}\n").shown()
    assert shown == "\n\n".join(names)
    found = pages._most_complete("whole steps", lambda found: int(found["complete"]))
    assert found["name"] == "h200-bf16.json"


def test_the_first_page_is_short() -> None:
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 150
    rows = "".join("|" if line.startswith("|") else " " for line in lines).split()
    # A heading and its rule, and twelve rows.
    assert max(map(len, rows)) <= 14


def test_every_picture_is_shown() -> None:
    shown = {
        (ROOT / page).parent.joinpath(link).resolve()
        for page, text in PAGES.items()
        for link in re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", text)
    }
    folders = ("docs", "benchmarks/results", "train_examples/results")
    assert [path for folder in folders for path in (ROOT / folder).rglob("*.png") if path not in shown] == []


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
