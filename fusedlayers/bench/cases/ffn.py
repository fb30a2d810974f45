"""The FFN, plain and gated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import functional, planning, reference
from ...kernels import tuning
from ...kernels.tuning.dtypes import GENERIC
from ...planning import Device
from .case import DTYPES, Case, Grid, Operand, Options, Shape
from .trial import MACHINES, RAGGED, WHOLE, Trial

_SM90_WIDTHS = (64, 104, 128, 256)
# Widths of a block that no fused kernel holds: whole tiles, and tails.
_WIDE = (512, 520)
# The same of one that takes groups of hidden units.
_GROUPED = ((2048, 512, 1024), (2077, 544, 1000))
# One whose products torch computes, beside kernels for what follows them.
_UNEVEN = 616
# So few hidden units that small blocks compute them.
_FEW_UNITS = 144


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    rows, width, hidden = shape
    first, second = width**-0.5, hidden**-0.5
    operands = {
        "x": Operand((rows, width)),
        "w_up": Operand((hidden, width), first),
        "w_down": Operand((width, hidden), second),
    }
    if options.bias:
        operands |= {"b_up": Operand((hidden,)), "b_down": Operand((width,))}
    if options.gated:
        operands["w_gate"] = Operand((hidden, width), first)
        operands |= {"b_gate": Operand((hidden,))} if options.bias else {}
    return operands


def _flops(shape: Shape, options: Options) -> int:
    return 2 * math.prod(shape) * (3 if options.gated else 2)


def _ours(x: Tensor, dropout_p: float = 0.0, **rest: Any) -> Tensor:
    return functional.ffn(x, dropout_p=dropout_p, dropout_seed=_seed(x) if dropout_p else None, **rest)


def _theirs(x: Tensor, dropout_p: float = 0.0, **rest: Any) -> Tensor:
    return reference.ffn(x, dropout_p=dropout_p, seed=_seed(x) if dropout_p else None, **rest)


def _seed(x: Tensor) -> Tensor:
    return torch.tensor([1], device=x.device)


def _keywords(options: Options) -> dict[str, object]:
    dropped = {"dropout_p": options.dropout_p} if options.dropout_p else {}
    return {"activation": options.activation, **dropped}


def supported(dtype: torch.dtype, width: int, gated: bool, device: Device) -> bool:
    """Whether all kernels of a feed-forward block have tiles for this width."""
    name = str(dtype).removeprefix("torch.")
    problem = planning.Problem(
        "ffn", 1, 1, width, 1, width, name, gated=gated, needs_data_gradient=True, needs_weight_gradient=True
    )
    return planning.gemm_gemm.why_unsupported(problem, device) is None


def widths_of_rows(bits: int, device: Device) -> list[int]:
    """The widest width of every row of the tables for this device: with it, the row is at its limits."""
    tables = [tuning.rows(kernel, device.architecture, bits, gated)
              for kernel in ("forward", "data_gradient", "weight_gradient") for gated in (False, True)]  # fmt: skip
    return sorted({width for rows in tables for width, _ in rows})


def _trials(device: Device) -> Iterator[Trial]:
    for gated in (False, True):
        relu, plain = (Options(activation, gated=gated, bias=True) for activation in ("relu", "identity"))
        yield from _fused_trials(relu, plain, device)
        yield from _wide_trials(relu, plain, device)
        yield from _grouped_trials(relu, plain, device)


def _fused_trials(relu: Options, plain: Options, device: Device) -> Iterator[Trial]:
    """Blocks that are one kernel."""
    if device.backend != GENERIC:
        for machine in ("few", "all", "recomputing", "recomputing, all"):
            for width in _SM90_WIDTHS:
                if "recompute" in MACHINES[machine] and width < 256:
                    continue
                for M, N in (WHOLE, RAGGED, (RAGGED[0], _FEW_UNITS)):
                    yield Trial("ffn", relu, (M, width, N), "bf16", machine)
                    yield Trial("ffn", plain, (M, width, N), "fp16", machine)
    for dtype, bits in (("bf16", 16), ("fp32", 32)):
        for width in widths_of_rows(bits, device):
            if not supported(DTYPES[dtype], width, relu.gated, device):
                continue
            yield Trial("ffn", relu, (RAGGED[0], width, RAGGED[1]), dtype, "generic")
            yield Trial("ffn", plain, (WHOLE[0], width, WHOLE[1]), "fp16" if dtype == "bf16" else dtype, "generic")


def _wide_trials(relu: Options, plain: Options, device: Device) -> Iterator[Trial]:
    """Blocks that are too wide to be one kernel: activations in the epilogues of products."""
    for width, (M, N) in zip(_WIDE, (WHOLE, RAGGED), strict=True):
        if device.backend != GENERIC:
            for backward in (False, True):
                yield Trial("ffn", relu, (M, width, N), "bf16", "few", backward)
                yield Trial("ffn", plain, (M, width, N), "fp16", "few", backward)
            if (M, N) == RAGGED:
                yield Trial("ffn", relu, (M, width, N), "bf16", "few, transposed")
                yield Trial("ffn", plain, (M, width, N), "fp16", "few, transposed")
        for dtype in DTYPES:
            yield Trial("ffn", relu, (M, width, N), dtype, "generic")
            yield Trial("ffn", plain, (M, width, N), dtype, "generic")
    # Half of the hidden: what is left is doubled.
    dropping = replace(relu, dropout_p=0.5)
    for machine in ("few", "generic") if device.backend != GENERIC else ("generic",):
        for dtype in ("bf16", "fp16") if machine == "few" else DTYPES:
            yield Trial("ffn", dropping, (RAGGED[0], _WIDE[1], RAGGED[1]), dtype, machine)
    if device.backend != GENERIC:
        for options, dtype in ((relu, "bf16"), (plain, "fp16"), (dropping, "bf16")):
            yield Trial("ffn", options, (RAGGED[0], _UNEVEN, RAGGED[1]), dtype, "all")


def _grouped_trials(relu: Options, plain: Options, device: Device) -> Iterator[Trial]:
    """Blocks whose gradient of x is summed over groups of hidden units."""
    generic = "recomputing, generic"
    for machine in (generic,) if device.backend == GENERIC else ("recomputing", generic):
        for shape in _GROUPED:
            yield Trial("ffn", relu, shape, "bf16", machine)
            yield Trial("ffn", plain, shape, "fp16", machine)
    if device.backend != GENERIC:
        yield Trial("ffn", relu, _GROUPED[1], "bf16", "recomputing, transposed")
        yield Trial("ffn", plain, _GROUPED[0], "fp16", "recomputing, transposed")


CASE = Case(
    name="ffn",
    operation="ffn",
    place=4,
    letters=("M", "K", "N"),
    meaning="tokens × d_model × d_ff",
    grids=(
        Grid(
            "ffn", "FFN, gelu_tanh, bias", Options("gelu_tanh", bias=True),
            (
                (131072, 64, 256), (131072, 128, 512), (65536, 256, 1024), (32768, 512, 2048), (16384, 768, 3072),
                (16384, 1024, 4096), (8192, 2048, 8192), (8192, 4096, 14336),
            ),
            ((1024, 64, 256), (130, 48, 100)),
        ),
        Grid("ffn_gelu", "FFN, gelu (erf), bias", Options("gelu", bias=True), ((131072, 128, 512),), ((130, 48, 100),)),
        Grid(
            "gated_ffn", "Gated FFN, silu, no bias", Options("silu", gated=True),
            ((65536, 256, 768), (32768, 512, 1408), (16384, 1024, 2816), (8192, 2048, 5632), (8192, 4096, 14336)),
            ((1024, 64, 192), (130, 48, 100)),
        ),
    ),
    flags=frozenset({"gated", "bias", "recompute"}),
    operands=_operands,
    parameters=frozenset({"w_up", "w_down", "b_up", "b_down", "w_gate", "b_gate"}),
    keywords=_keywords,
    ours=_ours,
    torch_expression=_theirs,
    forward_flops=_flops,
    trials=_trials,
    few_trials=(
        Trial("ffn", Options("relu", bias=True), (37, 24, 40), "fp16"),
        Trial("ffn", Options("relu", gated=True, bias=True), (37, 24, 40), "fp32"),
        Trial("ffn", Options("relu", bias=True), (37, 144, 40), "fp32"),
    ),
)  # fmt: skip
