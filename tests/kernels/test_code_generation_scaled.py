"""What the compilers make of products of 8-bit operands, and what lies otherwise than TMA wants it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels.gemm_epilogue import Scaled
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES
from tests.kernels.test_code_generation import compiled, faults

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

E4M3 = torch.float8_e4m3fn
STEP = 128
DROPPING = 24  # bytes

SCALED = """
import json

import torch
from code_generation import compiling_for
from fusedlayers.kernels import gemm_epilogue as kernels
from fusedlayers.kernels import grouped_gemm as grouped
from fusedlayers.kernels.grouped_gemm import rows_of, sizes
from fusedlayers.kernels.tuning.grouped_gemm import grouped_tiles
from fusedlayers.kernels.tuning.grouped_gemm_pipelines import SCALED_WEIGHT_GRADIENT
from fusedlayers.kernels.dropout import NO_DROPOUT, Dropout
from fusedlayers.kernels.gemm_epilogue import LowRank, Scaled
from fusedlayers.kernels.matmul.arithmetic import Arithmetic
from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES


def operand(rows, columns, by_row):
    return Scaled(torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows if by_row else ()))


def tell(reports, gated, pipeline, dropping, rank=0):
    for report in reports:
        report |= {"dtype": "float8_e4m3fn", "width": 1024, "gated": gated, "dropping": dropping, "rank": rank}
        print(json.dumps(report | {"pipeline": [pipeline.step, pipeline.stages]}), flush=True)


VARIANTS = [
    ("identity", "coarse", False, False, True),
    ("gelu_tanh", "coarse", False, True, True),
    ("gelu", "half", False, True, True),
    ("silu", "coarse", True, True, False),
    ("gelu_tanh", "coarse", True, True, True),
]
GRADIENTS = [
    ("identity", "coarse", False, False, True),
    ("gelu_tanh", "coarse", True, False, True),
    ("silu", "coarse", True, False, False),
    ("gelu", "half", True, False, True),
    ("gelu_tanh", "coarse", True, True, True),
]
for gated in (False, True):
    for activation, accuracy, keep, biased, by_row in VARIANTS:
        x, w = operand(4096, 1024, by_row), operand(2048, 1024, by_row)
        bias = torch.empty(2048, dtype=torch.bfloat16) if biased else None
        pipeline = EPILOGUE_PIPELINES["scaled_hidden", gated]
        more = (w, bias) if gated else (None, None)
        with compiling_for("sm_90", sm90=True) as reports:
            kernels.scaled_hidden(
                x, w, bias, *more, keep, Arithmetic(activation, accuracy, "ieee"), pipeline, torch.bfloat16
            )
        tell(reports, gated, pipeline, False)
    for activation, accuracy, keep, dropping, by_row in GRADIENTS:
        dy, w = operand(4096, 1024, by_row), operand(2048, 1024, by_row)
        z = torch.empty(4096, 2048, dtype=torch.bfloat16)
        pipeline = EPILOGUE_PIPELINES["scaled_hidden_gradient", gated]
        dropout = Dropout(torch.zeros(1, dtype=torch.int64), 0.1) if dropping else NO_DROPOUT
        with compiling_for("sm_90", sm90=True) as reports:
            kernels.scaled_hidden_gradient(
                dy, w, z, z if gated else None, keep, Arithmetic(activation, accuracy, "ieee"), pipeline, dropout
            )
        tell(reports, gated, pipeline, dropping)
pipeline = EPILOGUE_PIPELINES["scaled_product", False]
for by_row, bias in ((True, torch.empty(2048, dtype=torch.bfloat16)), (False, None)):
    with compiling_for("sm_90", sm90=True) as reports:
        kernels.scaled_product(
            operand(4096, 1024, by_row), operand(2048, 1024, by_row), bias, pipeline, torch.bfloat16
        )
    tell(reports, False, pipeline, False)
