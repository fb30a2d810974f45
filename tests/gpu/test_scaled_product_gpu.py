"""Products of 8-bit operands on a GPU: exact over every length of the inner axis, and accurate over long ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from fusedlayers.closeness.noise import sqnr
from fusedlayers.devices import describe
from fusedlayers.kernels.float8 import E4M3, quantise_rows, transposed_pair
from fusedlayers.kernels.gemm_epilogue import Scaled, scaled_product
from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES
from tests.support.operands import DEVICE

BFLOAT16 = torch.bfloat16
PIPELINE = EPILOGUE_PIPELINES["scaled_product", False]

pytestmark = pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon")


def scaled(values: Tensor, scale: float) -> Scaled:
    """Rows that begin at multiples of 16 bytes, and 448 behind each of them."""
    columns = values.shape[1]
    padded = pad(values.to(E4M3).view(torch.int8), (0, 16 + -columns % 16), value=0x7E)
    return Scaled(padded.view(E4M3)[:, :columns], torch.full((len(values),), scale, device=DEVICE))


@pytest.mark.parametrize("inner", [16, 1000, 2048, 2064, 5000, 16_384, 20_000])
@pytest.mark.parametrize("shape", [(2, 16), (100, 128), (300, 1000), (1536, 1416), (2048, 2176)], ids=str)
def test_every_part_counts_once(shape: tuple[int, int], inner: int) -> None:
    """Small integers all along the inner axis, in programs with one tile, with two, and with three."""
    M, N = shape
    left = torch.zeros(M, inner, device=DEVICE).scatter_(1, torch.randint(inner, (M, 12), device=DEVICE), 1.0)
    left[:, -1] = left[:, 0] = 1
    right = torch.randint(-2, 3, (N, inner), device=DEVICE).float()
    bias = torch.randint(-4, 5, (N,), device=DEVICE).to(BFLOAT16)
    truth = left.double() @ right.double().T / 4
    for given in (bias, None):
        y = scaled_product(scaled(left, 0.5), scaled(right, 0.5), given, PIPELINE, BFLOAT16)
        assert torch.equal(y, (truth if given is None else truth + given.double()).to(BFLOAT16))


def test_one_scale_for_all_rows() -> None:
    left, right = (torch.randint(-2, 3, (rows, 64), device=DEVICE).float() for rows in (200, 136))
    one, other = scaled(left, 1.0), scaled(right, 1.0)
    found = scaled_product(
        one._replace(scale=torch.tensor(4.0, device=DEVICE)), other._replace(scale=torch.tensor(0.5, device=DEVICE)),
        None, PIPELINE, torch.float16,
    )  # fmt: skip
    assert torch.equal(found, (2 * left.double() @ right.double().T).half())


@pytest.mark.parametrize("rows", [4096, 16_384, 65_536])
def test_what_the_terms_of_a_long_sum_have_in_common(rows: int) -> None:
    """Summed as a whole, 65,536 terms of these lose more than half of it: 4 dB, and 16,384 terms 11 dB."""
    dz, x = ((torch.randn(rows, 256, device=DEVICE) + 2).to(BFLOAT16) for _ in range(2))
    left, right = transposed_pair(quantise_rows(dz), x, quantise_rows(x).scale)
    found = scaled_product(left, right, None, PIPELINE, BFLOAT16)
    assert sqnr(found, dz.double().T @ x.double()) >= 28
    for _ in range(3):
        assert torch.equal(scaled_product(left, right, None, PIPELINE, BFLOAT16), found)


def test_an_infinite_scale_reaches_its_row_alone() -> None:
    values = torch.ones(64, 4096, device=DEVICE)
    left, right = scaled(values, 1.0), scaled(values, 1.0)
    left.scale[3] = torch.inf
    found = scaled_product(left, right, None, PIPELINE, BFLOAT16)
    assert found[3].isinf().all()
    assert torch.equal(found[torch.arange(64) != 3], torch.full((63, 64), 4096.0, device=DEVICE).to(BFLOAT16))


def test_operands_that_the_copy_engine_cannot_read() -> None:
    good, bad = scaled(torch.ones(32, 32, device=DEVICE), 1.0), scaled(torch.ones(32, 32, device=DEVICE), 1.0)
    bad = bad._replace(values=bad.values[:, 1:17])
    with pytest.raises(ValueError, match="left has shape"):
        scaled_product(bad, good._replace(values=good.values[:, :16]), None, PIPELINE, BFLOAT16)
    with pytest.raises(ValueError, match="right has 12 rows"):
        scaled_product(good, Scaled(good.values[:12], good.scale[:12]), None, PIPELINE, BFLOAT16)
    with pytest.raises(ValueError, match="bias has a stride of 2"):
        scaled_product(good, good, torch.ones(64, device=DEVICE, dtype=BFLOAT16)[::2], PIPELINE, BFLOAT16)
