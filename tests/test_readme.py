"""The README's Python runs, its commands name modules that exist, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[0] for block in BLOCKS])
def test_its_python_runs(block: str) -> None:
    if "transformers" in block:
        pytest.importorskip("transformers", reason="the example takes a model of it")
    layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    # What the text calls your model; said of it, nothing is wrong.
    names = {"model": torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="nothing was replaced")
        exec(compile(block, "README.md", "exec"), names)


def test_there_is_python_in_it() -> None:
    assert len(BLOCKS) >= 3


def test_the_modules_of_its_commands_exist() -> None:
    named = set(re.findall(r"(?:python|accelerate launch|nproc-per-node \d) -m ([\w.]+)", README))
    assert {"fusedlayers.bench", "train_examples.language_model", "tests.models.step_table"} <= named
    missing = [name for name in sorted(named) if importlib.util.find_spec(name) is None]
    assert not missing


def test_its_links_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 5
    broken = [
        link
        for link in links
        if not link.startswith("http")
        and not (link[1:] in anchors if link.startswith("#") else (ROOT / link.partition("#")[0]).exists())
    ]
    assert not broken
