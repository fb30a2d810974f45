"""What the compilers make of the kernels of late interaction: limits, spills, 64-bit offsets, few variants."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest

from tests.kernels.test_code_generation import SHARED_LIMITS, compiled, faults

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

KERNELS = ("scores", "weights", "query_gradient", "document_gradient")

STEP = f"""
KERNELS = {KERNELS}
"""
STEP += """
import json
import sys

import torch
from code_generation import compiling_for
from fusedlayers import functional


def step(target, dtype, sizes, layout="padded"):
    Q, D, LQ, L, width = sizes
    with compiling_for(target, KERNELS) as reports:
        q = torch.empty(Q, LQ, width, dtype=getattr(torch, dtype))
        e = torch.empty(D, L, width, dtype=getattr(torch, dtype))
        extras = {}
        if layout == "masked":
            masks = [torch.ones(*shape, dtype=torch.bool) for shape in ((Q, LQ), (D, L))]
            extras = dict(zip(("query_mask", "document_mask"), masks))
        elif layout == "packed":
            q, e = q.flatten(0, 1), e.flatten(0, 1)
            ends = [torch.arange(count + 1, dtype=torch.int32) * length for count, length in ((Q, LQ), (D, L))]
            extras = dict(zip(("cu_seqlens_queries", "cu_seqlens_documents"), ends))
        scores = functional.maxsim(q.requires_grad_(), e.requires_grad_(), **extras)
        scores.backward(torch.empty_like(scores))
    for report in reports:
        facts = {"dtype": dtype, "width": width, "layout": layout, "sizes": sizes, "gated": False}
        print(json.dumps(report | facts))


"""
LAYOUTS = """
for width in (16, 64, 128, 200):
    for layout in ("padded", "masked", "packed"):
        step("sm_90", "bfloat16", (128, 128, 32, 300, width), layout)
step("sm_90", "float16", (128, 128, 31, 299, 128))
step("sm_90", "float32", (128, 128, 32, 300, 128))
"""
TARGETS = """
for target in sys.argv[1:]:
    for dtype, width in (("bfloat16", 128), ("float16", 40), ("float32", 64)):
        step(target, dtype, (128, 128, 32, 300, width), "packed")
"""
VARIANTS = """
for length in (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 127, 128, 255, 512, 777, 1024, 2048, 3000, 4096):
    step("sm_90", "bfloat16", (40, 24, length, 300, 128))
"""


def test_every_layout_on_hopper(tmp_path: Path) -> None:
    """No spills and no serialised products, whatever masks and offsets add."""
    found = compiled(tmp_path, STEP + LAYOUTS)
    assert len(found) == 14 * len(KERNELS)
    for report in found:
        assert not faults(report), (report["kernel"], report["sizes"], report["layout"], faults(report))
        if report["kernel"] == "document_gradient" and report["dtype"] != "float32" and report["width"] >= 64:
            assert report["wgmma"] >= 4


def test_every_other_gpu(tmp_path: Path) -> None:
    targets = [target for target in SHARED_LIMITS if target != "sm_90"]
    found = compiled(tmp_path, STEP + TARGETS, *targets)
    assert {(report["target"], report["kernel"]) for report in found} == {(t, k) for t in targets for k in KERNELS}
    for report in found:
        assert not faults(report), (report["target"], report["kernel"], report["dtype"], faults(report))


def test_few_variants_for_many_lengths(tmp_path: Path) -> None:
    lengths: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for report in compiled(tmp_path, STEP + VARIANTS):
        lengths[report["kernel"]][report["hash"]].add(report["sizes"][2])
    assert lengths.keys() == set(KERNELS)
    for kernel, variants in lengths.items():
        assert set().union(*variants.values()) >= {1, 777, 4096}, f"{kernel} was not launched at every length"
        assert len(variants) <= 3, f"{kernel} is compiled {len(variants)} times: {list(variants.values())}"
