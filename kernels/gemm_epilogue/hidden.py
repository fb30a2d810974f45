"""H from x, gated from both projections in one pass over x, and Z and Zg where a backward pass will read them."""

from typing import Any

import torch
import torch.nn.functional as F

from ..activations import activation_unit, hidden_and_slopes
from ..device import tl, triton
from ..dropout import NO_DROPOUT, Dropout, keep_factor
from ..hopper import ALIGNMENT, Matrix, matrix, untransposed
from ..launching import Launch, ceil_div, empty_rows, prepared, vector_unit
from ..matmul import sm90
from ..matmul.low_rank import LowRank
from ..tiles import add_product, grouped_tile, in_units, load_tile, load_vector, store_tile
from ..tuning import EpiloguePipeline, EpilogueTiles, hidden_stride

_GROUP = 8  # programs below one another, before those to their right: they share rows of the weights in the cache


@triton.jit(do_not_specialize=["M", "zero", "drop_limit", "keep_scale", "mask_row", "mask_column"])
def _hidden_kernel(
    x_ptr, up_ptr, w_gate_ptr, up_bias_ptr, gate_bias_ptr, seed_ptr, hidden_ptr, z_ptr, gate_ptr,
    stride_xm, stride_xk, stride_un, stride_uk, stride_gn, stride_gk, stride_ub, stride_gb, width, K, N,
    M, zero, drop_limit, keep_scale, mask_row, mask_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr, GROUP: tl.constexpr,
    VECTOR: tl.constexpr, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    # Results have ``width`` columns, N or a few more. ``zero`` is 0, which only the caller knows. With a BLOCK_INNER of
    # 0 the pre-activations are there, of N columns, and no operand of theirs is given.
    GATED: tl.constexpr = w_gate_ptr is not None or gate_ptr is not None
    UNIT: tl.constexpr = activation_unit(ACTIVATION, ACCURACY)
    N, width = in_units(N, VECTOR), in_units(width, VECTOR)
    row, column = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    if BLOCK_INNER == 0:
        z = load_tile(z_ptr, rows, cols, N, 1, M, N).to(tl.float32)
        if GATED:
            z_gate = load_tile(gate_ptr, rows, cols, N, 1, M, N).to(tl.float32)
    else:
        z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        z_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, K, BLOCK_INNER):
            inner = k + tl.arange(0, BLOCK_INNER)
            x_tile = load_tile(x_ptr, rows, inner, stride_xm, stride_xk, M, K)
            up_tile = load_tile(up_ptr, inner, cols, stride_uk, stride_un, K, N)
            z = add_product(z, x_tile, up_tile, zero, INPUT_PRECISION)
            if GATED:
                gate_tile = load_tile(w_gate_ptr, inner, cols, stride_gk, stride_gn, K, N)
                z_gate = add_product(z_gate, x_tile, gate_tile, zero, INPUT_PRECISION)
        if up_bias_ptr is not None:
            z += load_vector(up_bias_ptr, cols, stride_ub, N)[None, :]
        if GATED:
            if gate_bias_ptr is not None:
                z_gate += load_vector(gate_bias_ptr, cols, stride_gb, N)[None, :]
        if z_ptr is not None:
            store_tile(z_ptr, z, rows, cols, width, 1, M, width)
            if GATED:
                store_tile(gate_ptr, z_gate, rows, cols, width, 1, M, width)
    if GATED:
        hidden, _, _ = hidden_and_slopes(z, z_gate, True, ACTIVATION, ACCURACY)
    else:
        hidden, _, _ = hidden_and_slopes(z, z, False, ACTIVATION, ACCURACY)
    if seed_ptr is not None:
        hidden *= keep_factor((seed_ptr, drop_limit, keep_scale, mask_row, mask_column), rows, cols)
    store_tile(hidden_ptr, hidden * UNIT, rows, cols, width, 1, M, width)


