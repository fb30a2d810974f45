"""Launches that are prepared once: with other data at other addresses they give what unprepared ones give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import planning
from fusedlayers.kernels import gemm_epilogue, gemm_gemm, hopper, launching
from fusedlayers.kernels.column_sums import column_sums
from fusedlayers.kernels.device import HAS_TRITON
from fusedlayers.kernels.dropout import Dropout
from fusedlayers.kernels.gemm_gemm import Arithmetic, Operands, WeightGradients
from fusedlayers.kernels.split_k import product
from fusedlayers.kernels.tuning import (
    COLUMN_SUM_TILES,
    ColumnSumTiles,
    EpilogueTiles,
    SplitTiles,
    TileConfig,
)
from fusedlayers.kernels.tuning.grouped_gemm import GroupedTiles
from fusedlayers.kernels.weight_gradient import weight_gradient
from tests.support.operands import needs_kernels
from tests.support.prepared_launches import HOPPER, Watched, assert_same, assert_told_the_same, drawn
from tests.support.stand_in_launchers import Launcher, stand_in_driver

GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
M, K, N = 40, 16, 24


def ffn_operands(gated: bool, ready: dict[Any, Any] | None, seed: int | None = None) -> Operands:
    return Operands(
        drawn(M, K), drawn(N, K), drawn(K, N), drawn(N), drawn(N, K) if gated else None, drawn(N) if gated else None,
        None if seed is None else torch.tensor([seed]),
        Arithmetic("silu", 0.0 if seed is None else 0.5, "ieee", "exact"), ready,
    )  # fmt: skip


def without_ready(operands: Operands) -> Operands:
    names = ("x", "up", "down", "up_bias", "gate", "gate_bias", "seed", "arithmetic")
    return Operands(*[getattr(operands, name) for name in names])


@pytest.mark.bits
@pytest.mark.sampled(together=2)
@needs_kernels
@GATED
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("passes", [1, 3])
def test_the_narrow_ffn(gated: bool, splits: int, passes: int) -> None:
    """Forward and backward, three times with one dict: wanted gradients and the layout of dy may change meanwhile."""
    ready: dict[Any, Any] = {}
    tiles = TileConfig(16, 16, 4, 1, passes)
    everything = WeightGradients(True, gated, True, True, gated)
    for turn, wanted in enumerate((everything, everything, WeightGradients(down=True), everything)):
        operands = ffn_operands(gated, ready, seed=turn)
        dy = drawn(M, K) if turn < 2 else drawn(1, K).expand(M, K)
        down_bias, residual = drawn(K), drawn(M, K)

        ours, theirs = (
            (
                gemm_gemm.forward(given, down_bias, residual, tiles),
                gemm_gemm.data_gradient(given, dy, tiles, column_sums=True),
                gemm_gemm.weight_gradients(given, dy, wanted, splits, tiles),
            )
            for given in (operands, without_ready(operands))
        )
        assert_same(ours, theirs)
    assert not any(isinstance(each, Tensor) for each in ready.values())


SILU = Arithmetic("silu", 0.0, "ieee", "exact")


@pytest.mark.bits
@needs_kernels
@GATED
def test_the_wide_ffn(gated: bool) -> None:
    ready: dict[Any, Any] = {}
    tiles = EpilogueTiles(16, 16, 16, 4, 1)
    for turn in range(4):
        x, w_up, b_up, w_down = drawn(M, K), drawn(N, K), drawn(N), drawn(K, N)
        w_gate, b_gate = (drawn(N, K), drawn(N)) if gated else (None, None)
        dropout = Dropout(torch.tensor([turn]), 0.5)
        keep = turn != 1
        dy = drawn(M, K) if turn != 2 else drawn(K, M).T

        found = []
        for given in (ready, None):
            h, z, z_gate = gemm_epilogue.hidden(
                x, w_up, b_up, w_gate, b_gate, keep, SILU, tiles, dropout=dropout, ready=given
            )
            gradients = None
            if z is not None:
                gradients = gemm_epilogue.hidden_gradient(
                    dy, w_down, z, z_gate, turn != 3, 2, SILU, tiles, keep_hidden=turn != 3,
                    for_products=True, dropout=dropout, column_sums=ColumnSumTiles(16, 16, 5), ready=given,
                )  # fmt: skip
            found.append((h, z, z_gate, gradients))
        assert_same(*found)


@pytest.mark.bits
@needs_kernels
def test_column_sums() -> None:
    ready: dict[Any, Any] = {}
    for dy in (drawn(50, 20), drawn(50, 20), drawn(20, 50).T, drawn(50, 20)):
        assert_same(column_sums(dy, COLUMN_SUM_TILES, ready), column_sums(dy, COLUMN_SUM_TILES))


@pytest.mark.bits
@needs_kernels
@pytest.mark.parametrize("splits", [1, 3])
def test_the_gradients_of_a_linear_layer(splits: int) -> None:
    ready: dict[Any, Any] = {}
    tiles = GroupedTiles(16, 16, 16, 4, 1)
    for turn in range(4):
        x, dy = drawn(100, K), drawn(100, N) if turn != 1 else drawn(1, N).expand(100, N)
        ours, theirs = (
            weight_gradient(dy, x, turn != 2, splits, "ieee", tiles, ready=given) for given in (ready, None)
        )
        assert_same(ours, theirs)


@pytest.mark.bits
@needs_kernels
@pytest.mark.parametrize(("splits", "atomic"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("rows", [1, 5])
def test_split_products(rows: int, splits: int, atomic: bool) -> None:
    ready: dict[Any, Any] = {}
    tiles = SplitTiles(1 if rows == 1 else 16, 16, 16, 4, 1)
    for turn in range(4):
        left = drawn(rows, 64) if turn != 1 else drawn(64, rows).T
        right, bias = drawn(N, 64), drawn(N)
        ours, theirs = (
            product(left, right, bias, splits, tiles, activation="silu", atomic=atomic, ready=given)
            for given in (ready, None)
        )
        assert_same(ours, theirs)


def planned(width: int, gated: bool) -> planning.Plan:
    problem = planning.Problem(
        operation="ffn", batch=1, M=200, K=width, N=2 * width, O=width, dtype="bfloat16", activation="silu",
        gated=gated, dropout=False, needs_data_gradient=True, needs_weight_gradient=True,
    )  # fmt: skip
    found: planning.Plan = planning.plan(problem, HOPPER, "triton")
    return found


def both_passes(width: int, gated: bool) -> Callable[[dict[Any, Any] | None], None]:
    """The kernels of a forward and a backward pass of a layer, as the plan for a Hopper GPU names them."""
    plan, hidden = planned(width, gated), 2 * width
    x, dy, up, down, gate = (
        drawn(*shape, dtype=torch.bfloat16)
        for shape in ((200, width), (200, width), (hidden, width), (width, hidden), (hidden, width))
    )
    bias, gate_bias = drawn(hidden, dtype=torch.bfloat16), drawn(hidden, dtype=torch.bfloat16)
    gates = (gate, gate_bias) if gated else (None, None)
    arithmetic = Arithmetic("silu", 0.0, "ieee", "coarse")

    def narrow(ready: dict[Any, Any] | None) -> None:
        operands = Operands(x, up, down, bias, *gates, None, arithmetic, ready)
        gemm_gemm.forward(operands, dy[0], x, plan.forward_tiles)
        if plan.stored is not None:
            found = gemm_gemm.stored_gradients(operands, dy, True, gated, True, plan.stored_splits, plan.stored)
            assert found is not None
            return
        gemm_gemm.data_gradient(operands, dy, plan.data_gradient_tiles, column_sums=True)
        wanted = WeightGradients(True, gated, True, True, gated)
        gemm_gemm.weight_gradients(operands, dy, wanted, 3, plan.weight_gradient_tiles)

    def wide(ready: dict[Any, Any] | None) -> None:
        tiles = plan.epilogue
        _, z, z_gate = gemm_epilogue.hidden(
            x, up, bias, *gates, True, arithmetic, tiles.hidden_tiles, tiles.hidden_pipeline, ready=ready
        )
        gradient = tiles.gradient
        assert z is not None
        assert gradient.tiles is not None
        gemm_epilogue.hidden_gradient(
            dy, down, z, z_gate, True, gradient.row_tiles, arithmetic, gradient.tiles, gradient.pipeline,
            keep_hidden=True, for_products=True, column_sums=COLUMN_SUM_TILES, ready=ready,
        )  # fmt: skip

    return narrow if plan.path == "fused" else wide


@pytest.mark.skipif(not hopper.HAS_GLUON, reason="this Triton has no Gluon")
@pytest.mark.parametrize("nested", [False, True], ids=["one by one", "in a tuple"])
@GATED
@pytest.mark.parametrize("width", [64, 128, 256, 768])
def test_sm90_kernels_are_told_the_same(width: int, gated: bool, nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_told_the_same(both_passes(width, gated), nested, monkeypatch)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_encodings_are_bounded_and_keep_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_ENCODINGS_LIMIT", 4)
    watched = Watched(Launcher, monkeypatch)
    whole = drawn(64, 64, dtype=torch.bfloat16)
    found = hopper.matrix(whole)
    with stand_in_driver() as encoded:
        launch = launching.Launch(None, 3, (5,), (), (), geometries=(found.geometry(8, 64), None))
        [encodings, _] = launch._descriptors
        for row in range(10):
            for _ in range(2):
                launch((whole[row:], None, drawn(4)))
            assert len(encodings) <= 4
    # Every second launch is at the same address.
    assert len(encoded) == 10
    assert watched.compiled == 1
    assert not any(isinstance(each, Tensor) for encoding in encodings.values() for each in encoding)
