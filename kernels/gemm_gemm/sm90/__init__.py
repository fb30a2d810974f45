"""The kernels of GEMM-GEMM and the narrow FFN for Hopper: warp-specialised, in Gluon, beside the generic ones.

They take what ``tuning.sm90_config`` admits (16 bits; K and O up to 128, or both 256; no dropout) if TMA can read the
tensors; anything else runs in the generic kernels. Both take the same tensors in the same order; the seed is always
None here.
"""

from .rows import prepare_data_gradient, prepare_forward
from .stored import prepare_stored
from .weight_gradient import prepare_weight_gradient

__all__ = ["prepare_data_gradient", "prepare_forward", "prepare_stored", "prepare_weight_gradient"]
