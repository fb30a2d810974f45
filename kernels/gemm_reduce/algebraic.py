"""A sum or mean without an activation: ``Σ_r kept · reduced[r] = kept · Σ_r reduced[r]``, two passes over the operands.

Each pass reads one operand once, and that is all the time there is. The second kernel is launched while the first one
still runs: it fetches its rows of kept, and waits only then for the sums.
"""

import torch

from ..device import tl, triton
from ..launching import launch
from ..tuning import AlgebraicConfig
from .operands import ReduceOperands


@triton.jit(do_not_specialize=["R", "splits"])
def _sum_rows_kernel(
    reduced_ptr, sums_ptr, stride_rz, stride_rr, stride_rk, R, splits,
    K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    K_BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    inner = (program % K_BLOCKS) * BLOCK_K + tl.arange(0, BLOCK_K)
    split = program // K_BLOCKS % splits
    batch = (program // K_BLOCKS // splits).to(tl.int64)
    share = tl.cdiv(tl.cdiv(R, BLOCK_R), splits) * BLOCK_R
    reduced_ptr += batch * stride_rz
    total = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
    for r in tl.range(split * share, tl.minimum(split * share + share, R), BLOCK_R):
        rows = r + tl.arange(0, BLOCK_R)
        offsets = rows.to(tl.int64)[:, None] * stride_rr + inner.to(tl.int64)[None, :] * stride_rk
        total += tl.load(reduced_ptr + offsets, mask=(rows < R)[:, None] & (inner < K)[None, :], other=0.0)
    tl.store(sums_ptr + (batch * splits + split) * K + inner, tl.sum(total, 0), mask=inner < K)


@triton.jit(do_not_specialize=["P", "splits", "scale"])
def _multiply_sums_kernel(
    kept_ptr, sums_ptr, values_ptr, stride_kz, stride_kp, stride_kk, P, splits, scale,
    K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles = tl.cdiv(P, BLOCK_P)
    rows = program % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    batch = (program // tiles).to(tl.int64)
    kept_ptr += batch * stride_kz
    sums_ptr += batch * splits * K
    total = tl.zeros([BLOCK_P], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        offsets = rows.to(tl.int64)[:, None] * stride_kp + inner.to(tl.int64)[None, :] * stride_kk
        kept = tl.load(kept_ptr + offsets, mask=(rows < P)[:, None] & (inner < K)[None, :], other=0.0)
        if OVERLAPPED and k == 0:
            tl.extra.cuda.gdc_wait()
        summed = tl.zeros([BLOCK_K], tl.float32)
        for split in range(splits):
            summed += tl.load(sums_ptr + split * K + inner, mask=inner < K, other=0.0)
        total += tl.sum(kept.to(tl.float32) * summed[None, :], 1)
    total *= scale
    tl.store(values_ptr + batch * P + rows, total.to(values_ptr.dtype.element_ty), mask=rows < P)


def sum_before_product(operands: ReduceOperands, config: AlgebraicConfig) -> torch.Tensor:
    """D ``[Z, P]`` for sum and mean of whole entries, without biases: the partial sums are added in a fixed order."""
    batch, kept, reduced, width = operands.sizes()
    device = operands.kept.device
    overlapped = device.type == "cuda" and config.overlapped
    sums = torch.empty(batch, config.splits, width, dtype=torch.float32, device=device)
    values = torch.empty(batch, kept, dtype=operands.kept.dtype, device=device)
    launch(
        _sum_rows_kernel,
        batch * config.splits * triton.cdiv(width, config.block_k),
        (operands.reduced, sums),
        operands.reduced.stride(),
        (reduced, config.splits),
        (width, config.block_r, config.block_k, overlapped),
        config.num_warps,
    )
    launch(
        _multiply_sums_kernel,
        batch * triton.cdiv(kept, config.block_p),
        (operands.kept, sums, values),
        operands.kept.stride(),
        (kept, config.splits, 1.0 / reduced if operands.arithmetic.op == "mean" else 1.0),
        (width, config.block_p, config.block_k, overlapped),
        config.num_warps,
        overlapped=overlapped,
    )
    return values
