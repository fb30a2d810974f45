"""What the compilers make of the kernels of the loss head: limits, spills, 64-bit offsets, vectors, few variants."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fusedlayers.kernels.tuning.cross_entropy import LogitPipeline
from tests.kernels.test_code_generation import SHARED_LIMITS, compiled, faults
from tests.support.selection import FULL

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

STEP = """
import json
import sys

import code_generation
import torch
from fusedlayers import functional
from fusedlayers.kernels import cross_entropy
from fusedlayers.kernels.tuning.cross_entropy import gradient_tiles, logit_tiles


def step(target, dtype, tokens, vocabulary, name="linear_cross_entropy", **options):
    with code_generation.compiling_for(target) as reports:
        leaf = {"dtype": getattr(torch, dtype), "requires_grad": True}
        tensors = torch.empty(tokens, 64, **leaf), torch.empty(vocabulary, 64, **leaf)
        if options.get("weight"):
            options["weight"] = torch.ones(vocabulary)
        found = getattr(functional, name)(*tensors, torch.zeros(tokens, dtype=torch.int64), **options)
        results = found if isinstance(found, tuple) else (found,)
        torch.autograd.grad(results, tensors, [torch.empty_like(each) for each in results])
    facts = {"dtype": dtype, "width": 64, "gated": False, "tokens": tokens, "vocabulary": vocabulary, "name": name}
    for report in {report["hash"]: report for report in reports if "hash" in report}.values():
        print(json.dumps(report | facts))
    for report in reports:
        if "error" in report:
            print(json.dumps(report | facts))


def statistics(target, dtype, sizes, sm90, bias=False, entropy=False, argmax=False, weight=False, **options):
    M, K, V = sizes
    dtype = getattr(torch, dtype)
    bits = 8 * dtype.itemsize
    tiles = logit_tiles(target, bits, 132, sm90)
    tensors = torch.empty(M, K, dtype=dtype), torch.empty(V, K, dtype=dtype)
    bias = torch.empty(V, dtype=dtype) if bias else None
    weight, found = torch.ones(V) if weight else None, torch.empty(4, M)
    arithmetic = cross_entropy.LossArithmetic(-100, "exact" if bits == 32 else "half", **options)
    with code_generation.compiling_for(target, sm90=sm90) as reports:
        cross_entropy.losses_of_product(
            *tensors, bias, torch.zeros(M, dtype=torch.int64), weight, weight if weight is None else weight.sum(),
            arithmetic, "ieee", tiles, 4, loss=found[0], entropy=found[1] if entropy else None, statistics=found[2:],
            argmax=torch.empty(M, dtype=torch.int64) if argmax else None,
        )
    facts = {"dtype": str(dtype).removeprefix("torch."), "width": K, "gated": False, "vocabulary": V}
    for report in reports:
        print(json.dumps(report | facts | {"entropy": entropy}))


