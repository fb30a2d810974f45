"""A tensor times a factor on the device, rounded once, without synchronising to read it.

torch's own product with a scalar tensor would round the factor to the dtype of the tensor first.
"""

import torch

from ..device import tl, triton
from ..launching import ceil_div, launch

_BLOCK = 2048
_WARPS = 4
# At most: enough to fill any GPU, and few enough to end at once if there is nothing to do.
_PROGRAMS = 2048
# Elements per vectorised access, if their number is a multiple of it.
_VECTOR = 16


@triton.jit(do_not_specialize=["count"])
def _scaled_kernel(
    values_ptr, factor_ptr, out_ptr, count, VECTOR: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
    IN_PLACE: tl.constexpr,
):  # fmt: skip
    factor = tl.load(factor_ptr)
    # An alignment hint: without it, loads are not vectorised.
    count = tl.cast(count, tl.int64) // VECTOR * VECTOR
    if IN_PLACE:
        count = tl.where(factor == 1.0, 0, count)
    for first in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, count, PROGRAMS * BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < count
        values = tl.load(values_ptr + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + index, (values * factor).to(out_ptr.dtype.element_ty), mask=inside)


def scaled(values: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, *, in_place: bool = False) -> torch.Tensor:
    """``factor · values`` in ``dtype``, for contiguous values and one float32 factor.

    ``in_place``: in the memory of the values, if they have that dtype; a factor of 1 leaves them as they are.
    """
    in_place = in_place and values.dtype == dtype
    out = values if in_place else torch.empty(values.shape, dtype=dtype, device=values.device)
    if out.numel():
        count = out.numel()
        programs = min(_PROGRAMS, ceil_div(count, _BLOCK))
        constants = (_VECTOR if count % _VECTOR == 0 else 1, _BLOCK, _PROGRAMS, in_place)
        launch(_scaled_kernel, programs, (values, factor, out), (), (count,), constants, _WARPS)
    return out
