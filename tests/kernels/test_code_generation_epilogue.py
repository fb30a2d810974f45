"""What the compilers make of the wide FFN's kernels: both of each kind, in every shipped configuration."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES
from tests.kernels.test_code_generation import COMPILE_ALL, SHARED_LIMITS, compiled, faults

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SM90 = {"sm90_hidden": "hidden", "sm90_epilogue_gradient": "hidden_gradient"}
SUMMING = "sm90_data_gradient"
GENERICS = ("hidden", "hidden_gradient")
TARGETS = tuple(SHARED_LIMITS) if COMPILE_ALL else ("sm_80", "sm_90", "gfx942")
# Bytes, by kernel, gate and activation, where sums and the hidden are wanted, too. The quarters of a tile take turns in
# the same registers, and those that wait are alive: all of these were measured faster than four copies of the code.
DROPPING = {
    "sm90_epilogue_gradient": {
        (True, "gelu"): 304, (True, "gelu_tanh"): 328, (False, "gelu"): 340, (False, "gelu_tanh"): 8,
    },
}  # fmt: skip
SPILLING = {
    # Three registers without a gate of Triton 3.7, where programs stay in a column.
    "sm90_epilogue_gradient": {(False, "gelu_tanh"): 12, (True, "gelu_tanh"): 16, (True, "gelu"): 116},
    "hidden_gradient": {(False, "gelu_tanh"): 320, (True, "gelu_tanh"): 160},
}

STEP = """
import json
from dataclasses import replace

import torch
from code_generation import compiling_for
from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.dropout import NO_DROPOUT, Dropout
from fusedlayers.kernels.gemm_epilogue import LowRank
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import EPILOGUE_ELEMENTS, EPILOGUE_PIPELINES, epilogue_tiles


def matrix(rows, columns, dtype, transposed):
    return torch.empty(columns, rows, dtype=dtype).T if transposed else torch.empty(rows, columns, dtype=dtype)


def compile_all(
    target, dtype, sizes, sm90, variants, activation, accuracy, dropping=False, stays=False, transposed=False,
    rank=0, adding=False, torch_multiplies=False,
):
    M, K, N, O = sizes
    dropout = Dropout(torch.zeros(1, dtype=torch.int64), 0.1) if dropping else NO_DROPOUT
    for gated, bias, more in variants:
        def pipeline(kernel):
            return replace(EPILOGUE_PIPELINES[kernel, gated], stays=stays) if sm90 else None

        tiles = epilogue_tiles(target, 8 * dtype.itemsize, gated, dropping)
        if torch_multiplies:
            tiles = EPILOGUE_ELEMENTS[gated]
        x, dy, z = (torch.empty(s, dtype=dtype) for s in ((M, K), (M, O), (M, N)))
        w, w_down = (matrix(*s, dtype, transposed) for s in ((N, K), (O, N)))
        b = torch.empty(N, dtype=dtype) if bias else None
        joining = [None, None]
        if rank:
            right, left = torch.empty(N, rank, dtype=dtype), torch.empty(M, 32, dtype=dtype)
            joining = [LowRank(left, right, right if gated else None, 16), LowRank(left, right.T.contiguous())]
        rest = (Arithmetic(activation, accuracy, "ieee"), tiles)
        with compiling_for(target, sm90=sm90) as reports:
            kernels.hidden(
                x, w, b, w if gated else None, b if gated else None, more, *rest, pipeline("hidden"), dropout,
                low_rank=joining[0],
            )
            kernels.hidden_gradient(
                dy, w_down, z, z if gated else None, bias, 1, *rest, pipeline("hidden_gradient"),
                keep_hidden=more, for_products=True, dropout=dropout, low_rank=joining[1],
                added=z if adding else None,
            )
        for report in reports:
            report |= {"dtype": str(dtype).removeprefix("torch."), "width": K, "gated": gated, "dropout": dropping}
            report |= {"transposed": transposed, "rank": rank, "adding": adding}
            print(json.dumps(report | {"bias": bias, "more": more, "activation": activation}), flush=True)


def compile_sums(dtype, sizes, gates=(False, True), transposed=False):
    M, N, K = sizes
    d_pre, weight, dx = torch.empty(M, N, dtype=dtype), matrix(N, K, dtype, transposed), torch.empty(M, K, dtype=dtype)
    total = torch.empty(M, K)
    for gated in gates:
        for first, last in ((True, False), (False, False), (False, True)):
            with compiling_for("sm_90", sm90=True) as reports:
                terms, pipeline = [(d_pre, weight)] * (1 + gated), EPILOGUE_PIPELINES["data_gradient", gated]
                assert kernels.data_gradient(terms, dx, total, first, last, pipeline)
            for report in reports:
                report |= {"dtype": str(dtype).removeprefix("torch."), "width": K, "gated": gated, "dropout": False}
                report |= {"bias": False, "more": False, "activation": "", "first": first, "last": last}
                print(json.dumps(report), flush=True)


