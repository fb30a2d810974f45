"""Gradient of an FFN's pre-activations and its sums. No grid is published: the self-test alone runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ... import functional, reference
from ...kernels.tuning.dtypes import GENERIC
from ...planning import Device
from .case import DTYPES, Case, Operand, Options, Results, Shape
from .trial import Trial


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


def _trials(device: Device) -> Iterator[Trial]:
    for gated in (False, True):
        relu, plain = (Options(activation, gated=gated, bias=True) for activation in ("relu", "identity"))
        if device.backend != GENERIC:
            for dtype in ("bf16", "fp16"):
                yield Trial("hidden_gradient", relu, (1000, 392, 200), dtype, "few")
                yield Trial("hidden_gradient", plain, (1024, 384, 512), dtype, "few")
        for dtype in DTYPES:
            # Rows of odd length, as the sm90 kernel cannot copy them.
            yield Trial("hidden_gradient", relu, (300, 127, 72), dtype, "generic")
            yield Trial("hidden_gradient", plain, (256, 256, 128), dtype, "generic")


CASE = Case(
    name="hidden_gradient",
    operation="hidden_gradient",
    place=7,
    letters=("M", "N", "O"),
    meaning="tokens × hidden columns × output columns",
    flags=frozenset({"gated", "bias"}),
    operands=_operands,
    parameters=frozenset({"w_down"}),
    keywords=lambda options: {"activation": options.activation, "bias": options.bias},
    ours=_ordered(functional.hidden_gradient),
    torch_expression=_ordered(reference.hidden_gradient),
    results=("dz", "db_up", "dz_gate", "db_gate"),
    backward=False,
    trials=_trials,
    few_trials=(Trial("hidden_gradient", Options("relu", bias=True), (37, 24, 40), "fp16"),),
)
