"""The quantising kernels: values and scales of the model, transposes, any strides, and the compiled kernels."""

from __future__ import annotations

import importlib.util
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusedlayers.kernels.float8 import (
    Scaled,
    quantise_rows,
    quantise_transposed,
    quantising,
    transposed_pair,
)
from fusedlayers.kernels.grouped_gemm import sort, spread
from fusedlayers.reference.float8 import LARGEST, SMALLEST, dequantised, quantised_rows
from fusedlayers.reference.float8 import transposed_pair as reference_pair
from tests.kernels.test_code_generation import compiled, faults
from tests.support.operands import DEVICE, ON_GPU, needs_kernels

DTYPES = [torch.float16, *([torch.bfloat16] if ON_GPU else [])]
SIZES = [(1, 16), (5, 48), (33, 200), (130, 1040), (3, 5000), *([(3, 40_000), (9000, 64)] if ON_GPU else [])]

kernels = pytest.mark.usefixtures("poisoned_memory")


def drawn(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows and columns of powers of two times integers of three bits, one of them 7: no value is rounded.

    The interpreter rounds e4m3 wrongly where a mantissa carries.
    """
    values = torch.randint(-7, 8, (rows, columns), device=DEVICE).float()
    values[torch.arange(rows), torch.randint(columns, (rows,))] = 7
    values[torch.randint(rows, (columns,)), torch.arange(columns)] = -7
    return (values * torch.randint(-2, 3, (rows, 1), device=DEVICE).float().exp2()).to(dtype)


def assert_same(found: Scaled, matrix: Tensor) -> None:
    values, scale = quantised_rows(matrix)
    assert found.values.dtype == torch.float8_e4m3fn
    assert found.scale.dtype == torch.float32
    assert torch.equal(found.scale, scale)
    assert torch.equal(found.values.view(torch.int8), values.view(torch.int8))


@kernels
@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_scales_of_rows(size: tuple[int, int], dtype: torch.dtype) -> None:
    x, other = drawn(*size, dtype), drawn(*size, dtype)
    x[0] = 0
    assert_same(quantise_rows(x), x)
    assert_same(quantise_rows(x, other), torch.cat((x, other), 1))
    ready: dict[object, object] = {}
    for _ in range(3):
        assert_same(quantise_rows(other, x, ready), torch.cat((other, x), 1))
    assert not quantise_rows(x).values[0].float().any()


@kernels
@needs_kernels
def test_rows_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantising, "_LONGEST_BLOCK", 64)
    for columns in (65, 128, 200):
        x, other = drawn(37, columns, torch.float16), drawn(37, columns, torch.float16)
        # The maximum is in the last block.
        x[:, :64] /= 4
        x[:, -1] = x.abs().amax() / 7 * 7
        assert_same(quantise_rows(x), x)
        assert_same(quantise_rows(x, other), torch.cat((x, other), 1))


@kernels
@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, (1100, 70)], ids=str)
def test_values_and_scales_of_the_transpose(size: tuple[int, int], dtype: torch.dtype) -> None:
    first, second = drawn(*size, dtype).T, drawn(*size, dtype).T
    # The matrix lies transposed, and as it is.
    for x, other in ((first, second), (first.contiguous(), second.contiguous()), (first.contiguous(), second)):
        assert_same(quantise_transposed(x), x.T)
        assert_same(quantise_transposed(x, other), torch.cat((x, other)).T)


@kernels
@needs_kernels
def test_each_matrix_of_a_batch_is_transposed() -> None:
    both = [torch.stack([drawn(130, 70, torch.float16) for _ in range(3)]) for _ in range(2)]
    halves = torch.cat(both, 1).chunk(2, 1)
    for x, other in (both, [each.mT.contiguous().mT for each in both], halves):
        found = quantise_transposed(x, other)
        for entry, expected in enumerate(torch.cat((x, other), 1)):
            assert_same(Scaled(*(each[entry] for each in found)), expected.T)


@kernels
@needs_kernels
def test_rows_for_experts() -> None:
    """Values, scales and weights of tokens become those of sorted rows, with zeros in padding."""
    tokens, experts, k, block = 20, 4, 2, 16
    index = torch.randint(-1, experts, (tokens * k,), device=DEVICE)
    x, scores = quantise_rows(drawn(tokens, 48, torch.float16)), torch.randn(tokens * k, device=DEVICE)
    _, rows = sort(index, experts, k, block)
    found, weights = spread(x, scores, rows)
    used = int(rows.starts[-1])
    slots = rows.slots[:used]
    inside = (slots >= 0)[:, None]
    slots = slots.clamp(min=0).long()
    expected = dequantised(x)[slots // k] * inside
    assert torch.equal(dequantised(found)[:used], expected)
    assert torch.equal(found.scale[:used, None], x.scale[slots // k, None] * inside)
    assert weights is not None
    assert torch.equal(weights[:used, None], scores[slots, None] * inside)


@kernels
@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, (1100, 70)], ids=str)
def test_factors_and_norms(size: tuple[int, int], dtype: torch.dtype) -> None:
    """Powers of two, so that again no value is rounded."""
    x, other = drawn(*size, dtype), drawn(*size, dtype)
    of_columns = torch.randint(-2, 3, size[1:], device=DEVICE).float().exp2()
    norms = torch.empty(size[0], device=DEVICE)
    for factors in (None, of_columns):
        expected = x.float() if factors is None else x.float() * factors
        assert_same(quantise_rows(x, factors=factors, norms=norms), expected)
        assert torch.allclose(norms, expected.norm(dim=1), rtol=1e-5, atol=0)
    assert_same(quantise_rows(x, norms=norms, weights=of_columns), x)
    assert torch.allclose(norms, (x.float() * of_columns).norm(dim=1), rtol=1e-5, atol=0)
    of_rows = torch.randint(-2, 3, (2, size[0]), device=DEVICE).float().exp2()
    norms = torch.empty(size[1], device=DEVICE)
    both = torch.cat((x.float() * of_rows[0, :, None], other.float() * of_rows[1, :, None])).T
    assert_same(quantise_transposed(x, other, weights=of_rows, norms=norms), both)
    assert torch.allclose(norms, both.norm(dim=1), rtol=1e-5, atol=0)
    assert_same(quantise_transposed(x, norms=norms), x.T)
    assert torch.allclose(norms, x.T.float().norm(dim=1), rtol=1e-5, atol=0)


@kernels
@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1, 16, 16), (40, 48, 32), (133, 200, 70), (5000, 16, 24)], ids=str)
def test_transposes_for_a_weight_gradient(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The values of the model, bit for bit; and their product, as the numbers are exact in 8 bits."""
    M, N, K = size
    dz, x = drawn(M, N, dtype), drawn(M, K, dtype)
    x[0], dz[-1] = 0, 0
    left, right_scale = quantise_rows(dz), quantise_rows(x).scale
    ready: dict[object, object] = {}
    for _ in range(2):
        found = transposed_pair(left, x, right_scale, ready)
        for (values, scale), (expected, its_scale) in zip(found, reference_pair(left, x, right_scale), strict=True):
            assert torch.equal(values.view(torch.int8), expected.view(torch.int8))
            assert values.stride(0) % 16 == 0
            assert torch.equal(scale, its_scale)
    # The same of a right operand that is in 8 bits already.
    again = transposed_pair(left, quantise_rows(x).values, right_scale)
    assert all(
        torch.equal(a.values.view(torch.int8), b.values.view(torch.int8)) for a, b in zip(again, found, strict=True)
    )
    # Each of left's scales times a factor of its own.
    factors = torch.randn(2, N, device=DEVICE)
    scaled, one = transposed_pair(left, x, right_scale, of_left=factors)
    assert torch.equal(scaled.scale, found[0].scale * factors)
    assert one.scale == 1
    product = dequantised(found[0]).double() @ dequantised(found[1]).double().T
    assert torch.equal(product, dz.double().T @ x.double())


@kernels
@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transposes_for_the_weight_gradients_of_experts(dtype: torch.dtype) -> None:
    """Each with a largest scale of its own, an expert without rows among them; rows behind the last one's are free."""
    starts = [0, 32, 32, 48, 160, 4288, 4352]
    dz, x = drawn(4400, 48, dtype), drawn(4400, 32, dtype)
    dz[32:48] *= 64
    dz[4270:4288] *= 8
    left, right = quantise_rows(dz), quantise_rows(x)
    left.scale[starts[-1] :] = torch.inf
    (values, scales), (other, one) = transposed_pair(
        left, right.values, right.scale, starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    )
    assert one == 1
    for expert, (first, end) in enumerate(pairwise(starts)):
        own = slice(first, end)
        if first == end:
            assert scales[expert] == 0
            continue
        pair = reference_pair(Scaled(left.values[own], left.scale[own]), right.values[own], right.scale[own])
        for found, (expected, _) in zip((values, other), pair, strict=True):
            assert torch.equal(found[:, own].view(torch.int8), expected.view(torch.int8))
        assert scales[expert] == pair[0][1]


@needs_kernels
@pytest.mark.parametrize("scales", [(2.0**-100, 2.0**-90), (2.0**100, 2.0**90), (2.0**-105, 2.0**100)], ids=str)
def test_scales_whose_product_no_float_holds(scales: tuple[float, float]) -> None:
    """Their ratios are still right; what lies beyond is 0 or infinity."""
    left, right = (torch.tensor([scale, scale / 4, scale], device=DEVICE) for scale in scales)
    values = torch.full((3, 16), 4.0, device=DEVICE).to(torch.float8_e4m3fn)
    (moved, largest), _ = transposed_pair(Scaled(values, left), torch.ones(3, 16, device=DEVICE).half(), right)
    assert torch.equal(moved[0].float(), torch.tensor([4.0, 0.25, 4.0], device=DEVICE))
    assert largest == torch.tensor(scales[0]) * scales[1]


@needs_kernels
def test_strides_between_rows() -> None:
    x = drawn(20, 96, torch.float16)
    for view in (x[::3], x[:, 8:56], x[:1].expand(30, 96), x[3:9, 1:]):
        assert_same(quantise_rows(view), view)
        assert_same(quantise_transposed(view.T.contiguous()), view)
    with pytest.raises(ValueError, match="x has shape"):
        quantise_rows(x.T)
    with pytest.raises(ValueError, match="other has shape"):
        quantise_rows(x, x[:, :48])


@needs_kernels
def test_small_and_large_rows() -> None:
    x = torch.tensor([[2.0**-24, 0.0], [60000.0, -30000.0], [0.0, 0.0]], dtype=torch.float16, device=DEVICE)
    found = quantise_rows(x)
    assert ((dequantised(found) - x.float()).abs() <= x.float().abs() / 16).all(), "half of a unit in the last place"


@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_with_what_is_not_finite_is_nan(value: float) -> None:
    x = torch.randn(6, 512, device=DEVICE).bfloat16()
    x[2, 77] = value
    found = quantise_rows(x)
    assert (dequantised(found).isnan().any(1) == torch.tensor([0, 0, 1, 0, 0, 0], device=DEVICE)).all()
    assert not dequantised(quantise_transposed(x.T.contiguous()))[[0, 1, 3, 4, 5]].isnan().any()


@pytest.mark.gpu
def test_a_weight_gradient_of_what_is_not_finite_is_nan() -> None:
    dz, x = torch.randn(200, 64, device=DEVICE).bfloat16(), torch.randn(200, 32, device=DEVICE).bfloat16()
    for given in (dz, x):
        kept = float(given[7, 3])
        given[7, 3] = math.inf
        left, right = transposed_pair(quantise_rows(dz), x, quantise_rows(x).scale)
        assert (dequantised(left) @ dequantised(right).T).isnan().all()
        given[7, 3] = kept


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_random_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    for rows, columns in ((1000, 1024), (77, 4096), (50, 14_336), (13, 28_672)):
        x = (torch.randn(rows, columns, device=DEVICE) * torch.randn(rows, 1, device=DEVICE).exp()).to(dtype)
        assert_same(quantise_rows(x), x)
        assert_same(quantise_rows(x, 3 * x), torch.cat((x, 3 * x), 1))
        assert_same(quantise_transposed(x.T.contiguous()), x)


def test_the_model_is_close_and_saturates() -> None:
    x = torch.randn(50, 300).bfloat16()
    error = (dequantised(quantised_rows(x)) - x.float()).abs()
    assert (error <= x.float().abs() * 2.0**-4 + x.float().abs().amax(1, True) * 2.0**-9 / LARGEST * 2).all()
    assert dequantised(quantised_rows(torch.full((1, 4), SMALLEST / 4))).isfinite().all()
    assert quantised_rows(torch.tensor([[math.inf, 1.0]]))[0].float().isnan().any()


QUANTISING = """
import json

import torch
from code_generation import compiling_for
from fusedlayers.kernels import bounds
from fusedlayers.kernels.column_sums import column_sums
from fusedlayers.kernels.float8 import Scaled, quantise_rows, quantise_transposed, transposed_pair
from fusedlayers.kernels.tuning import COLUMN_SUM_TILES

for columns in (1024, 4096, 8192, 14336, 28672):
    for two in (False, True):
        x = torch.empty(8192, columns, dtype=torch.bfloat16)
        with compiling_for("sm_90", sm90=True) as reports:
            quantise_rows(x, x if two else None, norms=None if two else torch.empty(8192))
            if columns == 4096:
                norms, units = torch.empty(8192), torch.empty(6, columns)
                quantise_transposed(x, x if two else None)
                quantise_transposed(x, x, weights=torch.empty(2, 8192), norms=units[0])
                quantise_transposed(x.view(4, 2048, columns), x.view(4, 2048, columns) if two else None)
                quantise_rows(x, factors=units[0])
                quantise_rows(x, norms=norms, weights=units[0])
                values = torch.empty(8192, 8192, dtype=torch.float8_e4m3fn)
                transposed_pair(Scaled(values, norms), values if two else x, norms, of_left=units[:2] if two else None)
                column_sums(values, COLUMN_SUM_TILES, scales=norms)
                operand = Scaled(values, units[0])
                bounds.unit_table((operand, units[0]), (operand, units[0]) if two else None, None if two else x[0])
                if two:
                    bounds.channel_numbers(x, x)
                bounds.gradient_units(operand, units[0], units, two)
                bounds.row_table(Scaled(values, norms), norms, two, not two, 1.0)
                bounds.gradient_rows(Scaled(values, norms), norms, norms if two else None, 1.0)
        for report in reports:
            print(json.dumps(report | {"dtype": "bfloat16", "width": columns, "gated": two}), flush=True)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_compiled_without_spills(tmp_path: Path) -> None:
    found = compiled(tmp_path, QUANTISING)
    assert {report["kernel"] for report in found} == {
        "quantise_rows", "channel_numbers", "quantise_transposed", "combine_scales", "transpose_pair", "column_sums",
        "reduce_partials", "unit_table", "gradient_units", "row_table", "gradient_rows",
    }  # fmt: skip
    assert len(found) == 37
    for report in found:
        assert report["spill_bytes"] == 0
        assert faults(report) == []
        # Tables are a few kilobytes.
        assert report["vectors"] or report["kernel"].endswith(("_table", "_units", "_rows"))
