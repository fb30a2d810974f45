"""What `replace` runs in 8 bits: FFNs, and linears that no rule takes, if wide enough and no head of the model.

Whether a call does run in 8 bits is decided at every call; the report says what a training batch would do.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from ..functional.linear import LINEAR
from ..functional.operation import Operation
from ..functional.precision import WORD
from ..modules import FFNPieces, linear_weight, why_not_plain
from ..planning import Device
from ..planning.float8 import why_narrow, why_uneven
from .linears import FusedSplitKLinear
from .rules import LinearRule
from .saving import why_in_16_bits, why_no_kernels_for_linear
from .swapping import fused_class


def in_bits(
    pieces: FFNPieces, recompute: Literal["auto"] | bool | int, precision: str | None, on: Device | None
) -> str:
    """Whether an FFN that was asked to run in 8 bits does, in words; empty where nothing was asked."""
    if precision is None:
        return ""
    given = pieces.arguments(linear_weight(pieces.up), None, recompute, precision)
    if "precision" not in given:
        return "; in 16 bits: it has adapters"
    del given["x"]
    return _said(pieces.operation, given, precision, on)


def why_not_in_8_bits(linear: nn.Linear, is_head: bool) -> str | None:
    """Why a linear that is no part of an FFN stays as it is, or None."""
    sizes = linear.in_features, linear.out_features
    reason = "it is the head of the model" if is_head else why_uneven(sizes) or why_narrow(sizes)
    return reason or why_not_plain(linear)


def linear_in_8_bits(
    linear: nn.Linear, precision: str, on: Device | None
) -> tuple[type[FusedSplitKLinear], str, None, str | None]:
    """The class of a linear that runs in 8 bits, and the fields of its `Entry` from ``reason`` on."""
    given = {"weight": linear.weight, "bias": linear.bias, "precision": precision}
    text = f"{linear.in_features} -> {linear.out_features}{_said(LINEAR, given, precision, on)}"
    fused = fused_class(FusedSplitKLinear, nn.Linear, precision=precision)
    return fused, text, None, why_no_kernels_for_linear(linear, LinearRule(), on)


def _said(operation: Operation, given: dict[str, Any], precision: str, on: Device | None) -> str:
    if (reason := why_in_16_bits(operation, given, on)) is not None:
        return f"; in 16 bits: {reason}"
    floats = next(iter(given.values())).dtype is torch.float32
    return f"; {WORD}{' under autocast' if floats else ''}"
