"""The product with an epilogue of its own on a GPU: both back ends, any strides, ragged sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusedlayers.closeness import assert_all_close
from fusedlayers.devices import describe
from fusedlayers.kernels.tuning import EpiloguePipeline, EpilogueTiles
from tests.dummy_product.kernels.softsign import softsign_product
from tests.gpu.launches import note_launches
from tests.support.operands import DEVICE

TILES = EpilogueTiles(64, 64, 32, 4, 2)
KERNELS = {"sm90_softsign": "sm90", "softsign": "generic"}


@pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(4099, 1032, 520), (5, 64, 8), (20_000, 256, 1024)])
def test_both_back_ends(
    rows: int, inner: int, columns: int, turned: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = note_launches(monkeypatch, KERNELS)
    a, w = (torch.randn(size, inner, device=DEVICE, dtype=dtype) for size in (rows, columns))
    w = w.T.contiguous().T if turned else w
    theirs, truth = F.softsign(a @ w.T), F.softsign(a.double() @ w.T.double())
    for pipeline in (EpiloguePipeline(), None):
        assert_all_close({"y": softsign_product(a, w, TILES, pipeline)}, {"y": theirs}, {"y": truth})
    assert launched == ["sm90", "generic"]
