"""Scales of results in 8 bits that are known before the product: bounds by the norms of its operands.

An element of a product is at most the product of two norms (Cauchy-Schwarz): ``|x_i · w_j| <= ‖x_i‖ ‖w_j‖``, and with
a bias ``|z_ij| <= (‖x_i‖ + 1) (‖w_j‖ + |b_j|)``. If ``|act(z)| <= |z|`` and slopes are at most 1.13, as those of most
activations are, then the hidden of an FFN and the gradients of its pre-activations are bounded by a number for their
row times one for their unit, a column of theirs. The kernel that computes an element divides it by both and stores it
in 8 bits at once. No second pass looks for maxima, nothing is kept from step to step, and nothing saturates, but for
the rounding of operands where x_i and w_j are parallel. The number of a row is its scale in 8 bits, a power of two;
that of a unit is multiplied into the weights of the next product before they are quantised.

With a gate, a hidden is bounded by two such products, so they should be close: there are no biases then, and norms are
weighted. Any positive numbers d_k may be divided out of the columns of the weights and multiplied into those of x:
``|x_i · w_j| <= ‖x_i d‖ ‖w_j / d‖``. With the norms of the weights' columns for d, a channel of x counts as much as the
weights read it, however large it is. They are cut to powers of two.

A bound is larger than the maximum, for random directions by about ``√K / 4``, and in a gated hidden by the square of
that. e4m3 has the same precision over 15 binary orders of magnitude, so this costs next to nothing up to 8192 columns.
Where an element is far below its bound because x_i and w_j are nearly orthogonal, the rounding of x_i has mostly
spoiled it already.

Kernels read several numbers of a row or a unit at once: two of 16 bits in a *word* of 32, both as bfloat16, which holds
any power of two. Here tables have a row for each kind of number:

- of units ``[6, N]``: the words of up and of gate (the scale of a row of weights, and the inverse of ``‖w_j‖``), both
  norms, the word of both inverses, and the product of both norms; without a gate that of up alone.
- of rows ``[3, M]``: words (the scale of a row of x, and the inverse of the scale of that row of the hidden), and the
  scales of the hidden's rows with their inverses.
"""

from typing import Any

import torch

from .device import tl, triton
from .float8 import column_programs, scales_of
from .hopper import Scaled
from .launching import Launch, ceil_div, layout_of, prepared
from .tiles import inverse, load_tile, load_vector

# At least the largest slope of any activation that is bounded.
MOST_SLOPE = 1.13
# Numbers of channels and norms of units are limited to this range, so that no product with them leaves that of float32.
_LEAST, _MOST = tl.constexpr(2.0**-40), tl.constexpr(2.0**40)
_LARGEST = tl.constexpr(3.4e38)
# A bound may be larger than any float32, though no number that it bounds is.
_MOST_SCALE = tl.constexpr(2.0**120)
_BLOCK = 256


@triton.jit
def _row(table_ptr, ROW: tl.constexpr, N):
    """A row of a table with N columns: added up, because a product of 32 bits is not allowed to overflow."""
    for _ in tl.static_range(ROW):
        table_ptr += N
    return table_ptr


@triton.jit
def _word(high, low):
    """Two float32 numbers, cut to bfloat16, in 32 bits."""
    high = high.to(tl.int32, bitcast=True) & -65536
    low = (low.to(tl.int32, bitcast=True) >> 16) & 65535
    return (high | low).to(tl.float32, bitcast=True)


