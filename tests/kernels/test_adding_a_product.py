"""A product with an epilogue of its own: one short file, one launch, both back ends."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fusedlayers.closeness import assert_all_close
from fusedlayers.kernels.tuning import EpilogueTiles
from tests.dummy_product.kernels import softsign
from tests.kernels.test_code_generation import SHARED_LIMITS, compiled

MOST_LINES = 60
TILES = EpilogueTiles(32, 16, 32, 4, 1)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_it_is_short() -> None:
    lines = Path(softsign.__file__).read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= MOST_LINES


@pytest.mark.parametrize("turned", [False, True])
def test_it_is_close_to_torch(turned: bool) -> None:
    a, w = torch.randn(37, 83), torch.randn(29, 83)
    ours = softsign.softsign_product(a, w.T.contiguous().T if turned else w, TILES, None)
    assert_all_close({"y": ours}, {"y": F.softsign(a @ w.T)}, {"y": F.softsign(a.double() @ w.T.double())})


COMPILED = """
import json
import sys
from pathlib import Path

import torch
from code_generation import compiling_for

from fusedlayers.kernels.tuning import EpiloguePipeline, EpilogueTiles

sys.path.append(str(ROOT))
from tests.dummy_product.kernels.softsign import softsign_product

a, w = (torch.empty(rows, 1024, dtype=torch.bfloat16) for rows in (4096, 2048))
with compiling_for("sm_90", sm90=True) as reports:
    for weight in (w, w.T.contiguous().T):
        for pipeline in (EpiloguePipeline(), None):
            softsign_product(a, weight, EpilogueTiles(128, 128, 64, 8, 3), pipeline)
for report in reports:
    print(json.dumps(report))
"""


def test_its_code_is_as_good_as_that_of_the_others(tmp_path: Path) -> None:
    """The stages of the ring follow from the tile: as many as fit."""
    root = Path(__file__).resolve().parents[2]
    found = compiled(tmp_path, COMPILED.replace("ROOT", repr(str(root))))
    assert [report["kernel"] for report in found] == ["sm90_softsign", "softsign"] * 2
    for report in found:
        assert "error" not in report, report
        assert (report["spill_bytes"], report["serialised"], report["int32_products"]) == (0, False, [])
        assert report["wgmma"] >= 4
        assert report["shared"] <= SHARED_LIMITS["sm_90"]
    assert found[0]["constants"]["STAGES"] == 6
