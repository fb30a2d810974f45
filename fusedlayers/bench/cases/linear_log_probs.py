"""Log-probabilities of a linear layer's classes, as reinforcement learning asks for."""

from __future__ import annotations

from collections.abc import Iterator

from ... import functional, reference
from ...planning import Device
from .case import DTYPES, Grid, Options
from .linear_cross_entropy import SHARPENED, TOKENS, VOCABULARIES, WIDTH, HeadCase
from .trial import Trial


def _keywords(options: Options) -> dict[str, object]:
    """Of ``op`` "mean", in benchmarks, with the entropy; of integers this is 0 throughout, and the logits are sharp."""
    return {"return_entropy": True} if options.op == "mean" else {"logit_scale": SHARPENED}


def _trials(device: Device) -> Iterator[Trial]:
    for vocabulary in (VOCABULARIES[0], VOCABULARIES[-1]):
        for dtype in DTYPES:
            yield Trial("linear_log_probs", Options(), (TOKENS, WIDTH, vocabulary), dtype)
            yield Trial("linear_log_probs", Options(), (TOKENS, WIDTH, vocabulary), dtype, backward=False)
    yield Trial("linear_log_probs", Options(), (TOKENS, WIDTH, VOCABULARIES[-1]), "bf16", "recomputing, all")


CASE = HeadCase(
    name="linear_log_probs",
    operation="linear_log_probs",
    place=10,
    grids=(
        Grid(
            "linear_log_probs", "Log-probabilities and entropies", Options(op="mean"),
            ((8192, 4096, 128256), (16384, 2048, 32000)),
            ((40, 24, 300),),
        ),
    ),
    keywords=_keywords,
    ours=functional.linear_log_probs,
    torch_expression=reference.linear_log_probs,
    results=("log_probs", "entropies"),
    trials=_trials,
    few_trials=(Trial("linear_log_probs", Options(), (40, 24, 300), "fp16"),),
)  # fmt: skip
