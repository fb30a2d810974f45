"""The FFN's numbers on every path: against torch in the same dtype and float64, and against exact integers."""

from __future__ import annotations

import itertools
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.kernels import gemm_gemm as kernels
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.kernels.gemm_gemm import Arithmetic, Operands, WeightGradients
from fusedlayers.kernels.tuning import TileConfig
from tests.support.operands import (
    BIASES,
    DEVICE,
    DTYPES,
    EPILOGUE,
    INTEGERS,
    ON_GPU,
    PATHS,
    SIZES,
    Tensors,
    assert_equal,
    assert_ffn_close,
    ffn_inputs,
    in_float64,
    infinities,
    like_result,
    needs_kernels,
    on_path,
    results,
)
from tests.support.selection import draws
from tests.support.uninitialised import allocate_by

GATED = [pytest.param(False, id="plain"), pytest.param(True, id="gated")]


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("path", [*PATHS[:2], EPILOGUE])
def test_activations(path: str, activation: str, dtype: torch.dtype, gated: bool) -> None:
    """Two row tiles and two column tiles, both ragged."""
    inputs = ffn_inputs(70, 24, 50, 40, dtype, gated=gated, residual=True)
    with on_path(path) as options:
        assert_ffn_close(functional.ffn, inputs, options=options, activation=activation)


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


@pytest.mark.parametrize("leading", [(), (3,), (2, 5), (2, 1, 5), (2, 3, 1, 5)], ids=str)
@pytest.mark.parametrize("path", [*PATHS[:2], EPILOGUE])
def test_leading_dimensions(path: str, leading: tuple[int, ...]) -> None:
    inputs = ffn_inputs(leading, 6, 18, 5, residual=True)
    with on_path(path) as options:
        assert_ffn_close(functional.ffn, inputs, options=options)
        assert functional.ffn(**inputs, **options).shape == (*leading, 5)


