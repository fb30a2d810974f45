"""The public operations, as functions of tensors: checked, planned, and differentiable."""

from .ffn import ffn
from .gemm_gemm import gemm_gemm
from .maxsim import maxsim

__all__ = ["ffn", "gemm_gemm", "maxsim"]
