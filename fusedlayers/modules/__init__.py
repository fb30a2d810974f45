"""The layers as modules: parameters, their initial values and ``state_dict``; the work is done by ``functional``."""

from .adapters import ffn_pieces
from .children import (
    attributes_of,
    base_linear,
    class_name,
    class_path,
    is_adapted,
    is_plain_now,
    is_transposed,
    linear_weight,
    patched_method,
    say_once,
    split_gate,
    why_called_otherwise,
    why_must_be_called,
    why_not_now,
    why_not_plain,
    why_not_plain_tensor,
    why_not_read_past,
    why_patched,
)
from .ffn import FusedFFN
from .guarding import KEPT, BlockGuard, forget, keep, kept
from .linear import SplitKLinear
from .linear_cross_entropy import LinearCrossEntropyLoss
from .maxsim import MaxSim
from .moe import FusedMoE
from .parts import OnOneProcess
from .pieces import FFNPieces
from .traced import outside_of_traces, part_of, traceable, traced_dropout_p, traced_ffn

__all__ = [
    "KEPT",
    "BlockGuard",
    "FFNPieces",
    "FusedFFN",
    "FusedMoE",
    "LinearCrossEntropyLoss",
    "MaxSim",
    "OnOneProcess",
    "SplitKLinear",
    "attributes_of",
    "base_linear",
    "class_name",
    "class_path",
    "ffn_pieces",
    "forget",
    "is_adapted",
    "is_plain_now",
    "is_transposed",
    "keep",
    "kept",
    "linear_weight",
    "outside_of_traces",
    "part_of",
    "patched_method",
    "say_once",
    "split_gate",
    "traceable",
    "traced_dropout_p",
    "traced_ffn",
    "why_called_otherwise",
    "why_must_be_called",
    "why_not_now",
    "why_not_plain",
    "why_not_plain_tensor",
    "why_not_read_past",
    "why_patched",
]
