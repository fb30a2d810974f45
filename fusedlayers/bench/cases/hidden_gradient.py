"""Gradient of an FFN's pre-activations and its sums. No grid is published: the self-test alone runs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ... import functional, reference
from .case import Case, Operand, Options, Results, Shape


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    rows, hidden, out = shape
    pre_activations = ("z", "z_gate") if options.gated else ("z",)
    return {
        "dy": Operand((rows, out)),
        "w_down": Operand((out, hidden), hidden**-0.5),
        **{name: Operand((rows, hidden)) for name in pre_activations},
    }


def _ordered(call: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Results]:
    """``call`` with what only a gate has at the end."""

    def ordered(**arguments: Any) -> Results:
        dz, dz_gate, db_up, db_gate = call(**arguments)
        return dz, db_up, dz_gate, db_gate

    return ordered


HIDDEN_GRADIENT = Case(
    name="hidden_gradient",
    letters=("M", "N", "O"),
    meaning="tokens × hidden columns × output columns",
    parameters=frozenset({"w_down"}),
    flags=frozenset({"gated", "bias"}),
    grids=(),
    operands=_operands,
    forward_flops=lambda shape, options: 2 * math.prod(shape),
    ours=_ordered(functional.hidden_gradient),
    torch_expression=_ordered(reference.hidden_gradient),
    operation="hidden_gradient",
    our_keywords=lambda options: {"activation": options.activation, "bias": options.bias},
    torch_keywords=lambda options: {"activation": options.activation, "bias": options.bias},
    results=("dz", "db_up", "dz_gate", "db_gate"),
    backward=False,
)
