"""H = act(Z), gated act(Zg) ⊙ Z, from both projections in one mainloop; Z and Zg where a backward pass reads them."""

from typing import NamedTuple

import torch

from ...device import tl, triton
from ...dropout import NO_DROPOUT, Dropout, DropoutNumbers
from ...launching import Launch, ceil_div, vector_unit
from ...tiles import assume_multiple, load_tile
from ...tuning import EpilogueTiles
from ...tuning.grouped_gemm import GroupedTiles
from ..arithmetic import Arithmetic
from .epilogues import activate, add_bias
from .mainloop import mainloop
from .operands import DENSE, Bias, HiddenOutputs, Operand, RowOrder, strides
from .schedules import end_of_rows, expert_of, swizzled_tile


class _Strides(NamedTuple):
    """The strides of the operands."""

    x: tuple[int, ...]
    up: tuple[int, ...]
    gate: tuple[int, ...]
    up_bias: tuple[int, ...]
    gate_bias: tuple[int, ...]


@triton.jit(do_not_specialize=["M", "zero", "dropout", "limits"])
def _hidden_kernel(
    x_ptr, up_ptr, w_gate_ptr, hidden_ptr, z_ptr, gate_ptr, up_bias_ptr, gate_bias_ptr, seed_ptr, tile_expert_ptr,
    slots_ptr, strides, width, K, N, M, zero, dropout, limits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_INNER: tl.constexpr, VECTOR: tl.constexpr,
    ORDER: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    # Results are ``[M, width]`` with N columns and padding. ``zero`` is 0 at run time only: see ``tiles.add_product``.
    # With a BLOCK_INNER of 0 there is no product: Z and Zg ``[M, N]`` are read.
    INPUT_PRECISION: tl.constexpr = ARITHMETIC.input_precision
    GATED: tl.constexpr = w_gate_ptr is not None or gate_ptr is not None
    N, width = assume_multiple(N, VECTOR), assume_multiple(width, VECTOR)
    row, column = swizzled_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    first_row = row * BLOCK_M
    expert = expert_of(tile_expert_ptr, slots_ptr, first_row, ORDER.block)
    # Tiles of padding only are never read.
    if expert >= 0:
        rows = first_row + tl.arange(0, BLOCK_M)
        cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        row_limit = end_of_rows(slots_ptr, first_row, M, BLOCK_M)
        out = HiddenOutputs(hidden_ptr, z_ptr, gate_ptr, row_limit, width)
        if BLOCK_INNER == 0:
            z = load_tile(z_ptr, rows, cols, N, 1, M, N).to(tl.float32)
            z_gate = z
            if GATED:
                z_gate = load_tile(gate_ptr, rows, cols, N, 1, M, N).to(tl.float32)
        else:
            if ORDER.gathered:
                sources, source_limit = rows, row_limit
            else:
                # Padding gets row M, which the limit masks: there are at most M tokens.
                slots = tl.load(slots_ptr + rows)
                sources, source_limit = tl.where(slots >= 0, slots // ORDER.top_k, M), M
            x = Operand(x_ptr, 0, *strides.x, source_limit, K)
            up, gate = Operand(up_ptr, *strides.up, N, K), Operand(w_gate_ptr, *strides.gate, N, K)
            absent = Operand(None, 0, 0, 0, 0, 0)
            z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            z, z_gate, _ = mainloop(
                z, z, x, up, gate, absent, sources, cols, expert, 0, K, zero, BLOCK_INNER, INPUT_PRECISION
            )  # fmt: skip
            z = add_bias(z, Bias(up_bias_ptr, *strides.up_bias, N), expert, cols)
            if GATED:
                z_gate = add_bias(z_gate, Bias(gate_bias_ptr, *strides.gate_bias, N), expert, cols)
        drop = DropoutNumbers(seed_ptr, *dropout)
        activate(z, z_gate, out, rows, cols, drop, limits, GATED, BLOCK_INNER != 0, ARITHMETIC)


def prepare_hidden(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    rows: int,
    width: int,
    arithmetic: Arithmetic,
    tiles: EpilogueTiles | GroupedTiles,
    *,
    dropout: Dropout = NO_DROPOUT,
    order: RowOrder = DENSE,
) -> Launch:
    """The launch for x ``[*, K]``, weights ``[N, K]`` or ``[E, N, K]``, up and gate, and results ``[rows, width]``.

    Its tensors are x, up, gate, hidden, Z, Zg, both biases, the dropout's seed, experts of tiles and slots: None for
    those that are absent. If ``tiles.block_inner`` is 0, Z and Zg ``[rows, N]`` are read.
    """
    columns = weights[0].shape[-2]
    vector = 1 if tiles.block_inner else vector_unit(x, columns, width)
    return Launch(
        _hidden_kernel,
        ceil_div(rows, tiles.block_m) * ceil_div(columns, tiles.block_n),
        (
            _Strides(x.stride(), *[strides(w, 3) for w in weights], *[strides(b, 2) for b in biases]),
            width, x.shape[1], columns,
        ),
        (rows, 0.0, dropout.numbers(), arithmetic.numbers),
        (tiles.block_m, tiles.block_n, tiles.block_inner, vector, order, arithmetic.constants),
        tiles.num_warps,
        tiles.num_stages,
    )  # fmt: skip