x, w, z = operand(4096, 1024, True), operand(2048, 1024, True), torch.empty(4096, 2048, dtype=torch.bfloat16)
silu = Arithmetic("silu", "coarse", "ieee")
for rank in (16, 64):
    u, b = (torch.empty(rows, rank, dtype=torch.bfloat16) for rows in (4096, 2048))
    pipeline = EPILOGUE_PIPELINES["scaled_product", False]
    with compiling_for("sm_90", sm90=True) as reports:
        kernels.scaled_product(x, w, None, pipeline, torch.bfloat16, low_rank=LowRank(u, b.T))
    tell(reports, False, pipeline, False, rank)
    for gated in (False, True):
        gate, pipeline = w if gated else None, EPILOGUE_PIPELINES["scaled_hidden", gated]
        with compiling_for("sm_90", sm90=True) as reports:
            kernels.scaled_hidden(
                x, w, None, gate, None, True, silu, pipeline, torch.bfloat16, low_rank=LowRank(u, b, b, 0)
            )
        tell(reports, gated, pipeline, False, rank)
        pipeline = EPILOGUE_PIPELINES["scaled_hidden_gradient", gated]
        options = [(rank, {"low_rank": LowRank(u, b.T)})] + [(0, {"added": z})] * (rank == 16)
        for has, given in options:
            with compiling_for("sm_90", sm90=True) as reports:
                kernels.scaled_hidden_gradient(x, w, z, z if gated else None, True, silu, pipeline, **given)
            tell(reports, gated, pipeline, not has, has)
words = torch.empty(2048, dtype=torch.int32)
for gated, activation, accuracy in (
    (False, "gelu", "half"), (False, "gelu_tanh", "coarse"), (True, "silu", "coarse"), (True, "gelu_tanh", "coarse"),
):
    how, bias = Arithmetic(activation, accuracy, "ieee"), torch.empty(2048, dtype=torch.bfloat16)
    x, w = (Scaled(torch.empty(rows, 1024, dtype=torch.float8_e4m3fn), words.new_empty(rows)) for rows in (4096, 2048))
    dy, down = operand(4096, 1024, True), operand(2048, 1024, True)
    for keep in (False, True):
        more, pipeline = (w, bias) if gated else (None, None), EPILOGUE_PIPELINES["scaled_hidden", gated]
        with compiling_for("sm_90", sm90=True) as reports:
            kernels.scaled_hidden(x, w, bias, *more, keep, how, pipeline, torch.bfloat16)
        tell(reports, gated, pipeline, False)
        pipeline = EPILOGUE_PIPELINES["scaled_hidden_gradient", gated]
        with compiling_for("sm_90", sm90=True) as reports:
            kernels.scaled_hidden_gradient(
                dy, down, z, z if gated else None, keep, how, pipeline, units=words, hidden_rows=torch.empty(4096)
            )
        tell(reports, gated, pipeline, False)

EXPERTS, WIDTH, UNITS = 3, 1024, 768
TILES = grouped_tiles("sm_90", 16, "product", 128)
rows = rows_of(torch.zeros(sum(sizes(4096, EXPERTS, 128)), dtype=torch.int32), 4096, EXPERTS, 128, 2)


def of_experts(*shape):
    return Scaled(torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty(shape[:-1]))


x, down = of_experts(rows.capacity, WIDTH), of_experts(EXPERTS, WIDTH, UNITS)
weight, bias = of_experts(EXPERTS, UNITS, WIDTH), torch.empty(EXPERTS, UNITS, dtype=torch.bfloat16)
z = torch.empty(rows.capacity, UNITS, dtype=torch.bfloat16)
for gated in (False, True):
    arithmetic = grouped.Arithmetic("silu", "coarse")
    pipeline = EPILOGUE_PIPELINES["scaled_hidden", gated]
    with compiling_for("sm_90", sm90=True) as reports:
        gate, gate_bias = (weight, bias) if gated else (None, None)
        grouped.hidden(
            x, weight, gate, bias, gate_bias, rows, True, arithmetic, gathered=True, tiles=TILES, pipeline=pipeline,
            dtype=torch.bfloat16,
        )
    tell(reports, gated, pipeline, False)
    pipeline = EPILOGUE_PIPELINES["scaled_hidden_gradient", gated]
    with compiling_for("sm_90", sm90=True) as reports:
        gate, weights = z if gated else None, torch.empty(rows.capacity)
        grouped.hidden_gradient(
            x, Scaled(weight.values.mT, weight.scale), z, gate, weights, rows, True, True, arithmetic, in_place=True,
            tiles=TILES, pipeline=pipeline,
        )
    tell(reports, gated, pipeline, False)
