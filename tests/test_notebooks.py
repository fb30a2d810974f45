"""The notebooks of docs/notebooks run, and show what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs import notebook

ROOT = Path(__file__).resolve().parent.parent


def test_they_print_what_they_show() -> None:
    """As on a user's machine without a GPU: in a process of its own, without the switches of the tests."""
    for needed in ("transformers", "accelerate"):
        pytest.importorskip(needed, reason="the notebooks train models of transformers")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FUSEDLAYERS_", "TRITON_"))}
    environment = {**kept, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "docs.notebook"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}\npython -m docs.notebook --write"


@pytest.mark.parametrize("path", notebook.notebooks(), ids=lambda path: path.stem)
def test_a_notebook_is_short(path: Path) -> None:
    found = json.loads(path.read_text())
    assert len(found["cells"]) <= 12
    assert path.stat().st_size < 10_000
    assert found["cells"][0]["cell_type"] == "markdown"
    assert "".join(found["cells"][0]["source"]).startswith("# ")


def test_a_difference_is_found(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["x = 2\n", "print('loss', x)"], "outputs": []},
        {"cell_type": "code", "source": ["print('of', x)"], "outputs": [{"text": ["of 3.5e-02\n"]}]},
    ]
    path = tmp_path / "made.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    found = notebook.printed(path)
    assert found == ["", "loss 2\n", "of 2\n"]
    assert notebook.differences(path, found) == ["made.ipynb, cell 1: shows\nbut prints\nloss 2\n"]
    notebook.write(path, found)
    assert notebook.differences(path, found) == []
    page = "# Title\n\n```python\nx = 2\nprint('loss', x)\n```\n\n```text\nloss 2\n```\n\n"
    assert notebook.as_page(path.read_text()) == f"{page}```python\nprint('of', x)\n```\n\n```text\nof 2\n```\n"
