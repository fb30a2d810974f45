"""Experts: the feed-forward blocks of a mixture, each token through a few of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ... import functional, reference
from ...functional.moe_ffn.grouped import grouped_product
from ...kernels.tuning.dtypes import GENERIC
from ...kernels.tuning.grouped_gemm import BLOCKS
from ...planning import Device
from .case import DTYPES, Case, Grid, Operand, Options, Shape
from .trial import Trial

_SHAPES = ((16384, 2048, 768, 128, 8), (8192, 4096, 14336, 8, 2), (16384, 1024, 512, 64, 6))
# Of the trials, width, hidden units, experts and experts of a token: whole tiles, and tails in all of them.
_WHOLE, _RAGGED = (256, 128, 4, 2), (200, 72, 5, 3)


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    tokens, width, hidden, experts, k = shape
    first, second = width**-0.5, hidden**-0.5
    rows = 2 * hidden if options.gated else hidden
    operands = {
        "x": Operand((tokens, width)),
        "top_k_index": Operand((tokens, k), classes=experts, skewed=options.skewed),
        "top_k_weights": Operand((tokens, k), 1 / k),
        "w_up": Operand((experts, rows, width), first),
        "w_down": Operand((experts, width, hidden), second),
    }
    if options.bias:
        operands |= {"b_up": Operand((experts, rows)), "b_down": Operand((experts, width))}
    return operands


def _flops(shape: Shape, options: Options) -> int:
    tokens, width, hidden, _, k = shape
    return 2 * tokens * k * width * hidden * (3 if options.gated else 2)


def _keywords(options: Options) -> dict[str, object]:
    """Gate and up are merged as in the models of transformers."""
    return {"activation": options.activation, "gate_and_up": "concatenated" if options.gated else "separate"}


def _least_rows(shape: Shape, options: Options) -> int:
    """The rows of the expert with the fewest."""
    tokens, _, _, experts, k = shape
    least = 1 / experts
    if options.skewed:
        least /= sum(1 / place for place in range(1, experts + 1))
    return max(1, int(tokens * k * least))


def _as_in_models(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: str,
    gate_and_up: str,
) -> Tensor:
    """The experts as models run them through torch's grouped products; every index is an expert."""
    k = top_k_index.shape[-1]
    keys, order = top_k_index.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(w_up.shape[0], device=x.device), right=True).to(torch.int32)
    projected = grouped_product(x[order // k], w_up.mT, ends)
    if b_up is not None:
        projected = projected + b_up[keys]
    up, gate = reference.split_gate_and_up(projected, gate_and_up)
    found = grouped_product(reference.hidden(up, gate, activation=activation), w_down.mT, ends)
    if b_down is not None:
        found = found + b_down[keys]
    found = found * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
    return found[back].view(x.shape[0], k, -1).sum(1).to(x.dtype)


def _trials(device: Device) -> Iterator[Trial]:
    for gated in (False, True):
        relu, plain = (Options(activation, gated=gated, bias=True) for activation in ("relu", "identity"))
        for machine in ("few", "all", "recomputing", "generic") if device.backend != GENERIC else ("generic",):
            for dtype in ("bf16", "fp16") if machine != "generic" else DTYPES:
                yield Trial("moe_ffn", plain, (300, *_WHOLE), dtype, machine)
                yield Trial("moe_ffn", relu, (301, *_RAGGED), dtype, machine)
        # Without a backward pass rows are in smaller blocks: as many rows for each expert, or a few more.
        for block in BLOCKS:
            for dtype in DTYPES:
                for options, (*sizes, experts, k) in ((plain, _WHOLE), (relu, _RAGGED)):
                    tokens = block * experts // k
                    yield Trial("moe_ffn", options, (tokens, *sizes, experts, k), dtype, "all", backward=False)


CASE = Case(
    name="moe_ffn",
    operation="moe_ffn",
    place=11,
    letters=("M", "K", "N", "E", "k"),
    meaning="tokens × d_model × d_ff × experts × experts of a token",
    grids=(
        Grid(
            "moe_ffn", "Experts", Options("silu", gated=True), (*_SHAPES, (64, 2048, 768, 128, 8)),
            ((40, 24, 40, 5, 2), (17, 16, 24, 4, 3)),
        ),
        Grid(
            "moe_ffn_skewed", "Experts whose tokens follow Zipf's law", Options("silu", gated=True, skewed=True),
            _SHAPES, ((40, 24, 40, 5, 2),),
        ),
    ),
    flags=frozenset({"recompute", "skewed"}),
    operands=_operands,
    parameters=frozenset({"w_up", "w_down", "b_up", "b_down"}),
    keywords=_keywords,
    ours=functional.moe_ffn,
    torch_expression=_as_in_models,
    forward_flops=_flops,
    # As long as few rows of an expert decide them, torch's error is small by chance in one or two of some 100,000 tiles
    # of a gradient.
    draws=8,
    independent=_least_rows,
    trials=_trials,
    few_trials=(
        Trial("moe_ffn", Options("relu", gated=True, bias=True), (20, 24, 20, 3, 2), "fp16"),
        Trial("moe_ffn", Options("identity"), (17, 16, 24, 4, 3), "fp32", "recomputing"),
        Trial("moe_ffn", Options("relu", gated=True), (9, 40, 36, 4, 1), "fp16", backward=False),
    ),
)  # fmt: skip
