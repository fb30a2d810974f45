"""What Triton's compilers make of the shipped configurations, on any machine: limits of each GPU, and 64-bit offsets.

The default run compiles every row for sm_90, and the narrowest and the widest elsewhere, if a kernel changed since the
record of ``compilation_record.py`` was made. With ``FUSEDLAYERS_COMPILE_ALL=1`` every width and dtype is compiled for
every GPU, whatever the record says.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fusedlayers.kernels import tuning
from fusedlayers.kernels.device import RELEASE
from tests import compile_server

TESTS = Path(__file__).resolve().parents[1]
COMPILE_ALL = os.environ.get("FUSEDLAYERS_COMPILE_ALL", "0") == "1"
# Bytes of shared memory that one program may use.
SHARED_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx90a": 64 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
KERNELS = {"forward", "data_gradient", "weight_gradient"}
PIPELINED_KERNELS = {f"sm90_{kernel}" for kernel in KERNELS}
STORING_KERNELS = {"sm90_hidden_gradient", "stored_weight_gradient"}
# Weight gradients of several passes, faster than their alternatives without: see the table. A few instructions of a
# loop of several hundred move what they spill.
SPILLING = {("sm90_weight_gradient", gated, width) for gated, width in ((False, 256), (True, 128), (True, 256))}
# With an exact gelu, two registers.
SPILLING |= {("sm90_hidden_gradient", gated, 256) for gated in (False, True)}
MOST_LOOP_SPILLS = 12
# What needs more registers since Triton 3.9, which has another assembler for sm_90: at most so many bytes, and so many
# instructions of a loop that move them.
SPILLING_SINCE_3_9 = {
    "document_gradient": (28, 0),
    "hidden_gradient": (556, 0),
    "logit_gradient": (192, 25),
    "sm90_data_gradient": (524, 51),
    "sm90_epilogue_gradient": (1012, 0),
    "sm90_reduce": (236, 0),
    "sm90_weight_and_bias_gradient": (384, 4),
    "weight_gradient": (304, 17),
}
# The same with any release, of both gradients of a reduction at once with 128 kept rows: at 43 sizes on an H200 a
# training step took 0.62 to 1.14 of the time (median 0.79) of one with two kernels that spill nothing.
SPILLING_OF_128_ROWS = (600, 72)
DTYPES = ("bfloat16", "float16", "float32")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

if COMPILE_ALL:
    SELECTIONS = [("all", target, dtype) for target in SHARED_LIMITS for dtype in DTYPES]
else:
    SELECTIONS = [("rows", "sm_90", "bfloat16"), ("even", "sm_90", "float16"), ("rows", "sm_90", "float32")]
    SELECTIONS += [("ends", target, "bfloat16") for target in SHARED_LIMITS if target != "sm_90"]


def reported(folder: Path, script: str, *arguments: str) -> list[dict[str, Any]]:
    """The reports of a script, a file or its text, that prints them, in a process where the interpreter is off."""
    if "\n" in script:
        (folder / "script.py").write_text(script)
        script = "script.py"
    status, out, errors = compile_server.run(folder, script, *arguments)
    assert status == 0, f"exit status {status}\n{out[-2000:]}\n{errors}"
    return [json.loads(line) for line in out.splitlines()]


def compiled(folder: Path, script: str, *arguments: str) -> list[dict[str, Any]]:
    """The same, of kernels whose copies overtake no product: what that would compute depends on who is faster."""
    reports = reported(folder, script, *arguments)
    assert [report for report in reports if report.get("overwritten")] == []
    return reports


def faults(report: dict[str, Any]) -> list[str]:
    """What a compiled kernel must not show, in words."""
    if "error" in report:
        return [report["error"]]
    found = []
    if report["shared"] > SHARED_LIMITS[report["target"]]:
        found.append(f"{report['shared']} bytes of shared memory, the limit is {SHARED_LIMITS[report['target']]}")
    if report["int32_products"]:
        found.append(f"32-bit products that overflow past 2^31 elements: {report['int32_products']}")
    if report["dtype"] == "float32":
        if report["tf32"]:
            found.append(f"{report['tf32']} TF32 instructions, where IEEE arithmetic was asked for")
    elif report["scalar_products"] or (report["products"] and not report["matrix_instructions"]):
        found.append(f"{report['scalar_products']} of {report['products']} products without matrix instructions")
    # In float32 torch is the default there. Rows that are no multiple of 16 bytes are loaded in small pieces, whose
    # addresses take more registers than there are.
    if report["target"] == "sm_90" and report["dtype"] != "float32" and report["width"] % 8 == 0:
        spilling = (report["kernel"], report["gated"], tuning.padded_width(report["width"])) in SPILLING
        newer = [int(part) for part in report["triton"].split(".")[:2]] >= [3, 9]
        named = SPILLING_SINCE_3_9.get(report["kernel"], (0, 0)) if newer else (0, 0)
        if report["kernel"] == "one_pass" and report["constants"]["BLOCK_P"] == 128:
            named = SPILLING_OF_128_ROWS
        most, most_in_loops = (math.inf, MOST_LOOP_SPILLS) if spilling else named
        if report["spill_bytes"] > most or report["loop_spills"] > most_in_loops:
            found.append(f"{report['spill_bytes']} bytes of registers spilled")
        if report["serialised"]:
            found.append("the matrix instructions wait for one another: wgmma is serialised")
    return found


def name(report: dict[str, Any]) -> str:
    gradients = [pointer for pointer in report["pointers"] if pointer.startswith("d_")]
    words = [report["target"], report["kernel"], report["dtype"], f"width {report['width']}", report["activation"]]
    words += ["gated"] * report["gated"] + ["dropout"] * report["dropout"]
    return " ".join([*words, str(report["tiles"]), *gradients])


@pytest.mark.parametrize(
    ("selection", "target", "dtype"), [pytest.param(*selection, id="-".join(selection)) for selection in SELECTIONS]
)
def test_shipped_configurations(tmp_path: Path, selection: str, target: str, dtype: str) -> None:
    reports = compiled(tmp_path, str(TESTS / "code_generation.py"), selection, f"{target}/{dtype}")
    red = [f"{name(report)}: {fault}" for report in reports for fault in faults(report)]
    assert not red, "\n".join(red)
    for gated in (False, True):
        found = defaultdict(set)
        for report in reports:
            if report["gated"] == gated and report["kernel"] in KERNELS:
                found[report["kernel"]].add(tuple(report["tiles"].values()))
        assert found.keys() == KERNELS
        for kernel, tiles in found.items():
            rows = tuning.rows(kernel, target, 32 if dtype == "float32" else 16, gated)
            if selection in ("ends", "even"):
                rows = (rows[0], rows[-1])
            assert tiles == {(row.block_m, row.block_n, row.num_warps, row.num_stages) for _, row in rows}, kernel
        sm90 = {
            (report["kernel"], report["width"]) for report in reports if report["sm90"] and report["gated"] == gated
        }
        if target == "sm_90" and dtype != "float32" and selection != "even":
            assert sm90 >= {(kernel, width) for kernel in PIPELINED_KERNELS for width in (64, 104, 128, 256)}
            if not gated or RELEASE < (3, 9):
                assert sm90 >= {(kernel, 256) for kernel in STORING_KERNELS}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"error": "PTXASError: too much"}, "PTXASError"),
        ({"shared": 227 * 1024 + 1}, "shared memory"),
        ({"int32_products": ["%0 = arith.muli %rows, %stride_xm : i32"]}, "2^31"),
        ({"scalar_products": 1}, "1 of 3 products"),
        ({"matrix_instructions": 0}, "matrix instructions"),
        ({"spill_bytes": 4}, "4 bytes of registers"),
        (
            {"kernel": "sm90_weight_gradient", "gated": True, "width": 128, "spill_bytes": 4, "loop_spills": 13},
            "4 bytes of registers",
        ),
        ({"triton": "3.9.0", "kernel": "sm90_reduce", "spill_bytes": 237}, "237 bytes of registers"),
        ({"triton": "3.9.0", "kernel": "sm90_reduce", "spill_bytes": 4, "loop_spills": 1}, "4 bytes of registers"),
        ({"triton": "3.8.0", "kernel": "sm90_reduce", "spill_bytes": 4}, "4 bytes of registers"),
        ({"serialised": True}, "serialised"),
        ({"dtype": "float32", "tf32": 2}, "2 TF32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_every_fault_is_named(change: dict[str, Any], word: str) -> None:
    good = {
        "target": "sm_90", "dtype": "bfloat16", "width": 64, "shared": 227 * 1024, "kernel": "forward", "gated": False,
        "triton": "3.7.1", "int32_products": [], "products": 3, "scalar_products": 0,
        "matrix_instructions": 3, "spill_bytes": 0, "loop_spills": 0, "serialised": False, "tf32": 0,
    }  # fmt: skip
    assert faults(good) == []
    assert faults(good | {"triton": "3.10.0", "kernel": "sm90_reduce", "spill_bytes": 236}) == []
    (fault,) = faults(good | change)
    assert word in fault


TOO_LARGE = """
import json

