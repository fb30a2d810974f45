"""Tensor and expert parallelism, each as a ``ParallelStyle`` for ``parallelize_module``, and a check of the result.

DDP and FSDP2 need nothing from here: inside a forward pass their weights are plain tensors.
"""

from .checking import Finding, Findings, check
from .experts import ExpertParallel, ExpertParallelMoE
from .ffn import FusedFFNParallel, TensorParallelFFN
from .loss import LinearCrossEntropyLossParallel, VocabularyParallelLoss

__all__ = [
    "ExpertParallel", "ExpertParallelMoE", "Finding", "Findings", "FusedFFNParallel", "LinearCrossEntropyLossParallel",
    "TensorParallelFFN", "VocabularyParallelLoss", "check",
]  # fmt: skip