def gradient(target, dtype, sizes, sm90, bias=False, weight=False, entropy=False, **options):
    M, K, V = sizes
    dtype = getattr(torch, dtype)
    bits = 8 * dtype.itemsize
    tiles = gradient_tiles(target, bits, 132, sm90)
    tensors = torch.empty(M, K, dtype=dtype), torch.empty(V, K, dtype=dtype)
    bias, weight = torch.empty(V, dtype=dtype) if bias else None, torch.ones(V) if weight else None
    classes, statistics = torch.zeros(M, dtype=torch.int64), torch.empty(2, M)
    arithmetic = cross_entropy.LossArithmetic(-100, "exact" if bits == 32 else "half", **options)
    with code_generation.compiling_for(target, sm90=sm90) as reports:
        factors = cross_entropy.row_factors(
            classes, weight, None if weight is None else weight.sum(), V, arithmetic, statistics, torch.empty(M),
            *([torch.empty(M)] * 2 if entropy else []),
        )
        cross_entropy.gradient_of_product(
            *tensors, bias, classes, weight, statistics[0], factors, 4096, arithmetic, "ieee", tiles,
            out=torch.empty(M, -(-V // 64) * 64, dtype=dtype),
        )
    facts = {"dtype": str(dtype).removeprefix("torch."), "width": K, "gated": False, "vocabulary": V}
    for report in reports:
        print(json.dumps(report | facts))


EVERYTHING = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4, "weight": True}
"""
OPTIONS = """
for dtype in ("bfloat16", "float16", "float32"):
    for vocabulary in map(int, sys.argv[1:] if dtype == "bfloat16" else sys.argv[2:3]):
        step("sm_90", dtype, 300, vocabulary)
        step("sm_90", dtype, 300, vocabulary, **EVERYTHING)
        step("sm_90", dtype, 300, vocabulary, reduction="none", **EVERYTHING)
        step("sm_90", dtype, 300, vocabulary, "linear_log_probs", return_entropy=True)
"""
# Kernels of losses of single tokens, for which no logits are in memory.
WITHOUT_LOGITS = {"statistics", "combined_losses", "row_factors", "logit_gradient"}
ON_HOPPER = """
ALL = {"bias": True, "entropy": True, "label_smoothing": 0.1, "softcap": 30.0, "logit_scale": 0.5}
statistics("sm_90", "bfloat16", (8192, 4096, 128256), True)
statistics("sm_90", "bfloat16", (8192, 4096, 128256), True, entropy=True)
statistics("sm_90", "float16", (1003, 776, 50257), True, bias=True)
statistics("sm_90", "bfloat16", (1003, 776, 50257), True, **ALL)
statistics("sm_90", "bfloat16", (1, 16, 100), True)
statistics("sm_90", "bfloat16", (8192, 4096, 151936), True, entropy=True, argmax=True)
statistics("sm_90", "float16", (1003, 776, 50257), True, bias=True, entropy=True, argmax=True, softcap=30.0)
"""
GRADIENTS_ON_HOPPER = """
gradient("sm_90", "bfloat16", (8192, 4096, 4096), True)
gradient("sm_90", "float16", (1003, 776, 1105), True, bias=True)
gradient("sm_90", "bfloat16", (8192, 4096, 4096), True, bias=True, logit_scale=0.5, entropy=True)
gradient("sm_90", "bfloat16", (1003, 776, 4096), True, softcap=30.0, entropy=True)
gradient("sm_90", "bfloat16", (1003, 776, 4096), True, bias=True, logit_scale=0.5, **EVERYTHING)
gradient("sm_90", "bfloat16", (1, 16, 100), True)
"""
GENERIC = """
for target in sys.argv[1:]:
    for dtype in ("bfloat16", "float32"):
        statistics(target, dtype, (8192, 4096, 128256), False)
        statistics(target, dtype, (1003, 768, 50257), False, entropy=True, argmax=True)
        statistics(target, dtype, (1003, 768, 50257), False, bias=True, entropy=True, **EVERYTHING)
        gradient(target, dtype, (8192, 4096, 4096), False)
        gradient(target, dtype, (8192, 4096, 4096), False, softcap=30.0, entropy=True)
        gradient(target, dtype, (1003, 768, 1105), False, bias=True, **EVERYTHING)
statistics("sm_90", "bfloat16", (1003, 768, 50257), True, **EVERYTHING)
"""
TARGETS = """
for target in sys.argv[1:]:
    for dtype in ("bfloat16", "float32"):
        step(target, dtype, 300, 50257, reduction="none", **EVERYTHING)
        step(target, dtype, 300, 50257)
"""
VARIANTS = """
for tokens in (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 127, 128, 255, 512, 777, 1024, 2048, 3000, 4096):
    step("sm_90", "bfloat16", tokens, 50257)
    step("sm_90", "bfloat16", tokens, 50257, "linear_log_probs")
"""


def reports(folder: Path, script: str, *arguments: str) -> list[dict[str, Any]]:
    (folder / "step.py").write_text(STEP + script)
    return compiled(folder, "step.py", *arguments)


def test_every_option_on_hopper(tmp_path: Path) -> None:
    """No spills; logits are read and written in whole vectors whatever the vocabulary."""
    sizes = (1003, 50257, *((100, 128256) if FULL else ()))
    found = reports(tmp_path, OPTIONS, *map(str, sizes))
    assert {report["kernel"] for report in found} == {"losses", "scaled"} | WITHOUT_LOGITS
    assert {report["vocabulary"] for report in found} == set(sizes)
    for report in found:
        assert not faults(report), (report["kernel"], report["dtype"], report["vocabulary"], faults(report))
        # Of a loss with its gradient the logits are read twice and written once; whether it is wanted, the launch says.
        passes = {"losses": 3, "scaled": 1}.get(report["kernel"], 0)
        if report["dtype"] != "float32" and report["vocabulary"] > 1000:
            assert report["vectors"] >= passes, (report["kernel"], report["dtype"], report["vocabulary"])


def test_the_product_without_logits_on_hopper(tmp_path: Path) -> None:
    """Two consumers with whole instructions of 256 columns, no spills, and no products that wait for one another."""
    found = reports(tmp_path, ON_HOPPER)
    for report in found:
        assert not faults(report), (report["dtype"], report["vocabulary"], faults(report))
    sm90 = [report for report in found if report["kernel"] == "sm90_statistics"]
    assert len(sm90) == 7
    assert len(found) == 14, "what is combined"
    for report in sm90:
        config = LogitPipeline()
        assert report["wgmma"] == 2 * config.step // 16
        assert ("spread_ptr" in report["pointers"]) == report["entropy"]
    assert sum("index_ptr" in report["pointers"] for report in sm90) == 2


def test_the_gradient_of_some_columns_on_hopper(tmp_path: Path) -> None:
    """The same product, with a softcap, smoothing and class weights in its epilogue, too."""
    found = reports(tmp_path, GRADIENTS_ON_HOPPER)
    for report in found:
        assert not faults(report), (report["kernel"], report["dtype"], report["vocabulary"], faults(report))
    sm90 = [report for report in found if report["kernel"] == "sm90_logit_gradient"]
    assert [report["wgmma"] for report in sm90] == [2 * LogitPipeline().step // 16] * 5
    assert len(found) == 12, "factors of rows, and a softcap with entropies"


@pytest.mark.full
def test_the_product_without_logits_elsewhere(tmp_path: Path) -> None:
    targets = tuple(SHARED_LIMITS) if FULL else ("sm_80", "sm_90", "gfx942")
    found = reports(tmp_path, GENERIC, *targets)
    for report in found:
        assert not faults(report), (report["target"], report["kernel"], report["dtype"], faults(report))
    kernels = [report["kernel"] for report in found]
    # Weights of a tile's columns have no registers beside two consumers' sums.
    assert set(kernels) == {"statistics", "combined_losses", "logit_gradient", "row_factors"}
    assert kernels.count("statistics") == 6 * len(targets) + 1
    assert kernels.count("logit_gradient") == 6 * len(targets)


@pytest.mark.full
def test_every_other_gpu(tmp_path: Path) -> None:
    targets = [target for target in SHARED_LIMITS if target != "sm_90"]
    found = reports(tmp_path, TARGETS, *targets)
    kernels = {"losses", "scaled"} | WITHOUT_LOGITS
    assert {(report["target"], report["kernel"]) for report in found} == {(t, k) for t in targets for k in kernels}
    for report in found:
        assert not faults(report), (report["target"], report["kernel"], report["dtype"], faults(report))


@pytest.mark.full
def test_few_variants_for_many_tokens(tmp_path: Path) -> None:
    variants: dict[tuple[str, str], set[str]] = defaultdict(set)
    tokens: dict[str, set[int]] = defaultdict(set)
    for report in reports(tmp_path, VARIANTS):
        variants[report["name"], report["kernel"]].add(report["hash"])
        tokens[report["kernel"]].add(report["tokens"])
    assert {name for _, name in variants} == {"losses", "scaled"} | WITHOUT_LOGITS
    assert all(each >= {1, 777, 4096} for each in tokens.values())
    for key, found in variants.items():
        assert len(found) <= 3, f"{key} is compiled {len(found)} times"
