"""Writes a copy of the repository for a package index: README's links are absolute, and the project has URLs.

    python -m docs.release --url https://HOST/OWNER/NAME --output build/release

In a clone links are relative, so that they work offline, in forks and at every commit. In a published version they have
to lead to the tag of that version: ``v`` and its number. ``make dist URL=...`` builds the sdist and
the wheel from this copy.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fusedlayers
from docs.site import LINK, ROOT, resolved

_PICTURES = (".png", ".svg", ".jpg")


def with_absolute_links(text: str, url: str, tag: str) -> str:
    """The text of README with every link to a file of the repository leading to that file at ``tag``."""

    def moved(found: re.Match[str]) -> str:
        link = found[2]
        if "://" not in link:
            path = resolved(link, "README.md")
            link = f"{url}/{'raw' if path.endswith(_PICTURES) else 'blob'}/{tag}/{path}"
        return f"{found[1]}{link}"

    return LINK.sub(moved, text)


def with_urls(pyproject: str, url: str, tag: str) -> str:
    """The text of pyproject.toml with the project's URLs."""
    links = {
        "Repository": url,
        "Documentation": f"{url}/tree/{tag}/docs",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    section = "\n".join(["[project.urls]", *(f'{name} = "{link}"' for name, link in links.items())])
    return pyproject.replace("[project.optional-dependencies]", f"{section}\n\n[project.optional-dependencies]", 1)


def checked(version: str) -> str:
    """The version, if it is that of a release.

    Raises:
        ValueError: it is one between releases. It has no tag, so the links would lead nowhere.
    """
    if ".dev" in version:
        raise ValueError(f"{version} is a version between releases: set that of the release (docs/contributing.md)")
    return version


def prepare(output: Path, url: str, version: str) -> None:
    """Writes the copy: the files that git tracks, as they are in the working tree.

    Raises:
        ValueError: the URL is not that of a repository, or the folder exists already.
    """
    if not re.fullmatch(r"https://[^\s/]+/\S+[^\s/]", url):
        raise ValueError(f"the URL of a repository is expected, such as https://HOST/OWNER/NAME, got {url!r}")
    if output.exists():
        raise ValueError(f"{output} is there already")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, output / name)
    pyproject = (output / "pyproject.toml").read_text()
    tag = f"v{version}"
    (output / "pyproject.toml").write_text(with_urls(pyproject, url, tag))
    (output / "README.md").write_text(with_absolute_links((output / "README.md").read_text(), url, tag))


def main() -> int:
    """Write the copy; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.release", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True, help="the repository's page: https://HOST/OWNER/NAME")
    parser.add_argument("--output", required=True, type=Path, help="the folder to write, which must not exist")
    chosen = parser.parse_args()
    try:
        prepare(chosen.output, chosen.url, checked(fusedlayers.__version__))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