from code_generation import compile_kernel
from fusedlayers.kernels.tuning import TileConfig

for tiles in (TileConfig(128, 64, 4, 2), TileConfig(256, 128, 8, 4), TileConfig(32, 8, 4, 1)):
    for report in compile_kernel("forward", "sm_90", "bfloat16", 256, tiles):
        print(json.dumps(report))
"""


def test_the_compilers_complaints_arrive(tmp_path: Path) -> None:
    few_warps, large, thin = compiled(tmp_path, TOO_LARGE)
    assert few_warps["kernel"] == large["kernel"] == thin["kernel"] == "forward"
    found = "\n".join(faults(few_warps))
    assert "registers spilled" in found
    assert "wgmma is serialised" in found
    assert "shared memory" in "\n".join(faults(large))
    (fault,) = faults(thin)
    assert "Input shapes should have" in fault, "eight columns are below what tl.dot takes"


PLANTED = """
import json

import torch
import triton
import triton.language as tl
from code_generation import compiling_for


@triton.jit
def _planted_kernel(x_ptr, y_ptr, stride_xz, stride_xm, M, N, WHICH: tl.constexpr, BLOCK: tl.constexpr):
    tiles = tl.cdiv(M, BLOCK)
    program = tl.program_id(0)
    batch = program // tiles
    row_start = (program % tiles) * BLOCK
    rows = row_start + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK)
    wide_rows = rows.to(tl.int64)[:, None]
    inside = (rows < M)[:, None]
    offsets = wide_rows * stride_xm + cols[None, :]
    base = x_ptr + batch.to(tl.int64) * stride_xz
    if WHICH == "tensor times stride":
        offsets = rows[:, None] * stride_xm + cols[None, :]
    elif WHICH == "widened too late":
        offsets = (rows[:, None] * stride_xm).to(tl.int64) + cols[None, :]
    elif WHICH == "program times stride":
        base = x_ptr + batch * stride_xz
    elif WHICH == "product of sizes":
        base = x_ptr + (batch * M) * N
    elif WHICH == "constant row length":
        offsets = rows[:, None] * 80 + cols[None, :]
    elif WHICH == "constant program size":
        base = x_ptr + program * 4800
    elif WHICH == "bound":
        inside = wide_rows * N + cols[None, :] < M * N
    elif WHICH == "carried by a loop":
        step = stride_xm * BLOCK
        offset = step * 0
        for _ in range(0, N):
            offset += step
        base = base + offset
    tile = tl.load(base + offsets, mask=inside, other=0.0)
    # Data may be multiplied in 32 bits.
    tile = tile + ((cols * 77 + rows[:, None] * 79) % 2).to(tl.float32)
    tl.store(y_ptr + wide_rows * N + cols[None, :], tile, mask=inside)


