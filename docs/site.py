"""The hooks of mkdocs.yml: they add README as the first page, notebooks, and a page of docstrings, and convert links.

On the site all pages are in one folder, and notebooks in another. A link to a page of docs/ or to a text beside README
stays a link to a page; any other file that a page links to is copied into ``files/``.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

import fusedlayers
from docs.notebook import as_page, notebooks

ROOT = Path(__file__).resolve().parents[1]
# Files outside of docs/ that are pages, too.
TEXTS = ("README.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
# Two groups: the text before a link's target, and the target without its anchor.
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)")
# How docstrings name other objects, a role of Sphinx and a name: two groups, the name as code, and the name alone.
ROLE = re.compile(r":(?:class|func|meth|mod):(<code>([\w.]+)</code>)")
# Pages that have every word somewhere; in the results of a search they come last.
RECORDS = ("families.md", "results.md", "changelog.md")
_PARTS = {
    "fusedlayers": [name for name in fusedlayers.__all__ if name not in ("functional", "parallel")],
    "fusedlayers.functional": fusedlayers.functional.__all__,
    "fusedlayers.parallel": fusedlayers.parallel.__all__,
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages and files that are not in docs/."""
    from mkdocs.structure.files import File

    for name in TEXTS:
        files.append(File.generated(config, site_path(name), content=with_links((ROOT / name).read_text(), name)))
    for path in notebooks():
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, site_path(name), content=as_page(path.read_text())))
    files.append(File.generated(config, "api.md", content=reference()))
    linked = {target for name in sources() for target in targets((ROOT / name).read_text(), name)}
    for target in sorted(each for each in linked if site_path(each).startswith("files/")):
        files.append(File.generated(config, site_path(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A page of docs/ with its links as they are on the site."""
    if page.file.src_uri in RECORDS:
        page.meta["search"] = {"boost": 0.1}
    name = f"docs/{page.file.src_uri}"
    return with_links(markdown, name) if (ROOT / name).is_file() else markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """A page of docstrings whose roles are links, to what the page has one of."""
    anchors = set(re.findall(r'id="([\w.]+)"', html))

    def linked(found: re.Match[str]) -> str:
        targets = [anchor for anchor in anchors if f".{anchor}".endswith(f".{found[2]}")]
        return f'<a href="#{targets[0]}">{found[1]}</a>' if len(targets) == 1 else found[1]

    return ROLE.sub(linked, html)


def sources() -> list[str]:
    """All pages, by their paths in the repository."""
    return [*TEXTS, *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


def targets(text: str, name: str) -> list[str]:
    """The files that a page links to, by their paths in the repository."""
    return [resolved(link, name) for _, link in LINK.findall(text) if "://" not in link]


def with_links(text: str, name: str) -> str:
    """The text of a page whose links to files are those of the site."""

    def moved(found: re.Match[str]) -> str:
        link = found[2] if "://" in found[2] else site_path(resolved(found[2], name))
        return f"{found[1]}{link}"

    return LINK.sub(moved, text)


def resolved(link: str, name: str) -> str:
    """The path in the repository of a link in the page ``name``."""
    parts: list[str] = []
    for part in (PurePosixPath(name).parent / link).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def site_path(path: str) -> str:
    """The path on the site of a file of the repository."""
    if path == "README.md":
        return "index.md"
    if path in TEXTS:
        return path.lower()
    path = path.replace(".ipynb", ".md")
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"


def reference() -> str:
    """The page of docstrings: every public name, in the order of ``__all__``."""
    lines = ["# Reference", "", "Every public name, from its docstring. `import fusedlayers as fl`."]
    for module, names in _PARTS.items():
        lines += ["", f"## {module}", *(f"\n::: {module}.{name}" for name in names)]
    return "\n".join(lines) + "\n"
