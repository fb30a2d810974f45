"""What a plan says of its costs. A GEMM unit is one product of tokens × K × N."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fusedlayers as fl
from fusedlayers import functional, planning
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.planning import Problem, plan
from tests.planning.test_paths import A100, CPU, H200, INFERENCE, TRAINING
from tests.support.operands import saved


@pytest.mark.parametrize(
    ("gated", "path", "passes", "expected"),
    [
        (False, "torch", 1, (2, 4)),  # six units, as eager
        (True, "torch", 1, (3, 6)),
        (False, "epilogue", 1, (2, 4)),  # pre-activations are kept: nothing is computed twice
        (True, "epilogue", 1, (3, 6)),
        (False, "chunked", 1, (2, 5)),  # the pre-activations once more
        (True, "chunked", 1, (3, 8)),
        (False, "fused", 1, (2, 7)),  # nine for a strict recompute in two kernels
        (True, "fused", 1, (3, 11)),
        (False, "fused", 2, (2, 8)),  # each further pass computes the pre-activation anew
        (True, "fused", 2, (3, 13)),
        (False, "fused", 3, (2, 10)),
        (True, "fused", 3, (3, 16)),
    ],
)
def test_gemm_units(gated: bool, path: str, passes: int, expected: tuple[int, int]) -> None:
    assert planning.gemm_gemm.gemm_units(replace(TRAINING, gated=gated), path, passes) == expected


@pytest.mark.parametrize(
    ("path", "data", "weights"),
    [("torch", (2, 2), (2, 3)), ("epilogue", (2, 2), (2, 3)), ("chunked", (2, 3), (2, 4)), ("fused", (2, 3), (2, 4))],
)
def test_frozen_inputs_cost_no_products(path: str, data: tuple[int, int], weights: tuple[int, int]) -> None:
    assert planning.gemm_gemm.gemm_units(replace(TRAINING, needs_weight_gradient=False), path) == data
    assert planning.gemm_gemm.gemm_units(replace(TRAINING, needs_data_gradient=False), path) == weights
    assert planning.gemm_gemm.gemm_units(INFERENCE, path) == (2, 0)


def test_gemm_units_count_the_columns_of_the_result() -> None:
    wide = replace(TRAINING, K=64, O=128)
    assert planning.gemm_gemm.gemm_units(wide, "torch") == (3, 6)
    assert planning.gemm_gemm.gemm_units(wide, "fused") == (3, (2 + 2) + (2 + 2 * 2))
    assert planning.gemm_gemm.gemm_units(replace(TRAINING, K=0), "torch") == (1, 2)


def test_flops_and_bytes() -> None:
    rows, width, hidden = 131_072, 128, 512
    made = plan(INFERENCE, H200)
    assert made.flops == 2 * rows * width * hidden * 2
    assert made.bytes == 2 * (2 * rows * width + 2 * width * hidden)
    assert (made.saved_bytes, made.backward_units) == (0, 0)
    rows, width, hidden = 1_048_576, 64, 256
    made = plan(TRAINING, H200)
    # Forward and backward each read x or dy and the weights; y, x's and the weights' gradients are written.
    assert made.bytes == 2 * (5 * rows * width + 3 * 2 * width * hidden)
    assert made.flops == 2 * rows * width * hidden * (made.forward_units + made.backward_units)
    assert made.floor_seconds == max(made.flops / 790e12, made.bytes / 4.3e12)
    assert plan(TRAINING, A100).floor_seconds is None
    assert plan(replace(TRAINING, dtype="float32"), H200).floor_seconds is None


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_recompute_saves_x_alone(gated: bool) -> None:
    problem = replace(TRAINING, gated=gated, dropout=True)
    x = 2 * problem.M * problem.K
    assert plan(problem, H200, "triton").saved_bytes == x
    assert plan(replace(problem, recompute=True), CPU).saved_bytes == x
    assert plan(replace(problem, needs_data_gradient=False, needs_weight_gradient=False), H200).saved_bytes == 0


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_saves_what_the_plan_says(activation: str, gated: bool, dropout_p: float) -> None:
    tokens, width, hidden = 64, 16, 48
    weights = {"w_up": (hidden, width), "w_down": (width, hidden), "b_up": (hidden,), "b_down": (width,)}
    weights |= {"w_gate": (hidden, width), "b_gate": (hidden,)} if gated else {}
    tensors = {name: torch.randn(shape, requires_grad=True) for name, shape in weights.items()}
    x = torch.randn(tokens, width, requires_grad=True)
    kept = saved(lambda: functional.ffn(x, **tensors, activation=activation, dropout_p=dropout_p), *tensors.values())
    problem = Problem("ffn", 1, tokens, width, hidden, width, "float32", activation, gated, dropout_p > 0)
    problem = replace(problem, needs_data_gradient=True, needs_weight_gradient=True)
    found = sum(tensor.nbytes for tensor in kept)
    assert plan(problem, CPU).saved_bytes == found
    # There the mask is drawn again.
    mask = problem.hidden_bytes if dropout_p else 0
    assert plan(problem, H200, "torch").saved_bytes == found - mask
    assert plan(replace(problem, dtype="float64"), H200, "torch").saved_bytes == 2 * found


def test_a_budget_is_kept_with_dropout() -> None:
    """Of relu, whose value and what is left of it are both kept."""
    tokens = 64
    layer = fl.FusedFFN(64, 256, "relu", dropout=0.5, recompute=tokens * 2304)
    x = torch.randn(tokens, 64, requires_grad=True)
    assert sum(tensor.nbytes for tensor in saved(lambda: layer(x), *layer.parameters())) <= tokens * 2304
