"""Fused matrix-product layers for PyTorch: Triton kernels behind drop-in modules, and torch where no kernel helps."""

from . import functional
from .explaining import explain
from .modules import FusedFFN, MaxSim, SplitKLinear
from .replacing import replace, restore
from .verifying import verify

__version__ = "0.1.0"

__all__ = ["FusedFFN", "MaxSim", "SplitKLinear", "explain", "functional", "replace", "restore", "verify"]