for which in (
    "nothing", "tensor times stride", "widened too late", "program times stride", "product of sizes",
    "constant row length", "constant program size", "bound", "carried by a loop",
):
    x = torch.empty(1)
    with compiling_for("sm_90") as (reports):
        _planted_kernel[(1,)](x, x, 6400, 320, 37, 96, WHICH=which, BLOCK=32, enable_fp_fusion=True)
    print(json.dumps({"which": which} | reports[0]))
"""


def test_the_lint_sees_planted_32_bit_offsets(tmp_path: Path) -> None:
    found = {report["which"]: report["int32_products"] for report in compiled(tmp_path, PLANTED)}
    assert len(found) == 9
    assert [which for which, products in found.items() if not products] == ["nothing"], found
    # Where the fault is one product, nothing beside it is blamed.
    assert {which: len(found[which]) for which in ("tensor times stride", "program times stride", "bound")} == {
        "tensor times stride": 1,
        "program times stride": 1,
        "bound": 1,
    }


RACE = """
import json

import torch
import triton
import triton.language as tl
from code_generation import compiling_for


@triton.jit
def _race_kernel(a_ptr, b_ptr, out_ptr, sums_ptr, stride_a, stride_b, M, SUMMED: tl.constexpr):
    outer, cols = tl.arange(0, 128), tl.arange(0, 128)
    acc = tl.zeros([128, 128], tl.float32)
    sums = tl.zeros([64, 128], tl.float32)
    for start in tl.range(0, M, 64):
        rows = start + tl.arange(0, 64)
        a = tl.load(a_ptr + rows[None, :] * stride_a + outer[:, None], mask=rows[None, :] < M, other=0.0)
        b = tl.load(b_ptr + rows[:, None] * stride_b + cols[None, :], mask=rows[:, None] < M, other=0.0)
        acc = tl.dot(a, b, acc)
        if SUMMED:
            sums += a.T.to(tl.float32)
    tl.store(out_ptr + outer[:, None] * 128 + cols[None, :], acc)
    if SUMMED:
        tl.store(sums_ptr + outer, tl.sum(sums, 0))


