"""The FFN's numbers on every path: against torch in the same dtype and float64, and against exact integers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.kernels import gemm_gemm as kernels
from fusedlayers.kernels.gemm_gemm import Arithmetic, Operands, WeightGradients
from fusedlayers.kernels.tuning import TileConfig
from tests.support.operands import (
    BIASES,
    DEVICE,
    DTYPES,
    EPILOGUE,
    INTEGERS,
    PATHS,
    Tensors,
    assert_equal,
    assert_ffn_close,
    ffn_inputs,
    in_float64,
    like_result,
    needs_kernels,
    on_path,
    results,
)
from tests.support.selection import draws
from tests.support.uninitialised import allocate_by

GATED = [pytest.param(False, id="plain"), pytest.param(True, id="gated")]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("path", [*PATHS[:2], EPILOGUE])
def test_every_subset_of_biases(path: str, gated: bool, residual: bool) -> None:
    for count in range(4):
        for biases in itertools.combinations(BIASES, count):
            if gated or "b_gate" not in biases:
                inputs = ffn_inputs(20, 6, 18, 5, gated=gated, biases=biases, residual=residual)
                with on_path(path) as options:
                    assert_ffn_close(functional.ffn, inputs, options=options, activation="gelu_tanh")


def exact_case(gated: bool, dtype: torch.dtype, rows: tuple[int, ...] | int) -> tuple[dict[str, Tensor | None], Tensor]:
    draw = INTEGERS[dtype]
    inputs = ffn_inputs(rows, 5, 37, 6, dtype, gated=gated, residual=True, draw=draw)
    return inputs, like_result(inputs, draw)


NAMES = ("up", "gate", "down", "up_bias", "gate_bias")
ROLES = ("w_up", "w_gate", "w_down", "b_up", "b_gate")


def operands_of(inputs: Tensors, activation: str) -> Operands:
    x, up, down = (inputs[name] for name in ("x", "w_up", "w_down"))
    gate = inputs["w_gate"]
    return Operands(
        x[None], up[None], down[None], inputs["b_up"], None if gate is None else gate[None], inputs["b_gate"], None,
        Arithmetic(activation, 0.0, "ieee", "exact"),
    )  # fmt: skip


def exact_weight_gradients(
    gated: bool, dtype: torch.dtype, splits: int, tiles: TileConfig, wanted: tuple[str, ...]
) -> None:
    """The launcher itself gives the wanted gradients as exact integers, and None for the others."""
    inputs, dy = exact_case(gated, dtype, 70)
    truth = results(reference.ffn, in_float64(inputs), dy.double(), activation="relu")
    asked = WeightGradients(**{name: name in wanted for name in NAMES})
    found = kernels.weight_gradients(operands_of(inputs, "relu"), dy[None], asked, splits, tiles)
    ours = {f"d{role}": gradient for role, gradient in zip(ROLES, found, strict=True)}
    expected = {
        f"d{role}": truth[f"d{role}"][None] if name in wanted else None for role, name in zip(ROLES, NAMES, strict=True)
    }
    assert_equal(in_float64(ours), expected)


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tiles", "gated"),
    [(TileConfig(16, 16, 4, 1), False), (TileConfig(32, 16, 4, 1, 3), True), (TileConfig(16, 32, 4, 1, 2), True)],
    ids=str,
)
def test_exact_integers_for_any_number_of_splits(
    tiles: TileConfig, gated: bool, dtype: torch.dtype, splits: int
) -> None:
    """Ragged last blocks and splits with nothing to do: 70 rows are three tiles of 32."""
    everything = NAMES if gated else ("up", "down", "up_bias")
    exact_weight_gradients(gated, dtype, splits, tiles, everything)


@needs_kernels
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_exact_integers_for_every_subset_of_gradients(count: int) -> None:
    """The partials of the wanted gradients lie behind one another, whichever they are."""
    for wanted in itertools.combinations(NAMES, count):
        exact_weight_gradients(True, torch.float32, 3, TileConfig(32, 32, 4, 1), wanted)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partial_sums_are_rounded_once(dtype: torch.dtype) -> None:
    """The halves of the rows sum up to 3103 and -3104, of which 16 bits know only one."""
    ones = {name: torch.ones(shape, device=DEVICE, dtype=dtype) for name, shape in (("x", (64, 1)), ("w", (1, 1)))}
    dy = torch.cat((torch.full((32, 1), 97.0), torch.full((32, 1), -97.0))).to(DEVICE, dtype)
    dy[0] = 96
    x, w = ones["x"][None], ones["w"][None]
    operands = Operands(x, w, w, None, None, None, None, Arithmetic("identity", 0.0, "ieee", "exact"))
    asked = WeightGradients(up=True, down=True, up_bias=True)
    found = kernels.weight_gradients(operands, dy[None], asked, 2, TileConfig(32, 16, 4, 1))
    assert [None if gradient is None else gradient.item() for gradient in found] == [-1, None, -1, -1, None]


@needs_kernels
@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("splits", [1, 3])
def test_nothing_outside_of_the_outputs_is_touched(gated: bool, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and workspace lie between bands of a known value, and every element of theirs is written."""
    buffers: list[tuple[Tensor, int]] = []
    band = 4096

    def guarded(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = torch.full((shape.numel() + 2 * band,), -7.0, dtype=dtype, device=device)
        buffer[band:-band] = math.nan
        buffers.append((buffer, band))
        return buffer[band:-band].view(shape)

    inputs, dy = exact_case(gated, torch.float32, 49)
    operands = operands_of(inputs, "gelu")
    allocate_by(monkeypatch, guarded)
    tiles = TileConfig(32, 16, 4, 1)
    kernels.forward(operands, inputs["b_down"], inputs["residual"][None], tiles)
    kernels.data_gradient(operands, dy[None], tiles)
    kernels.weight_gradients(operands, dy[None], WeightGradients(True, gated, True, True, gated), splits, tiles)
    assert len(buffers) == 2 + (5 if gated else 3) + (splits > 1)
    for buffer, width in buffers:
        assert (buffer[:width] == -7).all()
        assert (buffer[-width:] == -7).all()
        assert buffer[width:-width].isfinite().all()


@pytest.mark.bits
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("path", [*PATHS[:2], EPILOGUE])
def test_runs_give_the_same_bits(path: str) -> None:
    """One column tile and many row tiles: the weight gradients are split."""
    inputs = ffn_inputs(150, 9, 13, 7, DTYPES[-1], gated=True, residual=True)
    dy = like_result(inputs)

    def run() -> dict[str, Tensor | None]:
        torch.manual_seed(4)
        return results(functional.ffn, inputs, dy, dropout_p=0.2, **options)

    with on_path(path) as options:
        first = run()
        for _ in range(draws(2, 9)):
            assert_equal(run(), first)
