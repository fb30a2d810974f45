"""What Triton's compilers make of the kernels of GEMM-reduce, on any machine; see ``test_code_generation.py``."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.test_code_generation import COMPILE_ALL, DTYPES, SHARED_LIMITS, TESTS, compiled, faults

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

if COMPILE_ALL:
    SELECTIONS = [("rows", target, dtype) for target in SHARED_LIMITS for dtype in DTYPES]
else:
    SELECTIONS = [("rows", "sm_90", "bfloat16"), ("few", "sm_80", "float16"), ("few", "gfx942", "bfloat16")]


def name(report: dict[str, Any]) -> str:
    words = ("target", "kernel", "dtype", "width", "op", "dim", "activation", "rows", "constants")
    return " ".join(str(report[word]) for word in words)


@pytest.mark.parametrize(("selection", "target", "dtype"), SELECTIONS)
def test_shipped_configurations(tmp_path: Path, selection: str, target: str, dtype: str) -> None:
    reports = compiled(tmp_path, str(TESTS / "reduce_code_generation.py"), selection, f"{target}/{dtype}")
    red = [f"{name(report)}: {fault}" for report in reports for fault in faults(report)]
    assert not red, "\n".join(red)
    # float32 takes the gradients one by one.
    at_once = set() if dtype == "float32" else {"one_pass", "reduce_partials"}
    assert {report["kernel"] for report in reports} == {"reduce", "combine", "routing", "weighted"} | at_once
    of_both = {report["constants"].get("KEPT") for report in reports if report["kernel"] == "weighted"}
    assert of_both == {True, False}


def test_the_sm90_kernel(tmp_path: Path) -> None:
    """Every tile of its table compiles without spills and within shared memory, whatever is reduced how."""
    reports = compiled(tmp_path, str(TESTS / "reduce_code_generation.py"), "sm90", "sm_90/bfloat16")
    red = [f"{name(report)}: {fault}" for report in reports for fault in faults(report)]
    assert not red, "\n".join(red)
    assert {report["kernel"] for report in reports} == {"sm90_reduce"}
    constants = [report["constants"] for report in reports]
    assert {(c["CONSUMERS"], c["BLOCK"]) for c in constants} == {(1, 64), (2, 64), (2, 128), (4, 64), (4, 128)}
    for flag in ("KEPT_TRANSPOSED", "REDUCED_TRANSPOSED", "PARTIAL", "IN_REGISTERS"):
        assert {c[flag] for c in constants} == {True, False}, flag
    for pointer in ("index_ptr", "mask_ptr", "offsets_ptr", "sums_ptr", "counts_ptr"):
        assert any(pointer in report["pointers"] for report in reports), pointer


VARIANTS = """
import json

from reduce_code_generation import ReduceCase, compile_case

for op, dim in (("max", -2), ("logsumexp", -1)):
    for rows in (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 127, 128, 255, 512, 777, 1024, 2048, 3000, 4096):
        for report in compile_case(ReduceCase("sm_90", "bfloat16", 64, op, dim, rows=rows, batch=2)):
            print(json.dumps(report))
"""


def test_few_variants_for_many_row_counts(tmp_path: Path) -> None:
    rows = defaultdict(lambda: defaultdict(set))
    for report in compiled(tmp_path, VARIANTS):
        key = (report["op"], report["dim"], report["kernel"], report["constants"].get("KEPT"))
        rows[key][report["hash"]].add(report["rows"])
    launched = {key: set().union(*variants.values()) for key, variants in rows.items()}
    for key, variants in rows.items():
        assert len(variants) <= 3, f"{key} is compiled {len(variants)} times: {list(variants.values())}"
        # What is combined depends on splits; few rows have both gradients at once, the others one by one.
        at_once = launched.get((*key[:2], "one_pass", None), set()) if key[2] == "weighted" else set()
        if key[2] in ("reduce", "weighted", "routing"):
            assert launched[key] | at_once >= {1, 777, 4096}, f"{key} was not launched at every row count"
