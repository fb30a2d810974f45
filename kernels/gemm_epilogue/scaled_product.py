"""The product of two 8-bit operands with scales, on Hopper."""

from typing import Any

import torch

from ..hopper import ALIGNMENT, Scaled, matrix, untransposed
from ..launching import Launch, prepared
from ..matmul import sm90
from ..matmul.low_rank import LowRank
from ..tuning import EpiloguePipeline
from .scaled_hidden import scaled_matrix


def scaled_product(
    left: Scaled,
    right: Scaled,
    bias: torch.Tensor | None,
    pipeline: EpiloguePipeline,
    dtype: torch.dtype,
    ready: dict[Any, Any] | None = None,
    low_rank: LowRank | None = None,
) -> torch.Tensor:
    """``left rightᵀ + bias`` of ``dtype``: left ``[M, K]``, right ``[N, K]`` -> ``[M, N]``, contiguous.

    Rows of the values begin at multiples of 16 bytes; N is a multiple of 8. Long sums are summed in parts. The product
    of ``low_rank``, in 16 bits, is added on chip: its ``right`` is ``[R, N]``.

    Raises ValueError if TMA cannot read an operand or write the result, or if the bias is not contiguous.
    """
    found = left.values.new_empty(left.values.shape[0], right.values.shape[0], dtype=dtype)
    added = None if low_rank is None else low_rank.divided(left.scale, right.scale, None, 1).copied(True)

    def prepare() -> Launch:
        columns = found.shape[1]
        if columns * dtype.itemsize % ALIGNMENT:
            raise ValueError(f"right has {columns} rows, and so many {dtype} are to be a multiple of 16 bytes")
        if bias is not None and bias.stride(0) != 1:
            raise ValueError(f"bias has a stride of {bias.stride(0)}, and is to be contiguous")
        out = untransposed(found)
        assert out is not None, "it is contiguous"
        operands = scaled_matrix("left", left), scaled_matrix("right", right)._replace(transposed=True)
        if added is None:
            return sm90.prepare_scaled_product(*operands, out, pipeline)
        factor = matrix(added.right)
        assert factor is not None, "it was copied for TMA"
        return sm90.prepare_scaled_product(*operands, out, pipeline, (scaled_matrix("u", added.left), factor))

    launch = prepared(ready, ("scaled product", dtype), prepare)
    factors = (None, None) if added is None else added[:2]
    launch((left.values, right.values, *factors, found, bias, left.scale, right.scale, None, None))
    return found
