"""Tiles, programs and partial sums of the gradient of the pre-activations, with integers alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusedlayers import planning
from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES

H200 = planning.Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True)


def test_partial_sums_are_bounded() -> None:
    for rows in (1, 128, 2**15, 2**15 + 1, 2**20, 2**27):
        problem = planning.HiddenGradientProblem(M=rows, N=14336, O=4096, dtype="bfloat16", gated=True)
        made = planning.plan(problem, H200, "triton")
        assert made.workspace_bytes <= 4 * 256 * 2 * 14336 < planning.devices.PARTIALS_LIMIT
        assert made.row_tiles == max(1, math.ceil(rows / 2**15))
        assert planning.plan(problem, H200).path == "torch"


@pytest.mark.parametrize(("gated", "most"), [(False, 299_520), (True, 74_880)], ids=["plain", "gated"])
def test_the_sm90_kernel_runs_while_its_partial_sums_are_bounded(gated: bool, most: int) -> None:
    """It keeps sums of tiles of 128 rows, of both their halves with a gate, and never adds up bands itself."""
    device = replace(H200, backend="sm90", sms=99)
    for rows in (1, 64, 65, 128, 129, most, most + 1, 2**27):
        problem = planning.HiddenGradientProblem(M=rows, N=14336, O=4096, dtype="bfloat16", gated=gated)
        made = planning.plan(problem, device, "triton")
        if rows <= most:
            assert made.pipeline == replace(EPILOGUE_PIPELINES["hidden_gradient", gated], programs=99)
            bands = (2 if gated else 1) * math.ceil(rows / 128)
            partials = 4 * bands * (2 if gated else 1) * 14336 if bands > 1 else 0
            assert made.workspace_bytes == partials <= planning.devices.PARTIALS_LIMIT
        else:
            generic = planning.plan(problem, H200, "triton")
            assert (made.pipeline, made.workspace_bytes) == (None, generic.workspace_bytes)
        assert planning.plan(replace(problem, bias=False), device, "triton").pipeline is not None
        assert planning.plan(replace(problem, dtype="float32"), device, "triton").pipeline is None


@pytest.mark.parametrize(
    ("N", "O", "stays"),
    [
        (2048, 512, True),  # 128 of 132 programs have work, as in the next two
        (4096, 1024, True),
        (1032, 576, True),  # 126, the last column a ragged one
        (8, 512, True),
        (3072, 768, False),  # 120
        (4096, 1032, False),
        (4104, 1024, False),
        (8192, 2048, False),
    ],
    ids=str,
)
def test_programs_stay_in_a_column_where_that_was_faster(N: int, O: int, stays: bool) -> None:
    device = replace(H200, backend="sm90")
    for rows in (1, 129, 1024, 2**15, 2**24):
        problem = planning.HiddenGradientProblem(M=rows, N=N, O=O, dtype="bfloat16")
        made = planning.plan(problem, device, "triton")
        # Sums of so many tiles would take more memory than they may.
        assert (made.pipeline is None) == (rows == 2**24 and not stays)
        if made.pipeline is not None:
            tile_rows, tile_columns = math.ceil(rows / 128), math.ceil(N / 128)
            # Weights of up to 10 MiB are in the cache, whatever the order of tiles.
            group = 2 if not stays and N * O <= 5 * 2**20 else 8
            assert made.pipeline == replace(EPILOGUE_PIPELINES["hidden_gradient", False], stays=stays, group=group)
            bands = 2 * min(tile_rows, 132 // tile_columns) if stays and tile_rows > 1 else tile_rows
            assert made.workspace_bytes == (4 * bands * N if bands > 1 else 0)
            assert made.pipeline.bands(rows, N, False) == bands
        gated = planning.plan(replace(problem, gated=True), device, "triton").pipeline
        assert gated is None or not gated.stays


def test_as_many_programs_stay_in_each_column_as_fit() -> None:
    """Every one of some hidden units in chunks, too, which have fewer columns than was planned for."""
    pipeline = replace(EPILOGUE_PIPELINES["hidden_gradient", False], stays=True)
    for columns in range(1, pipeline.programs + 1):
        programs = pipeline.programs_for_columns(columns)
        assert programs % columns == 0
        assert 0 < programs <= pipeline.programs < programs + columns
        # One band for each consumer of each program of a column: no band is left unwritten.
        assert pipeline.bands(2**20, 128 * columns, False) == 2 * programs // columns
        assert pipeline.bands(129, 128 * columns, False) == 2 * min(2, programs // columns)
        assert pipeline.bands(128, 128 * columns, False) == 1
