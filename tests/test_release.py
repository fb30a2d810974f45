"""What is published: the copy that a release is built from, the site, and files for a host of repositories."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest

import fusedlayers
from docs import notebook, release, site

yaml = pytest.importorskip("yaml", reason="PyYAML, which transformers brings, is not installed")

ROOT = Path(__file__).resolve().parent.parent
URL = "https://example.org/owner/fusedlayers"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what git tracks is unknown without a repository")


def pages_of(nav: list[Any] | dict[str, Any] | str) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def configuration() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_the_site_has_every_page_once() -> None:
    shown = pages_of(configuration()["nav"])
    shown_notebooks = [path.relative_to(ROOT).as_posix() for path in notebook.notebooks()]
    assert sorted(shown) == sorted(["api.md", *map(site.site_path, [*site.sources(), *shown_notebooks])])
    assert shown[0] == site.site_path("README.md") == "index.md"


def test_the_links_of_the_site_lead_to_files() -> None:
    """Anchors are checked when it is built."""
    for name in site.sources():
        for target in site.targets((ROOT / name).read_text(), name):
            assert (ROOT / target).is_file(), f"{name}: {target}"
    moved = site.with_links(
        "[a](../README.md#b) ![c](pictures/d.png) [e](../kernels/f.py) [g](https://h/i)", "docs/x.md"
    )
    assert moved == "[a](index.md#b) ![c](pictures/d.png) [e](files/kernels/f.py) [g](https://h/i)"


def test_roles_of_docstrings_become_links_to_the_names_on_the_page() -> None:
    names = '<h3 id="fusedlayers.FusedFFN">f</h3><h4 id="a.A.forward">1</h4><h4 id="a.B.forward">2</h4>'
    text = " :class:<code>FusedFFN</code>, :meth:<code>forward</code> and :mod:<code>fusedlayers.closeness</code>"
    linked = ' <a href="#fusedlayers.FusedFFN"><code>FusedFFN</code></a>, <code>forward</code> and '
    assert site.on_page_content(names + text, None, None, None) == f"{names}{linked}<code>fusedlayers.closeness</code>"


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: ([\w.]+)$", site.reference(), re.MULTILINE)
    assert {f"fusedlayers.{name}" for name in fusedlayers.__all__} - {
        "fusedlayers.functional",
        "fusedlayers.parallel",
    } <= set(named)
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name


def test_the_links_of_a_release_are_absolute() -> None:
    text = release.with_absolute_links((ROOT / "README.md").read_text(), URL, "v1.2.3")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    for link in links:
        assert link.startswith((f"{URL}/blob/v1.2.3/", f"{URL}/raw/v1.2.3/")), link
        path = link.split("/v1.2.3/")[1].partition("#")[0]
        assert (ROOT / path).exists(), link
        assert ("/raw/" in link) == path.endswith(".png")


@needs_git
@pytest.mark.full
def test_a_release_is_built_from_its_sdist(tmp_path: Path) -> None:
    release.prepare(tmp_path / "copy", URL, fusedlayers.__version__)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", tmp_path / "copy"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [sdist] = (tmp_path / "dist").glob("*.tar.gz")
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "kernels/device.py", "fusedlayers/__init__.py"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs"))]
    with zipfile.ZipFile(wheel) as archive:
        assert "fusedlayers/kernels/device.py" in archive.namelist()
        about = message_from_string(archive.read(f"fusedlayers-{fusedlayers.__version__}.dist-info/METADATA").decode())
    assert f"Changelog, {URL}/blob/v{fusedlayers.__version__}/CHANGELOG.md" in about.get_all("Project-URL")
    assert about.get_payload() == (tmp_path / "copy" / "README.md").read_text()


@pytest.mark.parametrize("url", ["", "example.org/a/b", "https://example.org", "https://example.org/a/b/"])
def test_a_release_needs_a_url(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the URL of a repository is expected"):
        release.prepare(tmp_path / "copy", url, "1.2.3")
    with pytest.raises(ValueError, match="is there already"):
        release.prepare(tmp_path, URL, "1.2.3")


def test_only_a_release_is_published() -> None:
    assert release.checked("1.2.3") == "1.2.3"
    with pytest.raises(ValueError, match=r"1\.3\.0\.dev0 is a version between releases"):
        release.checked("1.3.0.dev0")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    found = yaml.safe_load(path.read_text())
    targets = re.search(r"^TARGETS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [step["run"] for job in found["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        make, target, *_ = command.split()
        assert make == "make"
        assert target in targets[1].split()
    # No job may write unless it says so.
    assert found["permissions"] == {"contents": "read"}


def test_workflows_run_what_continuous_integration_runs() -> None:
    docs, found = (
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text()) for name in ("docs", "tests")
    )
    jobs = [*docs["jobs"].values(), *found["jobs"].values()]
    commands = {step["run"] for job in jobs for step in job["steps"] if "run" in step}
    run = (ROOT / ".ci" / "run").read_text()
    targets = {
        word for line in re.findall(r"^make (.*)$", run, re.MULTILINE) for word in line.split() if word[0] != "-"
    }
    assert commands == {f"make {target}" for target in targets}
    pythons = found["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert pythons == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())


def test_the_citation_is_of_the_last_release() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    dated = re.findall(r"^## \[(.+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert (cited["version"], cited["date-released"]) == dated[0]


def test_texts_name_no_address() -> None:
    """Reports go through the repository's own pages."""
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff"):
        assert not re.search(r"\S+@\S+\.\w+", (ROOT / name).read_text()), name
