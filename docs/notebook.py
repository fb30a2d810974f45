"""The notebooks of docs/notebooks: run as their cells stand, shown as pages of the site.

    python -m docs.notebook           # run them, and compare what they print with what they show
    python -m docs.notebook --write   # run them, and show what they print

Numbers are not compared: they differ between machines. What is shown was printed on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import linecache
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent / "notebooks"
_NUMBER = re.compile(r"\d[\d.,]*(e-?\d+)?")


def notebooks() -> list[Path]:
    """All of them, in the order of their names."""
    return sorted(FOLDER.glob("*.ipynb"))


def as_page(notebook: str) -> str:
    """The Markdown of a notebook: its texts, its code, and what the code printed."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        if printed := shown(cell):
            parts.append(f"```text\n{printed}```")
    return "\n\n".join(parts) + "\n"


def shown(cell: dict[str, Any]) -> str:
    """What a cell shows as printed."""
    return "".join(line for output in cell.get("outputs", ()) for line in output["text"])


def printed(path: Path) -> list[str]:
    """What each cell prints, in order, run in one namespace; nothing for texts."""
    module = ModuleType("notebook")
    sys.modules["notebook"] = module  # where a class of a notebook says that it is
    found = []
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source, name = "".join(cell["source"]), f"{path.name}[{number}]"
        # Jupyter keeps sources here, too; replace reads the source of methods.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if cell["cell_type"] == "code":
                exec(compile(source, name, "exec"), vars(module))
        found.append(out.getvalue())
    return found


def write(path: Path, found: list[str]) -> None:
    """Makes a notebook show what its cells print."""
    notebook = json.loads(path.read_text())
    for cell, text in zip(notebook["cells"], found, strict=True):
        if cell["cell_type"] == "code":
            lines = text.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def differences(path: Path, found: list[str]) -> list[str]:
    """One line for each cell that prints something else than it shows, beside numbers."""
    cells = json.loads(path.read_text())["cells"]
    return [
        f"{path.name}, cell {number}: shows\n{shown(cell)}but prints\n{text}"
        for number, (cell, text) in enumerate(zip(cells, found, strict=True))
        if _NUMBER.sub("#", shown(cell)) != _NUMBER.sub("#", text)
    ]


def main() -> int:
    """Run all notebooks; the exit status, 1 if one shows something else than it prints."""
    parser = argparse.ArgumentParser(prog="python -m docs.notebook", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="show what the cells print")
    chosen = parser.parse_args()
    wrong: list[str] = []
    for path in notebooks():
        found = printed(path)
        if chosen.write:
            write(path, found)
        wrong += differences(path, found)
    print("\n".join(wrong), end="")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
