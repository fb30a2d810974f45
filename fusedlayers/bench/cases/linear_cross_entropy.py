"""The loss head: cross-entropy of a linear layer's classes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ... import functional, reference
from ...planning import Device
from .case import DTYPES, Case, Draw, Grid, Operand, Options, Shape
from .trial import Trial

# Vocabularies of the trials: one for every width of a block of columns, whole and ragged.
VOCABULARIES = (100, 128, 250, 300, 1000, 1500, 4096, 5003)
TOKENS, WIDTH = 300, 64
# Logits of integers, each this far from the next one: of every token one class has all of the probability.
SHARPENED = 1024.0


def _operands(shape: Shape, options: Options) -> dict[str, Operand]:
    """The input, the weight and the target of the loss head."""
    tokens, width, vocabulary = shape
    return {
        "input": Operand((tokens, width)),
        "linear_weight": Operand((vocabulary, width), width**-0.5),
        "target": Operand((tokens,), classes=vocabulary),
    }


def _keywords(options: Options) -> dict[str, object]:
    """``op`` is the reduction, "mean" in benchmarks; those of integers have the others, and sharp logits."""
    return {"reduction": options.op} | ({} if options.op == "mean" else {"logit_scale": SHARPENED})


@dataclass(frozen=True, kw_only=True)
class HeadCase(Case):
    """What the operations of a loss head share; integers whose logits have one largest class in every row."""

    letters: tuple[str, ...] = ("M", "K", "V")
    meaning: str = "tokens × width × vocabulary"
    parameters: frozenset[str] = frozenset({"linear_weight"})
    flags: frozenset[str] = frozenset({"recompute"})
    operands: Callable[[Shape, Options], dict[str, Operand]] = _operands
    result_dtype: torch.dtype | None = torch.float32
    has_activation: bool = False
    draws: int = 3  # few tokens decide a tile of dW: those whose target or likeliest class is there

    def inputs(self, shape: Shape, options: Options, draw: Draw) -> dict[str, Tensor]:
        """Fresh random inputs by name; of integers most targets are the largest class, so that losses stay small."""
        found = super().inputs(shape, options, draw)
        if draw.init != "integer":
            return found
        weight, target = found["linear_weight"].double(), found["target"]
        drawn = found["input"]
        for attempt in range(1, 33):
            top = (drawn.double() @ weight.T).topk(min(2, weight.shape[0]), dim=1)
            tied = top.values[:, 0] == top.values[:, -1]
            if not tied.any() or weight.shape[0] == 1:
                break
            again = super().inputs(shape, options, draw.another(1000 * attempt))
            drawn = torch.where(tied[:, None], again["input"], drawn)
        some = torch.arange(len(target), device=draw.device) % 8 == 0
        return found | {"input": drawn, "target": torch.where(some, target, top.indices[:, 0])}


# Bytes of logits that torch's expression has in one tensor while results are verified.
_SLICE_BYTES = 2**33


def _in_slices(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str, **options: Any) -> Tensor:
    """torch's loss of all tokens, some of them at a time where all of their logits would not fit."""
    logits_bytes = input.shape[0] * linear_weight.shape[0] * input.element_size()
    if logits_bytes <= _SLICE_BYTES or reduction == "none":
        return reference.linear_cross_entropy(input, linear_weight, target, reduction=reduction, **options)
    loss = functools.partial(reference.linear_cross_entropy, reduction="sum", **options)
    slices = -(-logits_bytes // _SLICE_BYTES)
    parts = zip(input.chunk(slices), target.chunk(slices), strict=True)
    total = sum(checkpoint(loss, part, linear_weight, classes, use_reentrant=False) for part, classes in parts)
    return total / len(target) if reduction == "mean" else total


def _trials(device: Device) -> Iterator[Trial]:
    for vocabulary in VOCABULARIES:
        for dtype in DTYPES:
            yield Trial("linear_cross_entropy", Options(op="sum"), (TOKENS, WIDTH, vocabulary), dtype)
    # Without gradients: one step of the inner axis, and more than the stages of a ring.
    for sizes in ((TOKENS, WIDTH, 250), (TOKENS, 5 * WIDTH, 1000)):
        for machine in ("few", "all", "generic"):
            for dtype in DTYPES if machine == "all" else ("bf16", "fp16"):
                yield Trial("linear_cross_entropy", Options(op="none"), sizes, dtype, machine, backward=False)
    # Several chunks, whose weight gradients are added up in float32; and in the backward pass.
    for dtype in ("bf16", "fp16"):
        for op in ("sum", "none"):
            yield Trial("linear_cross_entropy", Options(op=op), (TOKENS, WIDTH, 5003), dtype, "in chunks")
    # The gradient of all classes at once, in few steps of the inner axis and in many, and that of some of them.
    for sizes in ((TOKENS, WIDTH, 250), (TOKENS, 5 * WIDTH, 1000)):
        for machine in ("recomputing", "recomputing, all"):
            for dtype in DTYPES if machine == "recomputing, all" else ("bf16", "fp16"):
                yield Trial("linear_cross_entropy", Options(op="sum"), sizes, dtype, machine)
    for machine in ("in chunks, recomputing", "in chunks, recomputing, generic"):
        for dtype, op in (("bf16", "none"), ("fp16", "sum")):
            yield Trial("linear_cross_entropy", Options(op=op), (TOKENS, WIDTH, 5003), dtype, machine)


CASE = HeadCase(
    name="linear_cross_entropy",
    operation="linear_cross_entropy",
    place=9,
    grids=(
        Grid(
            "linear_cross_entropy", "Loss head", Options(op="mean"),
            ((8192, 4096, 128256), (16384, 2048, 32000), (16384, 768, 50257), (65536, 2048, 128256)),
            ((40, 24, 300), (17, 16, 129)),
        ),
    ),
    keywords=_keywords,
    ours=functional.linear_cross_entropy,
    torch_expression=reference.linear_cross_entropy,
    yardstick=_in_slices,
    trials=_trials,
    few_trials=(
        Trial("linear_cross_entropy", Options(op="sum"), (40, 24, 300), "fp16"),
        Trial("linear_cross_entropy", Options(op="none"), (17, 16, 129), "fp32"),
        Trial("linear_cross_entropy", Options(op="sum"), (40, 40, 129), "fp16", backward=False),
        Trial("linear_cross_entropy", Options(op="sum"), (40, 24, 129), "fp16", "recomputing, all"),
    ),
)  # fmt: skip
