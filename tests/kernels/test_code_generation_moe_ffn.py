"""What the compilers make of the kernels for experts: limits, spills, 64-bit offsets, few variants."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest

from tests.kernels.test_code_generation import SHARED_LIMITS, compiled, faults
from tests.support.selection import FULL

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

STEP = """
import json
import sys

import code_generation
import torch
from fusedlayers import functional


def step(target, dtype, sizes, layout="separate", gated=True, bias=False, training=True, sm90=False, **options):
    M, K, N, E, k = sizes
    leaf = {"dtype": getattr(torch, dtype), "requires_grad": training}
    merged = gated and layout != "separate"
    rows = 2 * N if merged else N
    tensors = {"x": torch.empty(M, K, **leaf), "top_k_index": torch.zeros(M, k, dtype=torch.int64)}
    tensors |= {"top_k_weights": torch.empty(M, k, **leaf), "w_up": torch.empty(E, rows, K, **leaf)}
    tensors |= {"w_down": torch.empty(E, K, N, **leaf)}
    if gated and not merged:
        tensors["w_gate"] = torch.empty(E, N, K, **leaf)
    if bias:
        tensors |= {"b_up": torch.empty(E, rows, **leaf), "b_down": torch.empty(E, K, **leaf)}
    with code_generation.compiling_for(target, sm90=sm90) as reports, torch.set_grad_enabled(training):
        y = functional.moe_ffn(**tensors, gate_and_up=layout if merged else "separate", **options)
        if training:
            y.backward(torch.empty_like(y))
    facts = {"dtype": dtype, "width": K, "units": N, "gated": gated, "tokens": M, "limited": "limit" in options}
    for report in reports:
        print(json.dumps(report | facts))


LIMITED = {"activation": "quick_gelu", "limit": 7.0, "up_offset": 1.0}
"""
ON_HOPPER = """
for dtype in ("bfloat16", "float16"):
    step("sm_90", dtype, (16384, 2048, 768, 128, 8), "concatenated", sm90=True)
step("sm_90", "bfloat16", (512, 2880, 2880, 32, 4), "interleaved", bias=True, sm90=True, **LIMITED)
step("sm_90", "bfloat16", (4096, 1024, 512, 64, 6), gated=False, activation="relu2", sm90=True)
step("sm_90", "bfloat16", (4096, 512, 320, 8, 2), gated=False, activation="sigmoid", sm90=True)
"""
GENERIC = """
for target in sys.argv[1:]:
    for dtype in ("bfloat16", "float32"):
        step(target, dtype, (16384, 2048, 768, 128, 8), "concatenated")
        step(target, dtype, (600, 2880, 2880, 32, 4), "interleaved", bias=True, **LIMITED)
        for tokens in (64, 512):
            step(target, dtype, (tokens, 2048, 768, 128, 8), "concatenated", training=False)
"""
VARIANTS = """
for tokens in (1, 2, 3, 7, 15, 16, 17, 31, 64, 100, 128, 255, 777, 1024, 2048, 3000, 4096):
    step("sm_90", "bfloat16", (tokens, 256, 128, 8, 2), sm90=True)
"""
STEPS = {"hidden", "product", "hidden_gradient", "weight_and_bias_gradient"}
SM90 = {
    "sm90_hidden", "sm90_grouped_product", "sm90_epilogue_gradient", "sm90_grouped_weight_gradient"
}  # fmt: skip
SORTING = {"place", "spread", "combine", "score_gradient"}
MANY = {"count", "scan"}


def test_on_hopper(tmp_path: Path) -> None:
    """The warp-specialised kernels: no spills, and no products that wait for one another.

    A limited gate takes more registers than there are in the epilogue of its gradient, and none in the product's loop.
    """
    found = compiled(tmp_path, STEP + ON_HOPPER)
    for report in found:
        if report["limited"] and report["kernel"] == "sm90_epilogue_gradient":
            assert not report["loop_spills"]
            report["spill_bytes"] = 0
        assert not faults(report), (report["kernel"], report["dtype"], faults(report))
        if report["kernel"] == "sm90_epilogue_gradient":
            assert report["constants"]["WHOLE_COLUMNS"] == (report["units"] % 128 == 0)
    assert {report["kernel"] for report in found} == SM90 | SORTING | MANY | {"experts_sums", "order"}


def test_generic(tmp_path: Path) -> None:
    targets = tuple(SHARED_LIMITS) if FULL else ("sm_80", "sm_90", "gfx942")
    found = compiled(tmp_path, STEP + GENERIC, *targets)
    for report in found:
        assert not faults(report), (report["target"], report["kernel"], report["dtype"], faults(report))
    kernels = {(report["target"], report["kernel"]) for report in found}
    assert kernels == {(t, kernel) for t in targets for kernel in STEPS | SORTING | MANY | {"experts_sums"}}
    # As many rows as an expert has when words are generated one by one, and a few more.
    blocks = {report["constants"]["BLOCK_M"] for report in found if report["kernel"] == "hidden"}
    assert {16, 32, 64, 128} >= blocks >= {16, 64}


@pytest.mark.full
def test_few_variants_for_many_tokens(tmp_path: Path) -> None:
    variants: dict[str, set[str]] = defaultdict(set)
    for report in compiled(tmp_path, STEP + VARIANTS):
        variants[report["kernel"]].add(report["hash"])
    assert set(variants) >= SM90 | SORTING
    for kernel, found in variants.items():
        # Spread and combined for two purposes each.
        assert len(found) <= 4, f"{kernel} is compiled {len(found)} times"
