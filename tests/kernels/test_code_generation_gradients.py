"""What the compilers make of the kernels that give the gradients of one layer."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest

from tests.kernels.test_code_generation import SHARED_LIMITS, compiled, faults

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

GENERIC, SM90 = "weight_and_bias_gradient", "sm90_weight_and_bias_gradient"
HIDDEN = "hidden_gradient"

EVERY_PIPELINE = """
import json

import torch
from code_generation import compiling_for
from fusedlayers.kernels.tuning import PIPELINES
from fusedlayers.kernels.tuning.grouped_gemm import product_tiles
from fusedlayers.kernels.weight_gradient import weight_gradient

tiles = product_tiles("sm_90", 16)
# Of every pipeline each bias with each number of splits, half of them in either dtype.
for dtype, (M, O, K), biased_splits in (
    (torch.bfloat16, (4096, 1024, 512), 4), (torch.float16, (4099, 1000, 520), 1)
):
    for pipeline in PIPELINES:
        for bias, splits in ((True, biased_splits), (False, 5 - biased_splits)):
            with compiling_for("sm_90", sm90=True) as reports:
                dy, x = torch.empty(M, O, dtype=dtype), torch.empty(M, K, dtype=dtype)
                weight_gradient(dy, x, bias, splits, "ieee", tiles, pipeline)
            for report in reports:
                report |= {"dtype": str(dtype).removeprefix("torch."), "width": 0, "gated": False}
                print(json.dumps(report | {"pipeline": pipeline.tile, "bias": bias, "splits": splits}))
"""


def test_sm90_kernels(tmp_path: Path) -> None:
    """No spills, no serialised products, and rings that fit."""
    found = [report for report in compiled(tmp_path, EVERY_PIPELINE) if report["kernel"] != "reduce_partials"]
    assert len(found) == 2 * 3 * 2
    assert len({(*report["pipeline"], report["bias"], report["splits"]) for report in found}) == 3 * 2 * 2
    assert {report["kernel"] for report in found} == {SM90}
    for report in found:
        assert not faults(report), (report["pipeline"], report["bias"], faults(report))
        assert report["wgmma"] >= 8


GENERIC_ON = """
import json
import sys

import torch
from code_generation import compiling_for
from fusedlayers import functional

for target in sys.argv[1:]:
    for dtype, sizes in ((torch.bfloat16, (4096, 1024, 512)), (torch.float32, (4099, 997, 515))):
        for M, O, K in (sizes,):
            with compiling_for(target) as reports:
                functional.weight_gradient(torch.empty(M, O, dtype=dtype), torch.empty(M, K, dtype=dtype))
                dy, w_down = torch.empty(M, O, dtype=dtype), torch.empty(O, K, dtype=dtype)
                z, gate = torch.empty(M, K, dtype=dtype), torch.empty(M, K, dtype=dtype)
                functional.hidden_gradient(dy, w_down, z, activation="gelu_tanh")
                functional.hidden_gradient(dy, w_down, z, gate, activation="gelu")
            for report in reports:
                report |= {"dtype": str(dtype).removeprefix("torch."), "width": 0, "gated": False}
                print(json.dumps(report))
"""


def test_the_generic_kernels(tmp_path: Path) -> None:
    found = compiled(tmp_path, GENERIC_ON, *SHARED_LIMITS)
    for kernel in (GENERIC, HIDDEN):
        reports = [report for report in found if report["kernel"] == kernel]
        assert {report["target"] for report in reports} == set(SHARED_LIMITS)
        for report in reports:
            assert not faults(report), (kernel, report["target"], report["dtype"], faults(report))


VARIANTS = """
import json

import torch
from code_generation import compiling_for
from fusedlayers import functional

for sm90 in (False, True):
    for rows in (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 127, 128, 255, 512, 777, 1024, 2048, 3000, 4096):
        with compiling_for("sm_90", sm90=sm90) as reports:
            dy, x = (torch.empty(rows, columns, dtype=torch.bfloat16) for columns in (1024, 256))
            functional.weight_gradient(dy, x)
            if not sm90:
                z = torch.empty(rows, 512, dtype=torch.bfloat16)
                functional.hidden_gradient(dy, torch.empty(1024, 512, dtype=torch.bfloat16), z, activation="silu")
        for report in reports:
            print(json.dumps(report))
"""


def test_few_variants_for_many_row_counts(tmp_path: Path) -> None:
    variants = defaultdict(set)
    for report in compiled(tmp_path, VARIANTS):
        variants[report["kernel"]].add(report["hash"])
    assert variants.keys() == {GENERIC, SM90, HIDDEN, "reduce_partials"}
    for kernel, hashes in variants.items():
        assert len(hashes) <= 3, f"{kernel} is compiled {len(hashes)} times"
