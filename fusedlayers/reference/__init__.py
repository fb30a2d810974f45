"""Each operation in a few lines of torch: its specification, float64 oracle, CPU path, and baseline for benchmarks."""

from .experts import clamped_hidden, moe_ffn, split_gate_and_up
from .layers import (
    dropped,
    ffn,
    gemm_gemm,
    gemm_gemm_reassociated,
    hidden,
    hidden_gradient,
    linear,
    lora_ffn,
    weight_gradient,
)
from .losses import cross_entropy, linear_cross_entropy, linear_log_probs, logits
from .reductions import gemm_reduce, gemm_sum, maxsim

__all__ = [
    "clamped_hidden",
    "cross_entropy",
    "dropped",
    "ffn",
    "gemm_gemm",
    "gemm_gemm_reassociated",
    "gemm_reduce",
    "gemm_sum",
    "hidden",
    "hidden_gradient",
    "linear",
    "linear_cross_entropy",
    "linear_log_probs",
    "logits",
    "lora_ffn",
    "maxsim",
    "moe_ffn",
    "split_gate_and_up",
    "weight_gradient",
]