pipeline = EPILOGUE_PIPELINES["scaled_product", False]
with compiling_for("sm_90", sm90=True) as reports:
    grouped.product(
        [(of_experts(rows.capacity, UNITS), down)], None, rows, "ieee", tiles=TILES, pipeline=pipeline,
        dtype=torch.bfloat16,
    )
tell(reports, False, pipeline, False)
left, right = operand(2 * UNITS, rows.capacity, False), operand(WIDTH, rows.capacity, False)
left = Scaled(left.values[:UNITS], torch.empty(EXPERTS))
with compiling_for("sm_90", sm90=True) as reports:
    grouped.scaled_weight_gradient(
        left, right, rows, torch.empty(EXPERTS, UNITS, WIDTH, dtype=torch.bfloat16), pipeline=SCALED_WEIGHT_GRADIENT
    )
tell(reports, False, SCALED_WEIGHT_GRADIENT, False)
"""


def test_products_of_8_bit_operands(tmp_path: Path) -> None:
    """No spills, nothing serialised; in both consumers two instructions, one for each half of rows, for 32 columns.

    A low-rank product has two more for 16 columns of 16 bits; a consumer of a weight gradient has half of the rows.
    """
    found = compiled(tmp_path, SCALED)
    of_weights = "sm90_grouped_weight_gradient"
    kernels = {"sm90_hidden", "sm90_epilogue_gradient", "sm90_scaled_product", of_weights}
    assert {report["kernel"] for report in found} == kernels
    assert len(found) == 22 + 12 + 4 * 4 + 6
    for report in found:
        # A mask is drawn, and an addend loaded, where the most values of a tile are alive.
        spilled = DROPPING if report["dropping"] and report["gated"] else 0
        assert report["spill_bytes"] <= spilled
        assert not report["loop_spills"]
        assert faults(report | {"spill_bytes": 0}) == []
        halves = 1 if report["kernel"] == of_weights else 2
        assert report["wgmma"] == 2 * halves * (STEP // 32 + report["rank"] // 16)
        assert [report["constants"][name] for name in ("STEP", "STAGES")] == report["pipeline"]


def operand(rows: int, columns: int, stride: int = 0) -> Scaled:
    values = torch.zeros(rows, stride or columns, dtype=E4M3)[:, :columns]
    return Scaled(values, torch.ones(rows))


@pytest.mark.parametrize(
    ("x", "w_up", "b_up", "named"),
    [
        (operand(64, 40, 40), operand(64, 40), None, "x has shape and strides"),
        (Scaled(torch.zeros(64, 64, dtype=E4M3).T, torch.ones(64)), operand(64, 64), None, "x has shape and strides"),
        (operand(64, 64), Scaled(operand(64, 80).values[:, 1:65], torch.ones(64)), None, "w_up has shape and strides"),
        (operand(64, 64), operand(60, 64), None, "w_up has 60 rows"),
        (operand(64, 64), operand(64, 64), torch.zeros(128)[::2], "b_up has a stride of 2"),
    ],
    ids=["rows", "transposed", "address", "results", "bias"],
)
def test_what_tma_does_not_take(x: Scaled, w_up: Scaled, b_up: torch.Tensor | None, named: str) -> None:
    arithmetic, pipeline = Arithmetic("identity", "coarse", "ieee"), EPILOGUE_PIPELINES["scaled_hidden", False]
    with pytest.raises(ValueError, match=named):
        kernels.scaled_hidden(x, w_up, b_up, None, None, False, arithmetic, pipeline, torch.bfloat16)
