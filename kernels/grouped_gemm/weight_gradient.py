"""Gradients of the experts' weights and biases: products and sums over each expert's rows, one program each."""

from typing import Any

import torch

from ..device import tl, triton
from ..hopper import stacked, untransposed
from ..launching import Launch, ceil_div, prepared
from ..matmul import generic, sm90
from ..matmul.sm90.ring import HALF
from ..tiles import load_tile
from ..tuning.grouped_gemm import GroupedTiles
from ..tuning.grouped_gemm_pipelines import CooperativePipeline
from .sorting import SortedRows

_SUM_ROWS, _SUM_COLUMNS = 32, 64


@triton.jit
def _experts_sums_kernel(
    a_ptr, weights_ptr, starts_ptr, out_ptr, stride_oe, stride_on, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    tile_columns = tl.cdiv(C, COLUMNS)
    expert = tl.program_id(0) // tile_columns
    cols = tl.program_id(0) % tile_columns * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(starts_ptr + expert + 1)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(tl.load(starts_ptr + expert), end, ROWS):
        rows = first + tl.arange(0, ROWS)
        values = load_tile(a_ptr, rows, cols, C, 1, end, C).to(tl.float32)
        if weights_ptr is not None:
            values *= tl.load(weights_ptr + rows, mask=rows < end, other=0.0)[:, None]
        sums += values
    target = out_ptr + expert.to(tl.int64) * stride_oe + cols.to(tl.int64) * stride_on
    tl.store(target, tl.sum(sums, 0).to(out_ptr.dtype.element_ty), mask=cols < C)


def weight_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: SortedRows,
    out: torch.Tensor,
    input_precision: str,
    *,
    tiles: GroupedTiles,
    pipeline: CooperativePipeline | None = None,
    order: torch.Tensor | None = None,
    ready: dict[Any, Any] | None = None,
    name: str = "",
) -> None:
    """Fills ``out[e] = a_eᵀ b_e``, a view ``[E, R, C]`` of any strides, from contiguous a ``[P, R]`` and b ``[P, C]``.

    An expert without rows gets zeros. ``order`` names the experts in that of their work, for the sm90 kernel.
    ``name`` tells the gradients of one call apart in ``ready``.
    """
    # A gradient whose columns lie together is that of the operands exchanged, as the sm90 kernel stores rows.
    turned = pipeline is not None and out.stride(2) != 1 and out.stride(1) == 1

    def prepare() -> tuple[Launch, bool]:
        launch = None
        if pipeline is not None:
            launch = _on_sm90(b, a, rows, out.mT, pipeline) if turned else _on_sm90(a, b, rows, out, pipeline)
        if launch is not None:
            return launch, True
        return generic.prepare_weight_gradient(a, b, out.stride(), out.shape[0], input_precision, tiles), False

    launch, on_sm90 = prepared(ready, ("weight gradient", name), prepare)
    if on_sm90:
        launch((b, a, out.mT, rows.starts, order) if turned else (a, b, out, rows.starts, order))
    else:
        launch((a, b, out, None, rows.starts))


def _on_sm90(
    a: torch.Tensor, b: torch.Tensor, rows: SortedRows, out: torch.Tensor, pipeline: CooperativePipeline
) -> Launch | None:
    """The sm90 launch, or None where an operand does not lie as TMA takes it. Padding is 0 in both operands."""
    experts, units, _ = out.shape
    left, right, gradient = untransposed(a), untransposed(b), stacked(out)
    if left is None or right is None or gradient is None or gradient.transposed or rows.block % pipeline.step:
        return None
    # Half of a tile ends where the units of the next expert begin.
    if units % HALF.value:
        return None
    return sm90.prepare_grouped_weight_gradient(left, right, gradient, experts, units, pipeline)


def expert_sums(
    a: torch.Tensor,
    row_weights: torch.Tensor | None,
    rows: SortedRows,
    out: torch.Tensor,
    *,
    ready: dict[Any, Any] | None = None,
    name: str = "",
) -> None:
    """Fills ``out[e]``, a view ``[E, C]`` of any strides, with the sums of each expert's rows of a ``[P, C]``.

    With ``row_weights`` ``[P]`` rows are multiplied by theirs first. Float32 sums in a fixed order, rounded once.
    """
    experts, columns = out.shape

    def make() -> Launch:
        programs = experts * ceil_div(columns, _SUM_COLUMNS)
        return Launch(_experts_sums_kernel, programs, (*out.stride(), columns), (), (_SUM_ROWS, _SUM_COLUMNS))

    prepared(ready, ("expert sums", name), make)((a, row_weights, rows.starts, out))
