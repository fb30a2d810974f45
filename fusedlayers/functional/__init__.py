"""The public operations, as functions of tensors: checked, planned, and differentiable."""

from .ffn import ffn
from .gemm_gemm import gemm_gemm
from .gemm_reduce import gemm_reduce
from .hidden_gradient import hidden_gradient
from .linear import linear
from .maxsim import maxsim
from .weight_gradient import weight_gradient

__all__ = ["ffn", "gemm_gemm", "gemm_reduce", "hidden_gradient", "linear", "maxsim", "weight_gradient"]
