"""dx, of one group of hidden units after the other: each adds its products to a sum that is carried in between."""

from collections.abc import Sequence

import torch

from ..device import tl, triton
from ..hopper import ALIGNMENT, Matrix, matrix, untransposed
from ..launching import ceil_div, launch
from ..tiles import add_product, grouped_tile, load_tile, store_tile
from ..tuning import EpiloguePipeline, EpilogueTiles
from . import pipelined
from .carrying import carried, paired, restored, unpaired

_GROUP = 8  # programs below one another, before those to their right: they share columns of the weights in the cache


@triton.jit
def _add_products(
    acc, d_pre_ptr, weight_ptr, rows, cols, stride_dm, stride_dn, stride_wn, stride_wk, M, N, K, zero,
    BLOCK_INNER: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    for n in tl.range(0, N, BLOCK_INNER):
        units = n + tl.arange(0, BLOCK_INNER)
        left = load_tile(d_pre_ptr, rows, units, stride_dm, stride_dn, M, N)
        right = load_tile(weight_ptr, units, cols, stride_wn, stride_wk, N, K)
        acc = add_product(acc, left, right, zero, INPUT_PRECISION)
    return acc


@triton.jit(do_not_specialize=["M", "zero"])
def _carried_gradient_kernel(
    dz_ptr, up_ptr, d_gate_ptr, w_gate_ptr, dx_ptr, rest_ptr,
    stride_zm, stride_zn, stride_un, stride_uk, stride_dm, stride_dn, stride_gn, stride_gk, stride_xm, stride_rm, N, K,
    M, zero,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr, GROUP: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    # ``zero`` is 0, which only the caller knows.
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    row, column = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_N), GROUP)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    pairs = column * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = _add_products(
        total, dz_ptr, up_ptr, rows, cols, stride_zm, stride_zn, stride_un, stride_uk, M, N, K, zero,
        BLOCK_INNER, INPUT_PRECISION,
    )  # fmt: skip
    if d_gate_ptr is not None:
        total = _add_products(
            total, d_gate_ptr, w_gate_ptr, rows, cols, stride_dm, stride_dn, stride_gn, stride_gk, M, N, K, zero,
            BLOCK_INNER, INPUT_PRECISION,
        )  # fmt: skip
    if FIRST:
        # ptxas would have integer operations on the sum wait between the products, and serialise these.
        total += zero
    else:
        even, odd = unpaired(load_tile(rest_ptr, rows, pairs, stride_rm, 1, M, tl.cdiv(K, 2)))
        rest = tl.join(even, odd).reshape(BLOCK_M, BLOCK_N)
        total += restored(load_tile(dx_ptr, rows, cols, stride_xm, 1, M, K), rest)
    if LAST:
        store_tile(dx_ptr, total, rows, cols, stride_xm, 1, M, K)
    else:
        rounded, rest = carried(total, DTYPE)
        even, odd = rest.reshape(BLOCK_M, BLOCK_N // 2, 2).split()
        store_tile(dx_ptr, rounded, rows, cols, stride_xm, 1, M, K)
        store_tile(rest_ptr, paired(even, odd), rows, pairs, stride_rm, 1, M, tl.cdiv(K, 2))


def data_gradient(
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dx: torch.Tensor,
    rest: torch.Tensor,
    first: bool,
    last: bool,
    input_precision: str,
    tiles: EpilogueTiles,
    pipeline: EpiloguePipeline | None = None,
) -> None:
    """Adds ``Σ d_pre @ weight`` to dx ``[M, K]``: one term, or with a gate two, of d_pre ``[M, n]``, weight ``[n, K]``.

    The ``first`` group begins the sum, the ``last`` one, another, rounds it. In between dx and ``rest``, int8
    ``[M, ⌈K / 2⌉]``, hold it (``carrying``). dx is of 16 bits, its rows and those of ``rest`` are contiguous; all else
    has any strides.
    """
    rows, columns = dx.shape
    units = terms[0][0].shape[1]
    matrices = None if pipeline is None else _matrices(terms, dx, rest)
    if pipeline is not None and matrices is not None:
        pipelined.launch_data_gradient(*matrices, first, last, pipeline)
        return
    operands = [*terms[0], *(terms[1] if len(terms) > 1 else (None, None))]
    strides = [number for each in operands for number in ((0, 0) if each is None else each.stride())]
    launch(
        _carried_gradient_kernel,
        ceil_div(rows, tiles.block_m) * ceil_div(columns, tiles.block_n),
        (*operands, dx, rest),
        (*strides, dx.stride(0), rest.stride(0), units, columns),
        (rows, 0.0),
        (tiles.block_m, tiles.block_n, tiles.block_inner, _GROUP, first, last, input_precision),
        tiles.num_warps,
        tiles.num_stages,
    )


def _matrices(
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]], dx: torch.Tensor, rest: torch.Tensor
) -> tuple[list[Matrix], Matrix, Matrix] | None:
    """The operands as TMA sees them, or None where one does not lie as it needs them.

    Weights may be transposed, all of them.
    """
    operands = [found for d_pre, weight in terms for found in (untransposed(d_pre), matrix(weight))]
    complete = [each for each in operands if each is not None]
    total, bits = untransposed(dx), untransposed(rest)
    if len(complete) < len(operands) or total is None or bits is None:
        return None
    if len({each.transposed for each in complete[1::2]}) > 1:
        return None
    # Whole pieces of 16 bytes, or TMA might write behind the end of a row of ``rest``.
    return None if dx.shape[1] % (2 * ALIGNMENT) else (complete, total, bits)