def exact_case(gated: bool, dtype: torch.dtype, rows: tuple[int, ...] | int) -> tuple[dict[str, Tensor | None], Tensor]:
    draw = INTEGERS[dtype]
    inputs = ffn_inputs(rows, 5, 37, 6, dtype, gated=gated, residual=True, draw=draw)
    return inputs, like_result(inputs, draw)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("activation", ["identity", "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", [*PATHS, EPILOGUE])
def test_exact_integers(path: str, dtype: torch.dtype, activation: str, gated: bool) -> None:
    inputs, dy = exact_case(gated, dtype, 49)
    with on_path(path) as options:
        ours = results(functional.ffn, inputs, dy, activation=activation, **options)
    truth = results(reference.ffn, in_float64(inputs), dy.double(), activation=activation)
    assert_equal(in_float64(ours), truth)


NAMES = ("up", "gate", "down", "up_bias", "gate_bias")
ROLES = ("w_up", "w_gate", "w_down", "b_up", "b_gate")


def operands_of(inputs: Tensors, activation: str) -> Operands:
    x, up, down = (inputs[name] for name in ("x", "w_up", "w_down"))
    assert x is not None
    assert up is not None
    assert down is not None
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


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("letter", ["M", "K", "N", "O"])
@pytest.mark.parametrize("path", [*PATHS, EPILOGUE])
def test_sizes_one_at_a_time(path: str, letter: str, size: int) -> None:
    if path == "kernels" and letter in "KO" and size > 256:
        pytest.skip("wider than the chip: no kernel takes it")
    M, K, N, O = ({"M": 20, "K": 12, "N": 24, "O": 10} | {letter: size}).values()
    inputs = ffn_inputs(M, K, N, O, torch.float32 if size <= 65 else DTYPES[-1], residual=True)
    with on_path(path) as options:
        assert_ffn_close(functional.ffn, inputs, options=options, activation="silu")


@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("path", [*PATHS, EPILOGUE])
def test_no_rows_give_an_empty_result_and_zero_gradients(path: str, leading: tuple[int, ...], gated: bool) -> None:
    inputs = ffn_inputs(leading, 6, 18, 5, gated=gated, residual=True)
    with on_path(path) as options:
        found = results(functional.ffn, inputs, like_result(inputs), dropout_p=0.5, **options)
    assert found.pop("y").shape == (*leading, 5)
    for name, gradient in found.items():
        assert gradient is not None
        tensor = inputs[name[1:]]
        assert tensor is not None
        assert torch.equal(gradient, torch.zeros_like(tensor)), name


@needs_kernels
@hypothesis.settings(max_examples=60 if ON_GPU else draws(6, 15))
@hypothesis.given(
    leading=strategies.lists(strategies.integers(0, 6), max_size=4),
    sizes=strategies.tuples(*[strategies.integers(0, 40)] * 3),
    activation=strategies.sampled_from(list(ACTIVATIONS)),
    gated=strategies.booleans(),
    biases=strategies.sets(strategies.sampled_from(BIASES)),
    residual=strategies.booleans(),
    dropout_p=strategies.sampled_from([0.0, 0.25]),
    dtype=strategies.sampled_from(DTYPES[:2]),
)
def test_sizes_in_random_combinations(
    leading: list[int],
    sizes: tuple[int, int, int],
    activation: str,
    gated: bool,
    biases: set[str],
    residual: bool,
    dropout_p: float,
    dtype: torch.dtype,
) -> None:
    hypothesis.assume(not dropout_p or sizes[1])
    draws = [
        ffn_inputs(tuple(leading), *sizes, dtype, gated=gated, biases=tuple(biases), residual=residual)
        for _ in range(3)
    ]
    empty = 0 in (*leading, *sizes)
    with on_path("kernels") as options:
        assert_ffn_close(
            functional.ffn,
            *draws,
            options=options,
            activation=activation,
            dropout_p=0.0 if empty else dropout_p,
            manual_seed=3,
        )


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


def assert_special_values_equal(ours: Tensors, truth: Tensors, kinds: bool = True) -> None:
    """NaN and the two infinities at the same places; without ``kinds`` only: finite at the same places."""
    for name, tensor in ours.items():
        other = truth[name]
        if tensor is None or other is None:
            continue
        assert torch.equal(tensor.isfinite(), other.isfinite()), name
        if kinds:
            assert torch.equal(tensor.isnan(), other.isnan()), name
            infinite = tensor.isinf()
            assert torch.equal(tensor[infinite].double(), other[infinite]), name


# Where a value comes in decides which sums it spreads to, the activation what becomes of it on the way.
SPECIAL_CASES = [
    *itertools.product(("relu", "gelu"), ("w_up", "w_down", "b_up", "b_down", "w_gate", "b_gate", "residual")),
    *itertools.product(ACTIVATIONS, ("x", "dy")),
]


@pytest.mark.sampled(together=2)
@needs_kernels
@infinities
@pytest.mark.parametrize(("activation", "role"), SPECIAL_CASES)
@pytest.mark.parametrize("gated", GATED)
@pytest.mark.parametrize("path", [PATHS[0], EPILOGUE])
def test_special_values_spread_as_in_torch(path: str, gated: bool, activation: str, role: str) -> None:
    """One NaN or infinity somewhere makes exactly those results NaN or infinite that it makes in torch.

    torch computes the expectation in float64, because the float32 gelu of its CPU has no value at +inf; pre-activations
    are small, so that nothing saturates in one dtype alone. Behind quick_gelu's slope torch adds up two terms, whose
    infinities may cancel to NaN, where the kernels multiply once.
    """
    # A single row cannot hide behind the others' infinities that padding makes a NaN. Each value is in one with or
    # without a gate, on either path, and in many rows in the other case.
    single = (gated, not gated, gated) if path == "kernels" else (not gated, gated, not gated)
    for value, rows in zip((math.nan, math.inf, -math.inf), (1 if one else 18 for one in single), strict=True):
        inputs = ffn_inputs(rows, 5, 20, 6, gated=gated, residual=True)
        dy = like_result(inputs)
        inputs = {name: None if tensor is None else tensor.clamp(-1, 1) for name, tensor in inputs.items()}
        tensor = dy if role == "dy" else inputs[role]
        if tensor is None:
            continue
        tensor.view(-1)[3] = value
        with on_path(path) as options:
            ours = results(functional.ffn, inputs, dy, activation=activation, **options)
        truth = results(reference.ffn, in_float64(inputs), dy.double(), activation=activation)
        assert_special_values_equal(ours, truth, kinds=activation != "quick_gelu")
        if math.isnan(value):
            assert any(tensor.isnan().any() for tensor in ours.values() if tensor is not None)