for summed in (False, True):
    a, out = torch.empty(64, dtype=torch.bfloat16), torch.empty(64)
    with compiling_for("sm_90") as reports:
        _race_kernel[(1,)](a, a, out, out, 128, 128, 4096, SUMMED=summed, num_warps=8, num_stages=3)
    print(json.dumps(reports[0]))
"""


def test_the_lint_sees_copies_that_overtake_a_product(tmp_path: Path) -> None:
    """What else reads a product's operand keeps Triton's pipeliner from giving it the buffer that it needs."""
    alone, summed = reported(tmp_path, RACE)
    assert alone["wgmma"] == summed["wgmma"] == 4
    assert alone["overwritten"] == []
    assert len(summed["overwritten"]) == 1


DROPOUT = """
import json

import torch
from code_generation import compiling_for
from fusedlayers.kernels.dropout import _keep_kernel, drop

for rows, columns in ((48, 96), (37, 83)):
    with compiling_for("sm_90") as reports:
        seed, out = torch.empty(1, dtype=torch.int64), torch.empty(rows, columns)
        _keep_kernel[(1,)](seed, out, columns, 0, 0, rows, 0.1, BLOCK=1024, enable_fp_fusion=True)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            drop(torch.empty(rows, columns, dtype=dtype), seed, 0.1)
    for report in reports:
        print(json.dumps(report))
"""


def test_the_kernels_of_dropout(tmp_path: Path) -> None:
    reports = compiled(tmp_path, DROPOUT)
    assert [report["kernel"] for report in reports] == ["keep", "drop", "drop", "drop"] * 2
    for report in reports:
        assert "error" not in report, report
        assert report["int32_products"] == []
        if report["kernel"] == "drop":
            assert report["spill_bytes"] == 0
            # Two draws of seven rounds for the sixteen elements of a thread, not a draw for each of them.
            assert report["wide_multiplications"] <= 2 * 14


VARIANTS = """
import json

from code_generation import Case, compile_case

for width, sm90 in ((64, False), (64, True), (256, True)):
    for rows in (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 127, 128, 255, 512, 777, 1024, 2048, 3000, 4096):
        for report in compile_case(Case("sm_90", "bfloat16", width, rows=rows, sm90=sm90)):
            print(json.dumps(report))
"""


def test_few_variants_for_many_row_counts(tmp_path: Path) -> None:
    rows = defaultdict(lambda: defaultdict(set))
    for report in compiled(tmp_path, VARIANTS):
        rows[report["width"], report["kernel"]][report["hash"]].add(report["rows"])
    storing = {(256, kernel) for kernel in {"sm90_forward", "reduce_partials"} | STORING_KERNELS}
    assert (
        rows.keys()
        == {(64, kernel) for kernel in KERNELS | PIPELINED_KERNELS | {"reduce_partials", "column_sums"}} | storing
    )
    for (_, kernel), variants in rows.items():
        if kernel != "reduce_partials":
            assert set().union(*variants.values()) >= {1, 777, 4096}, f"{kernel} was not launched at every row count"
        assert len(variants) <= 3, f"{kernel} is compiled {len(variants)} times: {list(variants.values())}"
