"""Fused matrix-product layers for PyTorch: Triton kernels behind drop-in modules, and torch where no kernel helps."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if not Path(__file__).with_name("kernels").is_dir():
    # In a clone the kernels are beside this package, and Python imports the clone if it is started there.
    __path__.append(str(Path(__file__).resolve().parents[1]))

from . import functional
from .explaining import explain
from .functional.precision import Float8
from .modules import FusedFFN, FusedMoE, LinearCrossEntropyLoss, MaxSim, SplitKLinear
from .replacing import FFNRule, LinearRule, register_experts, replace, restore
from .verifying import verify

if TYPE_CHECKING:
    from . import parallel

__version__ = "0.3.0.dev0"

__all__ = [
    "FFNRule",
    "Float8",
    "FusedFFN",
    "FusedMoE",
    "LinearCrossEntropyLoss",
    "LinearRule",
    "MaxSim",
    "SplitKLinear",
    "explain",
    "functional",
    "parallel",
    "replace",
    "restore",
    "verify",
]


register_experts()


def __getattr__(name: str) -> Any:
    # Imported on demand: torch's tensor parallelism takes a second to import.
    if name == "parallel":
        from importlib import import_module

        return import_module(".parallel", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
