"""Which calls run in 8 bits: by device, widths, dtype, wish and size; and what such a plan says."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

from fusedlayers import planning
from fusedlayers.planning import (
    CARDS,
    Device,
    Float8LinearProblem,
    Float8MoeProblem,
    Float8Plan,
    Float8Problem,
    LinearProblem,
    Problem,
)
from fusedlayers.planning.float8 import LIMITS, ROWWISE, ROWWISE_BF16, Float8LoRAProblem
from fusedlayers.planning.lora_ffn import LoRAProblem

H100 = CARDS["H100"]
GENERIC = replace(H100, backend="generic")
NOT_TRITON = Device("cuda", "H100", "sm_90", 132)
SIZES = {"M": 16_384, "K": 2048, "N": 8192}
TRAINED = {"needs_data_gradient": True, "needs_weight_gradient": True}


def ffn(**facts: Any) -> Float8Problem:
    return Float8Problem(**{"operation": "ffn", "batch": 1, "O": 2048, "dtype": "bfloat16", **SIZES, **facts})


def linear(**facts: Any) -> Float8LinearProblem:
    return Float8LinearProblem(**{"dtype": "bfloat16", **SIZES, **facts})


PROBLEMS = pytest.mark.parametrize("make", [ffn, linear])


@PROBLEMS
def test_wide_calls_on_an_h100(make: Any) -> None:
    for facts in ({}, TRAINED, {"dtype": "float16"}):
        plan = planning.plan(make(**facts), H100)
        assert isinstance(plan, Float8Plan)
        assert plan.path == "float8"
        assert plan.product_pipeline.bits == 8
        assert plan.floor_seconds < plan.problem.plain.plan(H100, "auto").floor_seconds
        assert dict(plan.facts(H100))["precision"] == "fp8, a scale for each row; weight gradients in 8 bits"


def test_weight_gradients_in_8_bits_where_that_pays() -> None:
    """By the widths alone, so that both passes, and passes without gradients, agree on what is saved."""
    for recipe, expected in (("fp8", (False, True)), ("rowwise", (True, True)), ("rowwise_with_gw_hp", (False, False))):
        narrow, wide = linear(K=1536, N=1536, recipe=recipe), linear(K=4096, N=4096, recipe=recipe)
        assert (narrow.weight_gradient_in_8_bits, wide.weight_gradient_in_8_bits) == expected
        narrow, wide = ffn(K=1024, N=2048, O=1024, recipe=recipe), ffn(K=4096, N=14_336, O=4096, recipe=recipe)
        for name in ("up_gradient_in_8_bits", "down_gradient_in_8_bits"):
            assert (getattr(narrow, name), getattr(wide, name)) == expected
        texts = [dict(planning.plan(each, H100).facts(H100))["precision"] for each in (narrow, wide)]
        assert texts == [
            f"fp8, a scale for each row; weight gradients in {8 if each else 16} bits" for each in expected
        ]
    between = ffn(K=1536, N=1536, O=1536, gated=True, activation="relu2")
    assert "the weight gradient of w_down in 16 bits" in dict(planning.plan(between, H100).facts(H100))["precision"]


def test_what_is_compiled_takes_smaller_calls() -> None:
    facts = {"M": 16_384, "K": 2048, "N": 2048, **TRAINED}
    assert planning.plan(linear(**facts), H100).path == "bf16"
    assert planning.plan(linear(**facts, compiled=True), H100).path == "float8"
    assert planning.plan(linear(**facts, captured=True), H100).path == "float8"


@PROBLEMS
@pytest.mark.parametrize(
    ("facts", "device", "backend", "reason"),
    [
        ({}, H100, "torch", "the backend is set to torch"),
        ({}, GENERIC, "auto", "warp-specialised"),
        ({}, GENERIC, "triton", "warp-specialised"),
        ({}, NOT_TRITON, "auto", "Triton is not installed"),
        ({}, replace(H100, left_to_torch="an unknown release"), "auto", "an unknown release"),
        ({}, replace(H100, release_note="Triton 9"), "auto", "no products in 8 bits: Triton 9"),
        ({"dtype": "float32"}, H100, "triton", "operands of float32"),
        ({"subclass": "DTensor"}, H100, "triton", "DTensor"),
        ({"M": 0}, H100, "triton", "nothing to compute"),
        ({"K": 2056}, H100, "triton", "a width of 2056 is no multiple of 16"),
        ({"K": 512}, H100, "auto", "a width of 512 is below"),
        ({"M": 64}, H100, "auto", "the call is too small"),
    ],
)
def test_why_a_call_stays_in_16_bits(
    make: Any, facts: dict[str, Any], device: Device, backend: str, reason: str
) -> None:
    problem = make(**facts)
    plan = planning.plan(problem, device, backend)
    assert plan.path == "bf16"
    assert reason in plan.reason
    assert plan.unsupported is None
    if device is H100 and backend == "auto" and not facts.get("dtype"):
        assert planning.plan(problem, device, "triton").path == "float8"


def test_what_of_a_call_8_bits_cannot_give() -> None:
    for problem, reason in (
        (ffn(recompute=True, **TRAINED), "recompute=True forbids"),
        (ffn(saved_limit=2**20, **TRAINED), "more bytes than recompute= allows"),
        (ffn(saved_limit=2**20), "more bytes than recompute= allows"),
        (linear(split_k=2), "ask for split kernels"),
        (linear(atomic=True), "ask for split kernels"),
    ):
        assert reason in planning.plan(problem, H100, "triton").reason
    assert planning.plan(ffn(saved_limit=2**40, **TRAINED), H100).path == "float8"


def test_fewer_flops_inside_of_a_graph() -> None:
    rows = LIMITS.least_flops // (2 * SIZES["K"] * SIZES["N"])
    assert planning.plan(ffn(M=rows), H100).path == "bf16"
    assert planning.plan(ffn(M=rows, captured=True), H100).path == "float8"
    assert planning.plan(ffn(M=rows - 1, captured=True), H100).path == "bf16"


def test_products_of_a_kernel_count_if_they_are_launched() -> None:
    """Up and gate share a kernel and its launches, so each may be smaller than the product of a linear layer."""
    least, least_linear = LIMITS.least_launched_flops, LIMITS.least_launched_linear_flops
    for problem, flops, products in ((linear(), least_linear, 1), (ffn(), least, 1), (ffn(gated=True), least, 1.5)):
        rows = math.ceil(flops / (2 * SIZES["K"] * SIZES["N"] * products))
        assert planning.plan(replace(problem, M=rows), H100).path == "float8"
        assert planning.plan(replace(problem, M=rows - 1), H100).path == "bf16"


def test_what_the_epilogues_write_in_8_bits() -> None:
    """The hidden of activations that are bounded; the gradients if all who read them take 8 bits."""
    wide = {"K": 1024, "N": 4096, "O": 1024}
    for facts, expected in (
        ({}, (True, True)),
        ({"recipe": "rowwise_with_gw_hp"}, (True, False)),
        ({"recipe": "rowwise", "N": 64}, (True, True)),
        ({"N": 64}, (True, False)),
        ({"gated": True, "K": 8192, "N": 8192, "O": 8192}, (True, True)),
        ({"gated": True, "K": 8208, "N": 8192, "O": 8192}, (False, False)),
        ({"K": 8208, "N": 8192, "O": 8192}, (True, True)),
        ({"activation": "relu2"}, (False, False)),
        ({"activation": "sigmoid"}, (False, False)),
        ({"activation": "tanh"}, (True, True)),
        ({"activation": "tanh", "gated": True}, (False, False)),
        ({"biased": True}, (True, True)),
        ({"biased": True, "gated": True}, (False, False)),
    ):
        problem = ffn(**TRAINED, **wide | facts)
        assert (problem.bounded, problem.gradients_bounded) == expected
        if problem.bounded:
            assert (problem.up_gradient_in_8_bits, problem.down_gradient_in_8_bits) == (expected[1],) * 2


@PROBLEMS
def test_problems_are_plain_data(make: Any) -> None:
    problem = make(**TRAINED)
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert type(problem.plain) is (Problem if make is ffn else LinearProblem)
    assert problem != problem.plain
    assert hash(problem) != hash(replace(problem, recipe="other"))
    # What is kept is what the layer in 16 bits keeps in its kernels.
    assert planning.plan(problem, H100).saved_bytes == problem.plain.plan(H100, "auto").saved_bytes


@PROBLEMS
def test_a_configuration_that_failed_the_self_test(make: Any) -> None:
    plan = planning.plan(make(), H100)
    for names in planning.configurations(plan).values():
        found = planning.plan(make(), replace(H100, avoided=frozenset(names)))
        assert found.path == "bf16"
        assert found.avoided


def test_adapters() -> None:
    """Frozen weights: nothing but the adapters is in 16 bits, and what is kept is what the layer in 16 bits keeps."""
    ranks = {"rank_up": 16, "rank_gate": 16, "rank_down": 16, "gated": True, "needs_adapter_gradient": True}
    problem = Float8LoRAProblem(
        operation="lora_ffn", batch=1, O=2048, dtype="bfloat16", needs_data_gradient=True, **SIZES, **ranks
    )
    plan, plain = planning.plan(problem, H100), planning.plan(problem.plain, H100)
    assert (plan.path, plain.path) == ("float8", "epilogue")
    assert type(problem.plain) is LoRAProblem
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert plan.saved_bytes == plain.saved_bytes
    assert plan.flops == plain.flops
    assert plan.floor_seconds < 0.6 * plain.floor_seconds
    assert dict(plan.facts(H100))["precision"] == "fp8, a scale for each row; weight gradients in 16 bits"
    trained = replace(problem, needs_weight_gradient=True)
    assert trained.flops_in_16_bits == problem.flops_in_16_bits + 6 * problem.M * problem.N * problem.K
    assert replace(problem, adapter_dropout=True).workspace_bytes > problem.workspace_bytes
    assert planning.plan(replace(problem, M=64), H100).path == "bf16"


def experts(**facts: Any) -> Float8MoeProblem:
    sizes = {"M": 8192, "K": 4096, "N": 14_336, "E": 8, "top_k": 2, "gated": True}
    return Float8MoeProblem(**{"dtype": "bfloat16", **sizes, **facts})


@pytest.mark.parametrize("training", [False, True])
def test_experts_with_many_rows(training: bool) -> None:
    for facts in ({}, {"M": 16_384}, {"captured": True}):
        plan = planning.plan(experts(training=training, biased=True, **facts), H100)
        assert plan.path == "float8"
        assert plan.problem.plain.biased
        assert plan.hidden_pipeline.bits == plan.product_pipeline.bits == 8
        assert plan.floor_seconds < plan.problem.plain.plan(H100, "auto").floor_seconds
        found = dict(plan.facts(H100))
        assert found["precision"] == "fp8, a scale for each row; weight gradients in 8 bits"
        assert (plan.scaled_gradient_pipeline is not None) == training
        assert "each expert's padded to a multiple of 128" in found["rows"]


@pytest.mark.parametrize("training", [False, True])
def test_experts_with_few_rows_stay_in_16_bits(training: bool) -> None:
    """Whether there are gradients or not: both passes of a checkpoint must agree."""
    small = experts(M=8192, K=2048, N=768, E=128, top_k=8, training=training)
    plan = planning.plan(small, H100)
    assert plan.path == "bf16"
    reason = f"the experts are narrow or have few rows for their weights: {small.reuse:.0f} FLOPs in products"
    assert plan.reason.startswith(reason)
    assert planning.plan(small, H100, "triton").path == "float8"
    assert planning.plan(replace(small, M=4 * small.M), H100).path == "float8"
    assert "the call is too small" in planning.plan(experts(M=32_768, K=1024, N=1024, E=1, top_k=1), H100).reason


def test_weight_gradients_of_experts() -> None:
    """In 8 bits where transposing takes less than it gains and tiles end where experts do, in 16 by the recipe."""

    def in_8_bits(**facts: Any) -> tuple[bool, bool]:
        problem = experts(training=True, **facts)
        return problem.up_gradient_in_8_bits, problem.down_gradient_in_8_bits

    assert in_8_bits() == (True, True)
    assert in_8_bits(recipe=ROWWISE_BF16) == (False, False)
    assert in_8_bits(K=512, N=1024) == (True, False)
    assert in_8_bits(K=512, N=1024, recipe=ROWWISE) == (True, True)
    assert in_8_bits(N=14_336 + 32) == (False, False)
    whole, mixed = experts(training=True), experts(training=True, recipe=ROWWISE_BF16)
    assert whole.flops_in_16_bits == experts(training=True, frozen=True).flops_in_16_bits == 0
    assert mixed.flops_in_16_bits == sum(mixed.model_flops) // 3
    # The products of weight gradients count, and so does transposing their operands.
    assert mixed.reuse < whole.reuse < 1.5 * mixed.reuse
    # With weight gradients in 16 bits quantising pays from more FLOPs on.
    few = {"M": 16_384, "K": 2048, "N": 768, "E": 128, "top_k": 8}
    assert planning.plan(experts(**few), H100).path == "float8"
    assert planning.plan(experts(**few, recipe=ROWWISE_BF16), H100).path == "bf16"


def test_experts_that_cannot_be_numbered() -> None:
    plan = planning.plan(experts(M=2**31), H100, "triton")
    assert plan.path == "bf16"
    assert "more than have a 32-bit number" in plan.reason
