"""``softsign(a wᵀ)``: a product with an epilogue of its own, on both back ends."""

import torch

from fusedlayers.kernels.device import tl, triton
from fusedlayers.kernels.hopper import fence_async_shared, gl, gluon, matrix, untransposed
from fusedlayers.kernels.launching import Launch, ceil_div
from fusedlayers.kernels.matmul.generic import mainloop, operands, schedules
from fusedlayers.kernels.matmul.sm90 import cooperative, loading, pingpong, ring, roles
from fusedlayers.kernels.matmul.sm90.schedules import dense_schedule
from fusedlayers.kernels.tiles import store_tile
from fusedlayers.kernels.tuning import EpiloguePipeline, EpilogueTiles


@triton.jit
def softsign(x):
    return x / (1.0 + tl.abs(x))


@triton.jit(do_not_specialize=["M", "zero"])
def _softsign_kernel(
    a_ptr, w_ptr, out_ptr, a_strides, w_strides, K, N, M, zero, BLOCKS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    row, column = schedules.swizzled_tile(tl.program_id(0), M, N, BLOCKS[0], BLOCKS[1])
    rows, cols = row * BLOCKS[0] + tl.arange(0, BLOCKS[0]), column * BLOCKS[1] + tl.arange(0, BLOCKS[1])
    a = operands.Operand(a_ptr, 0, a_strides[0], a_strides[1], M, K)
    w = operands.Operand(w_ptr, 0, w_strides[0], w_strides[1], N, K)
    acc = mainloop.multiply(tl.zeros(BLOCKS, tl.float32), a, w, rows, cols, 0, 0, K, zero, STEP, "ieee")
    store_tile(out_ptr, softsign(acc), rows, cols, N, 1, M, N)


@gluon.jit
def _epilogue(consumer: gl.constexpr, tile, top, bottom, loaded, given, stored):
    stored = cooperative.store_rows(consumer, given[0], tile[0], tile[1], softsign(top), given[1], stored)
    below = tile[0] + ring.HALF
    return cooperative.store_rows(consumer, given[0], below, tile[1], softsign(bottom), given[1], stored)


@gluon.jit(do_not_specialize=["tile_rows", "M"])
def _sm90_softsign_kernel(
    a_desc, w_desc, out_desc, K, N, tile_columns, tile_rows, M, TRANSPOSED: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    schedule = dense_schedule(tile_rows, tile_columns, GROUP, ring.TILE)
    stages = pingpong.pingpong_ring(a_desc, w_desc, TRANSPOSED, STEP, STAGES)
    term = loading.Term(left=a_desc, right=w_desc, other=None, inner=K, first=0)
    given = (out_desc, ring.make_staging(out_desc, SLOTS))
    fence_async_shared()
    roles.warp_specialize(
        2, pingpong.store_tiles, (pingpong.zero_halves, _epilogue, stages, schedule, gl.cdiv(K, STEP), given),
        loading.load_tiles, (stages, schedule, term),
    )  # fmt: skip


def softsign_product(a: torch.Tensor, w: torch.Tensor, tiles: EpilogueTiles, pipeline: EpiloguePipeline | None):
    """``[M, N]`` from a ``[M, K]`` and w ``[N, K]`` of any strides."""
    (M, K), N, out = a.shape, w.shape[0], a.new_empty(a.shape[0], w.shape[0])
    left, right, result = untransposed(a), matrix(w.T), untransposed(out)
    if pipeline is not None and left is not None and right is not None and result is not None:
        launch = pingpong.dense_launch(_sm90_softsign_kernel, [(left, right)], result, pipeline)
    else:
        programs, blocks = ceil_div(M, tiles.block_m) * ceil_div(N, tiles.block_n), (tiles.block_m, tiles.block_n)
        numbers, constants = (a.stride(), w.stride(), K, N), (blocks, tiles.block_inner)
        launch = Launch(_softsign_kernel, programs, numbers, (M, 0.0), constants, tiles.num_warps, tiles.num_stages)
    launch((a, w, out))
    return out
