"""The FFN, plain and gated."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import functional, reference
from .case import Case, Grid, Operand, Options, Shape


def _ffn_operands(shape: Shape, options: Options) -> dict[str, Operand]:
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


def _ffn_flops(shape: Shape, options: Options) -> int:
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


FFN = Case(
    name="ffn",
    letters=("M", "K", "N"),
    meaning="tokens × d_model × d_ff",
    parameters=frozenset({"w_up", "w_down", "b_up", "b_down", "w_gate", "b_gate"}),
    flags=frozenset({"gated", "bias", "recompute"}),
    grids=(
        Grid(
            name="ffn",
            title="FFN, gelu_tanh, bias",
            options=Options("gelu_tanh", bias=True),
            shapes=(
                (131072, 64, 256),
                (131072, 128, 512),
                (65536, 256, 1024),
                (32768, 512, 2048),
                (16384, 768, 3072),
                (16384, 1024, 4096),
                (8192, 2048, 8192),
                (8192, 4096, 14336),
            ),
            shapes_without_gpu=((1024, 64, 256), (130, 48, 100)),
        ),
        Grid(
            name="ffn_gelu",
            title="FFN, gelu (erf), bias",
            options=Options("gelu", bias=True),
            shapes=((131072, 128, 512),),
            shapes_without_gpu=((130, 48, 100),),
        ),
        Grid(
            name="gated_ffn",
            title="Gated FFN, silu, no bias",
            options=Options("silu", gated=True),
            shapes=(
                (65536, 256, 768),
                (32768, 512, 1408),
                (16384, 1024, 2816),
                (8192, 2048, 5632),
                (8192, 4096, 14336),
            ),
            shapes_without_gpu=((1024, 64, 192), (130, 48, 100)),
        ),
    ),
    operands=_ffn_operands,
    forward_flops=_ffn_flops,
    ours=_ours,
    torch_expression=_theirs,
    operation="ffn",
    our_keywords=lambda options: {**_keywords(options), "recompute": options.recompute},
    torch_keywords=_keywords,
)