@triton.jit
def _cut(x):
    """x, cut to bfloat16."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _inverse_norms(norms_ptr, bias_ptr, cols, N):
    """The inverses of norms that include a bias, cut to bfloat16: the norms are rounded up."""
    norms = load_vector(norms_ptr, cols, 1, N)
    if bias_ptr is not None:
        norms += tl.abs(load_vector(bias_ptr, cols, 1, N).to(tl.float32))
    # An infinite bias must not become a finite norm.
    norms = tl.where(norms > _LARGEST, norms - norms, norms)
    # Not tl.minimum and tl.maximum, which drop NaN.
    norms = tl.where(norms < _LEAST, _LEAST, norms)
    return _cut(inverse(tl.where(norms > _MOST, _MOST, norms)))


@triton.jit
def _squares(x_ptr, rows, cols, stride_n, stride_k, N, K):
    x = load_tile(x_ptr, rows, cols, stride_n, stride_k, N, K).to(tl.float32)
    return x * x


@triton.jit
def _channel_numbers_kernel(
    up_ptr, gate_ptr, table_ptr, stride_up_n, stride_up_k, stride_gate_n, stride_gate_k, N, K, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    squares = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in tl.range(0, N, BLOCK_N):
        squares += _squares(up_ptr, first + rows, cols, stride_up_n, stride_up_k, N, K)
        squares += _squares(gate_ptr, first + rows, cols, stride_gate_n, stride_gate_k, N, K)
    norms = tl.sqrt_rn(tl.sum(squares, 0))
    # Without the mantissa, NaN counts as infinity.
    numbers = (norms.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    numbers = tl.minimum(tl.maximum(numbers, _LEAST), _MOST)
    tl.store(table_ptr + cols, numbers, mask=cols < K)
    tl.store(table_ptr + K + cols, inverse(numbers), mask=cols < K)


@triton.jit
def _unit_table_kernel(
    up_norms_ptr, up_scale_ptr, bias_ptr, gate_norms_ptr, gate_scale_ptr, table_ptr, N, BLOCK: tl.constexpr
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < N
    up = _inverse_norms(up_norms_ptr, bias_ptr, cols, N)
    tl.store(table_ptr + cols, _word(load_vector(up_scale_ptr, cols, 1, N), up), mask=inside)
    tl.store(_row(table_ptr, 2, N) + cols, inverse(up), mask=inside)
    gate = tl.zeros_like(up) + 1.0
    if gate_norms_ptr is not None:
        gate = _inverse_norms(gate_norms_ptr, None, cols, N)
        tl.store(table_ptr + N + cols, _word(load_vector(gate_scale_ptr, cols, 1, N), gate), mask=inside)
        tl.store(_row(table_ptr, 3, N) + cols, inverse(gate), mask=inside)
    tl.store(_row(table_ptr, 4, N) + cols, _word(up, gate), mask=inside)
    tl.store(_row(table_ptr, 5, N) + cols, inverse(up) * inverse(gate), mask=inside)


@triton.jit
def _gradient_units_kernel(
    down_norms_ptr, down_scale_ptr, units_ptr, table_ptr, N, GATED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < N
    of_norms = _inverse_norms(down_norms_ptr, None, cols, N)
    norms = inverse(of_norms)
    tl.store(table_ptr + cols, load_vector(down_scale_ptr, cols, 1, N) * of_norms, mask=inside)
    if GATED:
        tl.store(table_ptr + N + cols, norms * load_vector(_row(units_ptr, 3, N), cols, 1, N), mask=inside)
        tl.store(_row(table_ptr, 2, N) + cols, norms * load_vector(_row(units_ptr, 2, N), cols, 1, N), mask=inside)
    else:
        tl.store(table_ptr + N + cols, norms, mask=inside)


@triton.jit
def _bounding_scales(norms_ptr, other_ptr, addend, factor, rows, M):
    bound = (load_vector(norms_ptr, rows, 1, M) + addend) * factor
    if other_ptr is not None:
        bound *= load_vector(other_ptr, rows, 1, M)
    scale, _ = scales_of(bound)
    return tl.where(scale > _MOST_SCALE, _MOST_SCALE, scale)


@triton.jit(do_not_specialize=["M", "addend", "factor"])
def _row_table_kernel(scale_ptr, norms_ptr, other_ptr, table_ptr, M, addend, factor, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = _bounding_scales(norms_ptr, other_ptr, addend, factor, rows, M)
    tl.store(table_ptr + rows, _word(load_vector(scale_ptr, rows, 1, M), inverse(scale)), mask=rows < M)
    tl.store(table_ptr + M + rows, scale, mask=rows < M)
    tl.store(_row(table_ptr, 2, M) + rows, inverse(scale), mask=rows < M)


@triton.jit(do_not_specialize=["M", "factor"])
def _gradient_rows_kernel(scale_ptr, norms_ptr, other_ptr, table_ptr, M, factor, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = _bounding_scales(norms_ptr, other_ptr, 0.0, factor, rows, M)
    tl.store(table_ptr + rows, load_vector(scale_ptr, rows, 1, M) * inverse(scale), mask=rows < M)
    tl.store(table_ptr + M + rows, scale, mask=rows < M)


def channel_numbers(w_up: torch.Tensor, w_gate: torch.Tensor, ready: dict[Any, Any] | None = None) -> torch.Tensor:
    """``[2, K]``: the numbers of channels, and their inverses, of weights ``[N, K]`` of any strides.

    They are powers of two: nothing that they multiply is rounded.
    """
    rows, columns = w_up.shape
    table = w_up.new_empty(2, columns, dtype=torch.float32)

    def prepare() -> Launch:
        programs, tile = column_programs(1, columns)
        numbers = (*w_up.stride(), *w_gate.stride(), rows, columns)
        return Launch(_channel_numbers_kernel, programs, numbers, (), tile, 8)

    name = "channel numbers", rows, columns, layout_of(w_up), layout_of(w_gate)
    prepared(ready, name, prepare)((w_up, w_gate, table))
    return table


def unit_table(
    up: tuple[Scaled, torch.Tensor],
    gate: tuple[Scaled, torch.Tensor] | None,
    bias: torch.Tensor | None,
    ready: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """The table of units: of w_up, and of w_gate if there is one, in 8 bits, with the norms ``[N]`` of their rows.

    Only without a gate there may be a ``bias`` ``[N]``.
    """
    (values, scale), norms = up
    columns = values.shape[0]
    table = scale.new_empty(6, columns)
    other = (None, None) if gate is None else (gate[1], gate[0].scale)
    name = "unit table", columns, gate is None, bias is None
    launch = _prepared(ready, name, _unit_table_kernel, columns, (columns,), ())
    launch((norms, scale, bias, *other, table))
    return table


def gradient_units(
    w_down: Scaled, norms: torch.Tensor, units: torch.Tensor, gated: bool, ready: dict[Any, Any] | None = None
) -> torch.Tensor:
    """``[2 or 3, N]``: the scales of w_down's columns, and the numbers of the units of dZ, and with a gate of dZg.

    ``w_down`` is transposed, in 8 bits, with the norms ``[N]`` of its rows; ``units`` is the table of units. The scales
    are divided by the norms.
    """
    columns = norms.shape[0]
    table = norms.new_empty(3 if gated else 2, columns)
    name = "gradient units", columns, gated
    launch = _prepared(ready, name, _gradient_units_kernel, columns, (columns,), (), (gated,))
    launch((norms, w_down.scale, units, table))
    return table


def row_table(
    x: Scaled, norms: torch.Tensor, gated: bool, biased: bool, factor: float, ready: dict[Any, Any] | None = None
) -> torch.Tensor:
    """The table of the hidden's rows, which are at most ``factor`` times those of x ``[M, K]``, with these norms.

    Only without a gate it may be ``biased``: 1 is added to the norms.
    """
    rows, addend = norms.shape[0], float(biased)
    table = norms.new_empty(3, rows)
    name = "row table", rows, gated, addend, factor
    launch = _prepared(ready, name, _row_table_kernel, rows, (), (rows, addend, factor))
    launch((x.scale, norms, norms if gated else None, table))
    return table


def gradient_rows(
    dy: Scaled, norms: torch.Tensor, x_norms: torch.Tensor | None, factor: float, ready: dict[Any, Any] | None = None
) -> torch.Tensor:
    """``[2, M]``: the scales of dy's rows divided by those of the rows of dZ, and the latter.

    ``norms`` ``[M]`` are dy's, and ``x_norms`` with a gate those of x. dZ is at most ``factor`` times their product.
    """
    rows = norms.shape[0]
    table = norms.new_empty(2, rows)
    name = "gradient rows", rows, x_norms is None, factor
    launch = _prepared(ready, name, _gradient_rows_kernel, rows, (), (rows, factor))
    launch((dy.scale, norms, x_norms, table))
    return table


def _prepared(
    ready: dict[Any, Any] | None,
    name: object,
    kernel: Any,
    size: int,
    numbers: tuple[Any, ...],
    free_numbers: tuple[Any, ...],
    constants: tuple[Any, ...] = (),
) -> Launch:
    def prepare() -> Launch:
        return Launch(kernel, ceil_div(size, _BLOCK), numbers, free_numbers, (*constants, _BLOCK), 4)

    return prepared(ready, name, prepare)
