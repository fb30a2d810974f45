"""The public operations, as functions of tensors: checked, planned, and differentiable."""

from .ffn import ffn
from .gemm_gemm import gemm_gemm
from .hidden_gradient import hidden_gradient
from .weight_gradient import weight_gradient

__all__ = ["ffn", "gemm_gemm", "hidden_gradient", "weight_gradient"]
