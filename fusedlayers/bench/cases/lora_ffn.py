"""The FFN with adapters of low rank and frozen weights."""

from __future__ import annotations

from collections.abc import Iterator

from ... import functional, reference
from ...kernels.tuning.dtypes import GENERIC
from ...planning import Device
from .case import DTYPES, Case, Grid, Operand, Options, Shape
from .trial import RAGGED, WHOLE, Trial


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    rows, width, hidden, rank = shape
    first, second = width**-0.5, hidden**-0.5
    linears = {"up": (hidden, width, first), "down": (width, hidden, second)}
    if options.gated:
        linears["gate"] = (hidden, width, first)
    operands = {"x": Operand((rows, width))}
    for name, (outputs, inputs, scale) in linears.items():
        operands[f"w_{name}"] = Operand((outputs, inputs), scale, frozen=True)
        operands[f"{name}_a"] = Operand((rank, inputs), scale)
        operands[f"{name}_b"] = Operand((outputs, rank), rank**-0.5)
        if options.bias:
            operands[f"b_{name}"] = Operand((outputs,), frozen=True)
    return operands


def _flops(shape: Shape, options: Options) -> int:
    rows, width, hidden, rank = shape
    linears = 3 if options.gated else 2
    return 2 * rows * linears * (width * hidden + rank * (width + hidden))


def _trials(device: Device) -> Iterator[Trial]:
    for gated in (False, True):
        relu, plain = (Options(activation, gated=gated, bias=True) for activation in ("relu", "identity"))
        for (M, N), width, rank in ((WHOLE, 512, 64), (RAGGED, 520, 20)):
            # With a gate and many rows the integers become too large for the eight bits of bfloat16.
            exact = "fp16" if gated and (M, N) == WHOLE else "bf16"
            if device.backend != GENERIC:
                for machine in ("few", "few, transposed"):
                    yield Trial("lora_ffn", relu, (M, width, N, rank), exact, machine)
                    yield Trial("lora_ffn", plain, (M, width, N, rank), "fp16", machine)
            for dtype in (each for each in DTYPES if each in (exact, "fp16", "fp32")):
                yield Trial("lora_ffn", relu, (M, width, N, rank), dtype, "generic")


CASE = Case(
    name="lora_ffn",
    operation="lora_ffn",
    place=12,
    letters=("M", "K", "N", "R"),
    meaning="tokens × d_model × d_ff × rank",
    grids=tuple(
        Grid(
            name, title, options, ((8192, 2048, 8192, 16), (8192, 4096, 14336, 16)), ((40, 24, 40, 4), (33, 24, 40, 8))
        )
        for name, title, options in (
            ("lora_ffn", "FFN with adapters, frozen weights", Options("gelu_tanh", bias=True)),
            ("gated_lora_ffn", "Gated FFN with adapters, frozen weights", Options("silu", gated=True)),
        )
    ),
    flags=frozenset({"gated", "bias"}),
    operands=_operands,
    parameters=frozenset({"w_up", "w_down", "w_gate", "up_a", "up_b", "down_a", "down_b", "gate_a", "gate_b"}),
    keywords=lambda options: {"activation": options.activation, "up_scale": 2.0},
    ours=functional.lora_ffn,
    torch_expression=reference.lora_ffn,
    forward_flops=_flops,
    # The frozen weights have no gradients.
    backward_flops=_flops,
    # Among thousands of tiles torch's error is small by chance in one of a single draw.
    draws=3,
    trials=_trials,
    few_trials=(Trial("lora_ffn", Options("relu", gated=True, bias=True), (37, 24, 40, 4), "fp32"),),
)
