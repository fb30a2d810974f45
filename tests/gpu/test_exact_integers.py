"""Integers in, the exact integers out, again and again: every shipped configuration, width, split and ragged tail.

Operands lie in {-2 .. 2} and every intermediate is exact, so one wrong lane of one product shows, also where a compiler
gets a configuration wrong only now and then. Buffers are full of NaN before each run.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, planning, reference
from fusedlayers.bench.cases.ffn import supported, widths_of_rows
from fusedlayers.bench.cases.trial import MACHINES, RAGGED, WHOLE
from fusedlayers.devices import describe
from fusedlayers.kernels import tuning
from tests.gpu.exact import assert_says_something, exact, exact_ffn
from tests.support.operands import DEVICE, SIZES, Tensors, assert_equal, on_path, results, seed_after

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
SPLITS = (1, 2, 3, 5, 8)
REPEATS = 20
FACTS = describe(DEVICE)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def cases() -> list[tuple[torch.dtype, int, bool, str, tuple[int, int]]]:
    found = []
    for gated in (False, True):
        for width in widths_of_rows(16, FACTS):
            found += [(BFLOAT16, width, gated, "relu", size) for size in (WHOLE, RAGGED)]
            found += [(BFLOAT16, width, gated, "identity", WHOLE), (FLOAT16, width, gated, "relu", RAGGED)]
        for width in (16, 24, 32, 48, 61, 80, 96, 101, 160, 192, 203, 253):
            found.append((BFLOAT16, width, gated, "relu", RAGGED))
        found += [(FLOAT16, width, gated, "identity", WHOLE) for width in (16, 80, 192)]
        found += [(FLOAT32, width, gated, "relu", RAGGED) for width in (16, 80, *widths_of_rows(32, FACTS))]
        found += [(FLOAT32, width, gated, "identity", WHOLE) for width in widths_of_rows(32, FACTS)]
    return [case for case in dict.fromkeys(found) if supported(case[0], case[1], case[2], FACTS)]


def machines(dtype: torch.dtype, width: int) -> list[str]:
    """Those that differ for this width; float32, odd widths and those from 129 to 255 have generic kernels alone."""
    takes = tuning.sm90_config("forward", False, 1, WHOLE[0], width, WHOLE[1], width, FACTS.sms) is not None
    if dtype == FLOAT32 or not (takes and FACTS.backend == "sm90"):
        return ["all"]
    fused = {name: facts for name, facts in MACHINES.items() if not facts.keys() & {"workspace", "transposed"}}
    return [name for name, facts in fused.items() if "recompute" not in facts or width == 256]


def named(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return "whole" if value == WHOLE else "ragged"
    return {True: "gated", False: "plain"}[value] if isinstance(value, bool) else str(value).removeprefix("torch.")


def repeat(call: Callable[..., Tensor], inputs: Tensors, dy: Tensor, expected: Tensors, **options: Any) -> None:
    """One after the other with every number of splits, 20 times each: exactly ``expected``."""
    for splits in SPLITS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning.gemm_gemm, "choose_splits", lambda *arguments, splits=splits: splits)
            patch.setattr(planning.gemm_gemm, "choose_stored_splits", lambda *arguments, splits=splits: splits)
            for _ in range(REPEATS):
                assert_equal(results(call, inputs, dy, **options), expected)


@pytest.mark.parametrize(
    ("dtype", "width", "gated", "activation", "size", "machine"),
    [(*case, machine) for case in cases() for machine in machines(*case[:2])],
    ids=named,
)
def test_ffn(dtype: torch.dtype, width: int, gated: bool, activation: str, size: tuple[int, int], machine: str) -> None:
    inputs, dy, expected = exact_ffn(size[0], width, size[1], width, dtype, gated=gated, activation=activation)
    assert_says_something(expected)
    with on_path("kernels", **MACHINES[machine]) as options:
        repeat(functional.ffn, inputs, dy, expected, activation=activation, **options)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("K", "O"), [(256, 24), (24, 256), (64, 128), (200, 3)])
def test_ffn_with_other_widths_out_than_in(K: int, O: int, gated: bool) -> None:
    inputs, dy, expected = exact_ffn(517, K, 200, O, BFLOAT16, gated=gated, residual=True, activation="relu")
    with on_path("kernels") as options:
        repeat(functional.ffn, inputs, dy, expected, activation="relu", **options)


@pytest.mark.parametrize("width", widths_of_rows(16, FACTS))
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_ffn_with_dropout(width: int, gated: bool) -> None:
    # Kept elements are multiplied by 2, so they stay integers.
    options = {"activation": "relu", "dropout_p": 0.5}
    inputs, dy, expected = exact_ffn(*(517, width, 200, width), BFLOAT16, gated=gated, **options, seed=seed_after(1))
    assert_says_something(expected)
    with on_path("kernels") as path:
        for splits in SPLITS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(planning.gemm_gemm, "choose_splits", lambda *arguments, splits=splits: splits)
                torch.manual_seed(1)
                assert_equal(results(functional.ffn, inputs, dy, **options, **path), expected)


def test_more_splits_than_tiles_of_rows() -> None:
    inputs, dy, expected = exact_ffn(100, 64, 96, 64, BFLOAT16, activation="relu")
    with on_path("kernels") as options, pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning.gemm_gemm, "choose_splits", lambda *arguments: 64)
        assert_equal(results(functional.ffn, inputs, dy, activation="relu", **options), expected)


def gemm_gemm_inputs(
    batch: int, M: int, K: int, N: int, O: int, dtype: torch.dtype
) -> Callable[[Callable[..., Tensor]], tuple[Tensors, Tensor]]:
    def draw_inputs(draw: Callable[..., Tensor]) -> tuple[Tensors, Tensor]:
        shapes = {"a": (batch, M, K), "b": (batch, K, N), "c": (batch, N, O)}
        tensors = {name: draw(*shape, dtype=torch.float64).to(DEVICE, dtype) for name, shape in shapes.items()}
        return tensors, draw(batch, M, O, dtype=torch.float64).to(DEVICE, dtype)

    return draw_inputs


def gemm_gemm_cases() -> list[tuple[torch.dtype, int, str | None, tuple[int, int]]]:
    found = [
        (BFLOAT16, width, None, size) for width in (*widths_of_rows(16, FACTS), 48, 80) for size in (WHOLE, RAGGED)
    ]
    found += [(BFLOAT16, width, "relu", WHOLE) for width in widths_of_rows(16, FACTS)]
    found += [(FLOAT16, width, None, RAGGED) for width in widths_of_rows(16, FACTS)]
    found += [(FLOAT32, width, None, RAGGED) for width in widths_of_rows(32, FACTS)]
    return [case for case in found if supported(case[0], case[1], False, FACTS)]


@pytest.mark.parametrize(
    ("dtype", "width", "activation", "size", "machine"),
    [
        (*case, machine)
        for case in gemm_gemm_cases()
        for machine in machines(*case[:2])
        if "recompute" not in MACHINES[machine]
    ],
    ids=named,
)
def test_gemm_gemm(dtype: torch.dtype, width: int, activation: str | None, size: tuple[int, int], machine: str) -> None:
    draw_inputs = gemm_gemm_inputs(3, size[0], width, size[1], width, dtype)
    inputs, dy, expected = exact(reference.gemm_gemm, draw_inputs, dtype, activation=activation)
    assert_says_something(expected)
    with on_path("kernels", **MACHINES[machine]):
        repeat(functional.gemm_gemm, inputs, dy, expected, activation=activation)


@pytest.mark.parametrize("batch", [65_536, 70_000])
def test_gemm_gemm_of_many_small_matrices(batch: int) -> None:
    inputs, dy, expected = exact(reference.gemm_gemm, gemm_gemm_inputs(batch, 5, 16, 9, 16, BFLOAT16), BFLOAT16)
    with on_path("kernels"):
        for _ in range(3):
            assert_equal(results(functional.gemm_gemm, inputs, dy), expected)


@pytest.mark.parametrize("letter", ["M", "N"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_ffn_of_any_number_of_tokens_or_hidden_columns(letter: str, gated: bool) -> None:
    for size in SIZES:
        M, N = (size, 96) if letter == "M" else (130, size)
        inputs, dy, expected = exact_ffn(M, 64, N, 64, BFLOAT16, gated=gated, activation="relu")
        with on_path("kernels") as options:
            assert_equal(results(functional.ffn, inputs, dy, activation="relu", **options), expected)


@pytest.mark.parametrize("width", [size for size in SIZES if size])
def test_ffn_of_any_width(width: int) -> None:
    # Widths that do not fit on chip run, too: through torch, which may round partial sums to bfloat16.
    path, dtype = ("kernels", BFLOAT16) if supported(BFLOAT16, width, False, FACTS) else ("torch", FLOAT32)
    for K, O in ((width, 32), (32, width)):
        inputs, dy, expected = exact_ffn((2, 70), K, 129, O, dtype, activation="relu")
        with on_path(path) as options:
            assert_equal(results(functional.ffn, inputs, dy, activation="relu", **options), expected)


def test_the_dispatcher_has_the_splits_under_test() -> None:
    """What ``repeat`` patches is what the operations read."""
    seen = []
    launched = import_module("fusedlayers.functional.ffn.fused").kernels.weight_gradients
    inputs, dy, expected = exact_ffn(300, 32, 64, 32, BFLOAT16, activation="relu")
    with on_path("kernels") as options, pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning.gemm_gemm, "choose_splits", lambda *arguments: 3)
        module = import_module("fusedlayers.kernels.gemm_gemm")
        patch.setattr(module, "weight_gradients", lambda *a, **k: (seen.append(a[3]), launched(*a, **k))[1])
        assert_equal(results(functional.ffn, inputs, dy, activation="relu", **options), expected)
    assert seen == [3]
