"""What the compilers make of the split products."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest

from tests.kernels.test_code_generation import SHARED_LIMITS, compiled, faults

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

TILES, ROW = "product", "row_product"

PRODUCTS = """
import json
import sys

import torch
from code_generation import compiling_for
from fusedlayers import functional

SIZES = ((7, 100, 3003), (1, 4096, 4096), (16, 1024, 4096))
for target in sys.argv[1:]:
    for dtype in (torch.bfloat16, torch.float32) if target in ("sm_90", "gfx942") else (torch.bfloat16,):
        for M, N, K in SIZES[:3] if target == "sm_90" else SIZES[1:3]:
            for split_k in (1, "auto") if target == "sm_90" else ("auto",):
                with compiling_for(target) as reports, torch.no_grad():
                    x, w, b = (torch.empty(*shape, dtype=dtype) for shape in ((M, K), (N, K), (N,)))
                    functional.linear(x, w, b, activation="gelu", split_k=split_k)
                for report in reports:
                    report |= {"dtype": str(dtype).removeprefix("torch."), "width": K, "gated": False}
                    print(json.dumps(report))
"""


def test_products_on_every_target(tmp_path: Path) -> None:
    """No spills, no serialised products, matrix instructions where there are any, 64-bit offsets."""
    found = compiled(tmp_path, PRODUCTS, *SHARED_LIMITS)
    assert {report["kernel"] for report in found} == {TILES, ROW, "reduce_partials"}
    for report in found:
        assert not faults(report), (report["target"], report["kernel"], report["tiles"], faults(report))
    for kernel in (TILES, ROW):
        assert {report["target"] for report in found if report["kernel"] == kernel} == set(SHARED_LIMITS)


EVERY_ROW = """
import json

import torch
from code_generation import compiling_for
from fusedlayers.kernels.split_k import product
from fusedlayers.kernels.tuning import split_k, split_tiles

forward = {(tiles, True) for _, _, tiles in split_k.TABLE["sm_90", 16]}
gradient = {(split_tiles("sm_90", 16, rows, columns), False) for rows in (2, 16) for columns in (64, 4096)}
for tiles, contiguous in sorted(forward | gradient, key=str):
    with compiling_for("sm_90") as reports:
        left, right = (torch.empty(rows, 65536, dtype=torch.bfloat16) for rows in (tiles.block_m, 256))
        product(left, right if contiguous else right.T.contiguous().T, None, 4, tiles, dependent=True)
    for report in reports:
        if report["kernel"] != "reduce_partials":
            report |= {"dtype": "bfloat16", "width": 256, "gated": False, "row": str(tiles)}
            print(json.dumps(report))
"""


def test_every_shipped_tile(tmp_path: Path) -> None:
    """For forward products, and for data gradients of few rows, whose right operand lies the other way."""
    found = compiled(tmp_path, EVERY_ROW)
    for report in found:
        assert not faults(report), (report["row"], report["kernel"], faults(report))
        if report["kernel"] == TILES:
            constants = report["constants"]
            first = constants["BLOCK_N" if constants["SWAPPED"] else "BLOCK_M"]
            assert (report["wgmma"] > 0) == (first >= 64), report["row"]
    assert {report["kernel"] for report in found} == {TILES, ROW}


VARIANTS = """
import json

import torch
from code_generation import compiling_for
from fusedlayers import functional

for rows in (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 127, 128, 255, 512, 777, 1024, 2048, 3000, 4096):
    with compiling_for("sm_90") as reports, torch.no_grad():
        x, w = (torch.empty(count, 4096, dtype=torch.bfloat16) for count in (rows, 1024))
        functional.linear(x, w)
    for report in reports:
        print(json.dumps(report))
"""


def test_few_variants_of_each_tile_for_many_row_counts(tmp_path: Path) -> None:
    variants = defaultdict(set)
    for report in compiled(tmp_path, VARIANTS):
        variants[report["kernel"], str(report["tiles"])].add(report["hash"])
    assert {kernel for kernel, _ in variants} >= {TILES, ROW}
    for (kernel, tiles), hashes in variants.items():
        if kernel != "reduce_partials":
            assert len(hashes) <= 3, f"{kernel} with {tiles} is compiled {len(hashes)} times"
