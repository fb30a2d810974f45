"""A tensor times a factor that lies on the device, rounded once: nobody waits to read it.

torch's own product with a scalar tensor would round the factor to the dtype of the tensor first.
"""

import torch

from ..device import tl, triton
from ..launching import ceil_div, launch

_BLOCK = 2048
_WARPS = 4
# Elements that are read and written at once where their number is a multiple of it.
_VECTOR = 16


@triton.jit(do_not_specialize=["count"])
def _scaled_kernel(values_ptr, factor_ptr, out_ptr, count, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    # The compiler is shown what the number is a multiple of.
    count = count // VECTOR * VECTOR
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    values = tl.load(values_ptr + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, (values * tl.load(factor_ptr)).to(out_ptr.dtype.element_ty), mask=inside)


def scaled(values: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``factor · values`` in ``dtype``, for contiguous values and one float32 factor."""
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    if out.numel():
        count = out.numel()
        constants = (_VECTOR if count % _VECTOR == 0 else 1, _BLOCK)
        launch(_scaled_kernel, ceil_div(count, _BLOCK), (values, factor, out), (), (count,), constants, _WARPS)
    return out
