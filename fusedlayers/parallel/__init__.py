"""Tensor and expert parallelism, each as a ``ParallelStyle`` for ``parallelize_module``.

DDP and FSDP2 need nothing from here: inside a forward pass their weights are plain tensors.
"""

from .experts import ExpertParallel, ExpertParallelMoE
from .ffn import FusedFFNParallel, TensorParallelFFN
from .loss import LinearCrossEntropyLossParallel, VocabularyParallelLoss

__all__ = [
    "ExpertParallel", "ExpertParallelMoE", "FusedFFNParallel", "LinearCrossEntropyLossParallel", "TensorParallelFFN",
    "VocabularyParallelLoss",
]  # fmt: skip
