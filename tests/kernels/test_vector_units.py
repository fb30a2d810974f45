"""Operands whose rows are whole vectors of 16 bytes, and no more: how they lie, and what the compiler loads of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fusedlayers.kernels.launching import lines
from tests.kernels.test_code_generation import compiled


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.empty(3, 5), (False, (5, 5))),
        (torch.empty(5, 3).T, (True, (3, 3))),
        (torch.empty(2, 3, 5), (False, (5, 15, 5))),
        (torch.empty(2, 3, 5).mT, (True, (5, 15, 5))),
        (torch.empty(3, 10)[:, ::2], (False, (5, 10, 2))),
        (torch.empty(5).expand(3, 5), (False, (5, 0))),
        (torch.empty(3, 1), (False, (1, 1))),
    ],
    ids=["rows", "columns", "batch of rows", "batch of columns", "apart", "one row for all", "one column"],
)
def test_lines_of_a_matrix(tensor: torch.Tensor, found: tuple[bool, tuple[int, ...]]) -> None:
    assert lines(tensor) == found


PRODUCTS = """
import json

import torch
from code_generation import compiling_for
from fusedlayers import functional


def matrix(*sizes, transposed=False):
    empty = torch.empty(*sizes, dtype=torch.bfloat16)
    return (empty.mT.contiguous().mT if transposed else empty).requires_grad_()


for step in (8, 4):
    # Rows of half a vector show that the others are told apart: of each kernel one is enough.
    for transposed in (False, True) if step == 8 else (False,):
        with compiling_for("sm_90") as reports:
            a = matrix(3, 256, 64 + step)
            b = matrix(3, 64 + step, 256 + step, transposed=transposed)
            c = matrix(3, 256 + step, 64 + step, transposed=transposed)
            y = functional.gemm_gemm(a, b, c, activation="gelu_tanh")
            y.backward(torch.empty_like(y))
            for rows in () if transposed else (1, 16, 64) if step == 8 else (1, 16):
                y = functional.linear(matrix(rows, 4096 + step), matrix(512 + step, 4096 + step).detach())
                y.backward(torch.empty_like(y))
        for report in reports:
            print(json.dumps(report | {"step": step}))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_whole_vectors_are_loaded_at_once(tmp_path: Path) -> None:
    """Rows that are an odd multiple of 16 bytes long, which the compiler does not know of itself."""
    found = compiled(tmp_path, PRODUCTS)
    kernels = {"forward", "data_gradient", "weight_gradient", "product", "row_product"}
    for step in (8, 4):
        reports = [report for report in found if report["step"] == step and report["kernel"] in kernels]
        assert {report["kernel"] for report in reports} == kernels
        for report in reports:
            assert (report["loads_of_16_bits"] > 0) == (step == 4), (step, report["kernel"], report["tiles"])