EVERYTHING = [(gated, *both) for gated in (False, True) for both in ((False, False), (True, True))]
COSTLIEST = [(gated, True, True) for gated in (False, True)]
"""

ON_HOPPER = """
compile_all("sm_90", torch.bfloat16, (4096, 512, 2048, 512), True, EVERYTHING, "gelu_tanh", "coarse")
compile_all("sm_90", torch.float16, (4099, 520, 1032, 776), True, COSTLIEST, "gelu", "half")
compile_all("sm_90", torch.bfloat16, (4096, 512, 2048, 512), True, COSTLIEST, "gelu_tanh", "coarse", True)
compile_all("sm_90", torch.float16, (4099, 520, 1032, 776), True, COSTLIEST, "gelu", "half", True)
compile_all("sm_90", torch.bfloat16, (4096, 512, 2048, 512), True, COSTLIEST[:1], "gelu_tanh", "coarse", stays=True)
compile_all("sm_90", torch.float16, (4099, 520, 1032, 776), True, COSTLIEST[:1], "gelu", "half", True, stays=True)
compile_all("sm_90", torch.bfloat16, (4096, 512, 2048, 512), True, COSTLIEST, "gelu_tanh", "coarse", transposed=True)
compile_all("sm_90", torch.bfloat16, (4096, 512, 2048, 512), True, COSTLIEST, "gelu_tanh", "coarse", rank=16)
compile_all("sm_90", torch.float16, (4099, 520, 1032, 776), True, COSTLIEST, "gelu", "half", transposed=True, rank=12)
compile_all("sm_90", torch.bfloat16, (4096, 512, 2048, 512), True, COSTLIEST, "gelu_tanh", "coarse", adding=True)
"""

TORCH_MULTIPLIES = """
for options in ({}, {"dropping": True}):
    arguments = {"torch_multiplies": True, **options}
    compile_all("sm_90", torch.bfloat16, (4096, 616, 2136, 616), False, EVERYTHING, "gelu_tanh", "coarse", **arguments)
    compile_all("sm_90", torch.float16, (4099, 616, 1032, 616), False, COSTLIEST, "gelu", "half", **arguments)
"""

GENERIC = """
import sys

for target in sys.argv[1:]:
    on_hopper = target == "sm_90"
    accuracy = "coarse" if target.startswith("sm_") else "half"
    variants = EVERYTHING if on_hopper else COSTLIEST
    compile_all(target, torch.bfloat16, (4096, 512, 2048, 512), False, variants, "gelu_tanh", accuracy)
    if on_hopper:
        compile_all(target, torch.float16, (4099, 517, 1029, 515), False, COSTLIEST, "gelu", "half")
    compile_all(target, torch.bfloat16, (4096, 512, 2048, 512), False, COSTLIEST, "gelu_tanh", accuracy, True)
    compile_all(target, torch.float32, (4099, 517, 1029, 515), False, COSTLIEST, "gelu", "exact", True)
