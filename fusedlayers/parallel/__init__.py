"""Tensor and expert parallelism in torch's own words: each a ``ParallelStyle`` for ``parallelize_module``.

DDP and FSDP2 need nothing from here: the weights that they give to a forward pass are plain tensors.
"""

from .experts import ExpertParallel, ExpertParallelMoE
from .ffn import FusedFFNParallel, TensorParallelFFN
from .loss import LinearCrossEntropyLossParallel, VocabularyParallelLoss

__all__ = [
    "ExpertParallel", "ExpertParallelMoE", "FusedFFNParallel", "LinearCrossEntropyLossParallel", "TensorParallelFFN",
    "VocabularyParallelLoss",
]  # fmt: skip
