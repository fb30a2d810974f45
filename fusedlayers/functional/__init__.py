"""The public operations, as functions of tensors: checked, planned, and differentiable.

A new one has a file here, one in ``planning``, its kernels and one in ``bench/cases``; it is imported below, and its
oracle stands in ``reference``. ``tests/dummy_operation`` shows all of them.
"""

from .ffn import ffn
from .gemm_gemm import gemm_gemm
from .gemm_reduce import gemm_reduce
from .gradients import hidden_gradient, weight_gradient
from .linear import linear
from .linear_cross_entropy import linear_cross_entropy
from .linear_log_probs import linear_log_probs
from .lora_ffn import lora_ffn
from .maxsim import maxsim
from .moe_ffn import moe_ffn

__all__ = [
    "ffn", "gemm_gemm", "gemm_reduce", "hidden_gradient", "linear", "linear_cross_entropy", "linear_log_probs",
    "lora_ffn", "maxsim", "moe_ffn", "weight_gradient",
]  # fmt: skip
