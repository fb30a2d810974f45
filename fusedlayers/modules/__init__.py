"""The layers as modules: parameters, their initial values and ``state_dict``; the work is done by ``functional``."""

from .children import (
    class_name,
    class_path,
    linear_weight,
    patched_method,
    say_once,
    why_must_be_called,
    why_not_now,
    why_not_plain,
    why_not_plain_tensor,
    why_not_read_past,
    why_patched,
)
from .ffn import FFNPieces, FusedFFN
from .linear import SplitKLinear
from .maxsim import MaxSim

__all__ = [
    "FFNPieces",
    "FusedFFN",
    "MaxSim",
    "SplitKLinear",
    "class_name",
    "class_path",
    "linear_weight",
    "patched_method",
    "say_once",
    "why_must_be_called",
    "why_not_now",
    "why_not_plain",
    "why_not_plain_tensor",
    "why_not_read_past",
    "why_patched",
]