def hidden(
    x: torch.Tensor,
    w_up: torch.Tensor,
    b_up: torch.Tensor | None,
    w_gate: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    keep: bool,
    activation: str,
    accuracy: str,
    input_precision: str,
    tiles: EpilogueTiles,
    pipeline: EpiloguePipeline | None = None,
    dropout: Dropout = NO_DROPOUT,
    ready: dict[Any, Any] | None = None,
    low_rank: LowRank | None = None,
    for_products: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(H, Z, Zg) ``[M, N]``, contiguous; Z, and Zg with a gate, only to ``keep``. Operands of any strides.

    With ``low_rank`` its products are part of Z and Zg; the pipelined kernel adds them on chip. Where ``tiles`` have no
    inner axis, torch computes Z and Zg, and one kernel H from them. If H is ``for_products`` alone, rows that a kernel
    fills begin with a sector of memory: Z and Zg may have a few more columns then, which say nothing.
    ``ready`` belongs to one prepared call: see ``gemm_gemm.Operands``. The place of the dropout is one of its options.
    """
    columns, width, launch, is_pipelined = prepared(
        ready, ("hidden", keep), _prepare, x, w_up, b_up, w_gate, b_gate, keep, activation, accuracy, input_precision,
        tiles, pipeline, dropout, low_rank, for_products,
    )  # fmt: skip
    if low_rank is not None and not is_pipelined:
        x, w_up, w_gate = low_rank.joined(x, w_up, w_gate, 1)
    z_gate: torch.Tensor | None = None
    if not tiles.block_inner:
        z = F.linear(x, w_up, b_up)
        z_gate = None if w_gate is None else F.linear(x, w_gate, b_gate)
        # What is not kept is replaced, unless rows are to lie otherwise. x says on which device.
        found = empty_rows(x, x.shape[0], columns, width) if keep or width > columns else z
        launch((x, None, None, None, None, dropout.seed, found, z, z_gate))
        return (found, z, z_gate) if keep else (found, None, None)
    found = empty_rows(x, x.shape[0], columns, width)
    kept = x.new_empty(x.shape[0], width) if keep else None
    if keep and w_gate is not None:
        z_gate = x.new_empty(x.shape[0], width)
    if is_pipelined:
        more = (None,) * 3 if low_rank is None else low_rank.copied(w_up.stride(1) != 1)[:3]
        sm90.launch_hidden(launch, (x, w_up, w_gate, found, kept, z_gate, *more), (b_up, b_gate, dropout.seed))
    else:
        launch((x, w_up, w_gate, b_up, b_gate, dropout.seed, found, kept, z_gate))
    return found, kept, z_gate


def _prepare(
    x: torch.Tensor,
    w_up: torch.Tensor,
    b_up: torch.Tensor | None,
    w_gate: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    keep: bool,
    activation: str,
    accuracy: str,
    input_precision: str,
    tiles: EpilogueTiles,
    pipeline: EpiloguePipeline | None,
    dropout: Dropout,
    low_rank: LowRank | None,
    for_products: bool,
) -> tuple[int, int, Launch, bool]:
    """What all executions of one prepared call share: the results' columns and those in memory, the launch, whether
    it is the pipelined one.
    """
    rows, columns = x.shape[0], w_up.shape[0]
    width = hidden_stride(columns, x.element_size()) if for_products else columns
    pipeline = pipeline if dropout.in_whole_draws else None
    matrices = None if pipeline is None else _matrices(x, w_up, w_gate, b_up, b_gate)
    if pipeline is not None and matrices is not None:
        made = sm90.prepare_hidden(
            *matrices, columns, keep, activation, accuracy, pipeline, dropout, low_rank, width=width
        )
        if made is not None:
            return columns, width, made, True
    if low_rank is not None:
        x, w_up, w_gate = low_rank.joined(x, w_up, w_gate, 1)
    bias_strides = [0 if bias is None else bias.stride(0) for bias in (b_up, b_gate)]
    vector = 1 if tiles.block_inner else vector_unit(x, columns, width)
    launch = Launch(
        _hidden_kernel,
        ceil_div(rows, tiles.block_m) * ceil_div(columns, tiles.block_n),
        (
            *x.stride(), *w_up.stride(), *((0, 0) if w_gate is None else w_gate.stride()), *bias_strides, width,
            x.shape[1], columns,
        ),
        (rows, 0.0, *dropout.numbers()),
        (tiles.block_m, tiles.block_n, tiles.block_inner, _GROUP, vector, activation, accuracy, input_precision),
        tiles.num_warps,
        tiles.num_stages,
    )  # fmt: skip
    return columns, width, launch, False


def _matrices(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
) -> tuple[Matrix, Matrix, Matrix | None] | None:
    """The operands as TMA sees them, or None where one does not lie so, or a bias has gaps.

    Weights may be transposed, both of them.
    """
    if any(bias is not None and bias.stride(0) != 1 for bias in (b_up, b_gate)):
        return None
    rows, up = untransposed(x), matrix(w_up)
    gate = None if w_gate is None else matrix(w_gate)
    if rows is None or up is None or (w_gate is not None and gate is None):
        return None
    if gate is not None and gate.transposed != up.transposed:
        return None
    # The results' rows, too.
    if w_up.shape[0] * x.element_size() % ALIGNMENT:
        return None
    return rows, up, gate
