"""The kernels of GEMM-GEMM and the narrow FFN for Hopper: warp-specialised, in Gluon, beside the generic ones.

They take what ``tuning.sm90_config`` admits (16 bits; K and O up to 128, or both 256; no dropout) where the
tensors lie as TMA wants them; anything else runs in the generic kernels, which compute the same.
"""

from .data_gradient import data_gradient, prepare_data_gradient
from .forward import forward, prepare_forward
from .hidden_gradient import hidden_gradient, prepare_hidden_gradient
from .stored_weight_gradient import prepare_stored_weight_gradients
from .weight_gradient import prepare_weight_gradient

__all__ = [
    "data_gradient",
    "forward",
    "hidden_gradient",
    "prepare_data_gradient",
    "prepare_forward",
    "prepare_hidden_gradient",
    "prepare_stored_weight_gradients",
    "prepare_weight_gradient",
]