"""


def spilled(report: dict[str, Any]) -> int:
    """Bytes that a kernel is known to spill, outside of the loop over its products: at most these.

    Pre-activations, their slopes and the gradients of a tile are alive at once in an epilogue.
    """
    if report["target"] != "sm_90" or report["kernel"] not in SPILLING or not report["more"]:
        return 0
    known = DROPPING if report["dropout"] else SPILLING
    return known.get(report["kernel"], {}).get((report["gated"], report["activation"]), 0)


def red(reports: list[dict[str, Any]]) -> list[str]:
    found = []
    for report in reports:
        tolerated = "error" not in report and report["spill_bytes"] <= spilled(report) and not report["loop_spills"]
        judged = report | {"spill_bytes": 0} if tolerated else report
        flags = [name for name in ("gated", "bias", "more", "dropout") if report[name]]
        words = " ".join([report["target"], report["kernel"], report["dtype"], report["activation"], *flags])
        found += [f"{words}: {fault}" for fault in faults(judged)]
    return found


def test_sm90_kernels(tmp_path: Path) -> None:
    """No serialised products, rings that fit, and no spills but for the one that is named."""
    found = [report for report in compiled(tmp_path, STEP + ON_HOPPER) if report["kernel"] != "reduce_partials"]
    assert not red(found), "\n".join(red(found))
    kinds = {(report["kernel"], report["gated"], report["bias"], report["more"]) for report in found}
    assert kinds == {(kernel, gated, both, both) for kernel in SM90 for gated in (0, 1) for both in (0, 1)}
    stays = [report["constants"]["SUMS_STAY"] for report in found if report["kernel"] == "sm90_epilogue_gradient"]
    assert stays.count(True) == 2
    for report in found:
        # Two instructions for each 16 of the inner axis, one for each half of the rows.
        assert report["wgmma"] >= 2 * EPILOGUE_PIPELINES[SM90[report["kernel"]], report["gated"]].step // 16
        assert ("seed_ptr" in report["pointers"]) == report["dropout"]
        assert ("added_ptr" in report["pointers"]) == (report["adding"] and "gradient" in report["kernel"])
        assert ("sums_ptr" in report["pointers"]) == (report["bias"] and "gradient" in report["kernel"])


def test_generic_kernels(tmp_path: Path) -> None:
    reports = compiled(tmp_path, STEP + GENERIC, *TARGETS)
    found = [report for report in reports if report["kernel"] != "reduce_partials"]
    assert not red(found), "\n".join(red(found))
    kinds = {(report["target"], report["kernel"], report["gated"]) for report in found}
    assert kinds == {(target, kernel, gated) for target in TARGETS for kernel in GENERICS for gated in (0, 1)}


def test_what_follows_products_of_torch(tmp_path: Path) -> None:
    """Elements and sums alone: no product, and no register spilled."""
    found = [report for report in compiled(tmp_path, STEP + TORCH_MULTIPLIES) if report["kernel"] != "reduce_partials"]
    assert not red(found), "\n".join(red(found))
    assert {report["kernel"] for report in found} == set(GENERICS)
    for report in found:
        assert (report["products"], report["spill_bytes"]) == (0, 0), report


SUMS = """
compile_sums(torch.bfloat16, (8192, 1024, 2048))
compile_sums(torch.float16, (8195, 1032, 520), gates=(False,))
compile_sums(torch.bfloat16, (8192, 1024, 2048), transposed=True)
"""


def test_kernels_that_add_to_a_sum(tmp_path: Path) -> None:
    found = compiled(tmp_path, STEP + SUMS)
    assert not red(found), "\n".join(red(found))
    kinds = {(report["kernel"], report["gated"], report["first"], report["last"]) for report in found}
    steps = ((True, False), (False, False), (False, True))
    assert kinds == {(SUMMING, gated, *step) for gated in (False, True) for step in steps}
    for report in found:
        assert report["wgmma"] >= 2 * EPILOGUE_PIPELINES["data_gradient", report["gated"]].step // 16


def test_the_lint_still_sees_what_is_not_named() -> None:
    report = {
        "target": "sm_90", "kernel": "sm90_epilogue_gradient", "dtype": "bfloat16", "width": 512, "gated": False,
        "bias": True, "more": True, "dropout": False, "activation": "gelu_tanh", "shared": 0, "int32_products": [],
        "scalar_products": 0, "triton": "3.7.1",
        "products": 1, "matrix_instructions": 8, "spill_bytes": 12, "loop_spills": 0, "serialised": False, "tf32": 0,
    }  # fmt: skip
    assert not red([report])
    for change in (
        {"spill_bytes": 13},
        {"loop_spills": 1},
        {"activation": "silu"},
        {"gated": True, "spill_bytes": 17},
        {"more": False},
        {"dropout": True, "activation": "gelu", "spill_bytes": 341},
        {"serialised": True},
        {"error": "PTXASError"},
    ):
        assert len(red([report | change])) == 1, change


VARIANTS = """
for sm90 in (False, True):
    for rows in (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 127, 128, 255, 512, 777, 1024, 2048, 3000, 4096):
        compile_all("sm_90", torch.bfloat16, (rows, 512, 1024, 512), sm90, COSTLIEST[:1], "silu", "coarse")
"""


def test_few_variants_for_many_row_counts(tmp_path: Path) -> None:
    variants = defaultdict(set)
    for report in compiled(tmp_path, STEP + VARIANTS):
        variants[report["kernel"]].add(report["hash"])
    assert variants.keys() == {*SM90, *GENERICS, "reduce_partials"}
    for kernel, hashes in variants.items():
        assert len(hashes) <= 3, f"{kernel} is compiled {len(hashes)} times"
