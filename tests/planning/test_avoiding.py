"""Configurations that failed the self-test: named, avoided whatever the user wishes, and explained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import fusedlayers as fl
from fusedlayers import explaining, functional, planning
from fusedlayers.functional import dispatch
from fusedlayers.functional.ffn.arguments import ffn_problem
from fusedlayers.functional.operation import OPERATIONS
from fusedlayers.planning import (
    Call,
    Device,
    HiddenGradientProblem,
    LinearProblem,
    MaxSimProblem,
    Problem,
    ReduceProblem,
    WeightGradientProblem,
    configurations,
    plan,
)
from fusedlayers.planning.linear_cross_entropy import LossProblem
from fusedlayers.planning.lora_ffn import LoRAProblem
from tests.support.records import H200

SIZES = {"M": 2**20, "K": 128, "N": 512, "O": 128}
BLOCK = Problem(
    "ffn", batch=1, **SIZES, dtype="bfloat16", activation="gelu", needs_data_gradient=True, needs_weight_gradient=True
)
PROBLEMS: dict[str, Call] = {
    "ffn": BLOCK,
    "gemm_gemm": Problem("gemm_gemm", batch=64, **SIZES | {"M": 4096}, dtype="float16"),
    "gemm_reduce": ReduceProblem(64, 2048, 2048, 64, "bfloat16", "max"),
    "maxsim": MaxSimProblem(64, 128, 2048, 2**16, 128, "bfloat16"),
    "weight_gradient": WeightGradientProblem(65536, 256, 256, "bfloat16"),
    "hidden_gradient": HiddenGradientProblem(4096, 512, 128, "bfloat16"),
    "wide ffn": replace(BLOCK, K=1024, O=1024, gated=True),
    "linear_cross_entropy": LossProblem(
        8192, 4096, 128_256, "bfloat16", "mean", needs_data_gradient=True, needs_weight_gradient=True
    ),
    "linear": LinearProblem(
        64, 1024, 8192, "bfloat16", needs_data_gradient=True, needs_weight_gradient=True, needs_bias_gradient=True
    ),
}


def names(made: Any) -> list[str]:
    return [name for found in configurations(made).values() for name in found]


def test_names_tell_kernels_gates_and_sizes_apart() -> None:
    made = plan(BLOCK, H200, "triton")
    assert set(configurations(made)) == {"forward_tiles", "data_gradient_tiles", "weight_gradient_tiles"}
    sm90, generic = configurations(made)["forward_tiles"]
    assert sm90.startswith("gemm_gemm forward, 16 bits: Sm90Config(block=128, consumers=2, stages=")
    assert generic.startswith("gemm_gemm forward, 16 bits: TileConfig(block_m=128,")
    assert "programs" not in sm90, "another number of SMs compiles nothing else"
    gated = configurations(plan(replace(BLOCK, gated=True), H200, "triton"))["forward_tiles"][0]
    assert gated.startswith("gemm_gemm forward, gated, 16 bits: ")
    assert configurations(plan(replace(BLOCK, dtype="float32"), H200, "torch")) == {}


@pytest.mark.parametrize("operation", PROBLEMS)
def test_no_plan_has_what_is_avoided(operation: str) -> None:
    problem = PROBLEMS[operation]
    usual = plan(problem, H200, "triton")
    assert usual.path == {"wide ffn": "epilogue", "linear_cross_entropy": "chunked"}.get(operation, "fused")
    assert usual.avoided == ()
    for name in names(usual):
        for wish in ("auto", "triton"):
            made = plan(problem, replace(H200, avoided=frozenset({name})), wish)
            assert name not in names(made)
            if wish == "triton":
                assert made.avoided == (name,)


def test_without_a_sm90_configuration_the_generic_kernels_run() -> None:
    sm90, generic = configurations(plan(BLOCK, H200, "triton"))["data_gradient_tiles"]
    made = plan(BLOCK, replace(H200, avoided=frozenset({sm90})), "triton")
    assert made.path == "fused"
    assert made.forward_tiles.sm90 is None
    assert made == replace(plan(BLOCK, replace(H200, backend="generic"), "triton"), avoided=(sm90,))
    # One that could run in place of an sm90 one leaves nothing to trust.
    made = plan(BLOCK, replace(H200, avoided=frozenset({generic})), "triton")
    assert made.path == "torch"
    assert made.unsupported == f"{generic} gave wrong numbers here in the self-test"
    assert dict(made.rejected)["fused"] == made.unsupported


def test_a_plan_within_a_plan_avoids_what_the_operation_itself_does() -> None:
    wide, layer = PROBLEMS["wide ffn"], PROBLEMS["linear"]
    gradient = replace(PROBLEMS["hidden_gradient"], gated=True)
    sm90, generic = (configurations(plan(gradient, H200, "triton"))[field][0] for field in ("pipeline", "tiles"))
    found = configurations(plan(wide, H200, "triton"))
    assert found["epilogue gradient pipeline"] == (sm90,)
    assert found["epilogue gradient tiles"] == (generic,)
    made = plan(wide, replace(H200, avoided=frozenset({sm90})), "triton")
    assert (made.path, made.epilogue.hidden_pipeline, made.epilogue.gradient.pipeline) == ("epilogue", None, None)
    # Of the generic kernels nothing was measured.
    assert plan(wide, replace(H200, avoided=frozenset({sm90}))).path == "torch"
    assert plan(wide, replace(H200, avoided=frozenset({generic})), "triton").path == "torch"

    [sm90] = configurations(plan(layer, H200, "triton"))["weight_gradient pipeline"]
    assert sm90.startswith("weight_gradient pipeline, 16 bits: WeightGradientPipeline(")
    made = plan(layer, replace(H200, avoided=frozenset({sm90})), "triton")
    assert made.weight_gradient.pipeline is None
    assert made.forward.tiles is not None
    [tiles] = configurations(made)["forward tiles"]
    assert tiles.startswith("linear forward tiles, 16 bits: SplitTiles(block_m=64, ")
    made = plan(replace(layer, captured=True), replace(H200, avoided=frozenset({tiles})))
    assert (made.path, made.forward.tiles, made.avoided) == ("torch", None, (tiles,))


def test_what_another_problem_would_take_changes_nothing() -> None:
    device = replace(H200, avoided=frozenset(names(plan(replace(BLOCK, gated=True), H200, "triton"))))
    assert plan(BLOCK, device) == plan(BLOCK, H200)


def test_strict_users_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = configurations(plan(BLOCK, H200, "triton"))["forward_tiles"][1]
    monkeypatch.setattr(dispatch, "describe", lambda where: replace(H200, avoided=frozenset({name})))
    monkeypatch.setenv("FUSEDLAYERS_STRICT", "1")
    with pytest.raises(RuntimeError, match="ffn cannot run in Triton: gemm_gemm forward, 16 bits: TileConfig"):
        dispatch.dispatch(BLOCK, torch.device("cuda"))


def test_explain_names_what_is_avoided_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    x, w_up, w_down = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((2**20, 128), (512, 128), (128, 512))
    )
    with torch.no_grad():
        problem = ffn_problem(x, w_up, w_down, activation="gelu", dropout_p=0.0, recompute="auto")
        name = names(plan(problem, H200, "triton"))[0]
        for module in (dispatch, explaining):
            monkeypatch.setattr(module, "describe", lambda where: replace(H200, avoided=frozenset({name})))
        text = fl.explain(functional.ffn, x, w_up, w_down, details=True)
    assert f"{name}: gave wrong numbers here in the self-test (python -m fusedlayers.bench selftest)" in text
    assert "sm90:" not in text


def every_problem() -> Iterator[Call]:
    """Around every size at which a table or a rule changes its mind."""
    rows, widths = (1, 40, 64, 72, 200, 488, 512, 1024, 65536), (8, 16, 24, 64, 72, 128, 200, 256, 1000)
    for dtype in ("bfloat16", "float32"):
        for K in widths:
            for M in rows:
                for N in rows:
                    for O in {K, *(() if K > 256 else (64, 128))}:
                        wanted = {"needs_data_gradient": True, "needs_weight_gradient": True}
                        for gated in (False, True):
                            for dropout in {False, M == 64}:
                                yield Problem("ffn", 1, M, K, N, O, dtype, gated=gated, dropout=dropout, **wanted)
                        yield Problem("ffn", 1, M, K, N, O, dtype, recompute=True, dropout=M == 64, **wanted)
                        yield Problem("gemm_gemm", 64, M, K, N, O, dtype, **wanted)
                    for training in (False, True):
                        for op in ("max", "sumsq"):
                            one = ReduceProblem(2, M, N, K, dtype, op, masked=M == 64, needs_kept_gradient=training)
                            # Both gradients at once have other tiles where there are more entries than SMs.
                            both = replace(one, needs_reduced_gradient=training)
                            yield from (one, both, replace(both, batch=200))
                        gradients = {"needs_query_gradient": training, "needs_document_gradient": training}
                        yield MaxSimProblem(2, 3, M, 3 * N, K, dtype, **gradients)
                    yield WeightGradientProblem(M, N, K, dtype)
                    yield HiddenGradientProblem(M, N, K, dtype, gated=M > N)
        # So wide that the gradient of x is summed over groups of hidden units.
        for gated, dropout in itertools.product((False, True), repeat=2):
            wanted = {"needs_data_gradient": True, "needs_weight_gradient": True, "recompute": True}
            yield Problem("ffn", 1, 8192, 4096, 14_336, 4096, dtype, gated=gated, dropout=dropout, **wanted)
        for gated in (False, True):
            wanted = {"needs_data_gradient": True, "needs_adapter_gradient": True}
            yield LoRAProblem("lora_ffn", 1, 512, 512, 512, 512, dtype, gated=gated, rank_up=8, **wanted)
        for V in (2, 128, 129, 300, 1000, 1025, 2049, 4097, 128_256):
            wanted = {"needs_data_gradient": True, "needs_weight_gradient": True}
            for recompute in (False, True):
                yield LossProblem(300, 64, V, dtype, "mean", recompute=recompute, **wanted)
            yield LossProblem(300, 64, V, dtype, "mean")
        sides = (1, 2, 16, 17, 32, 33, 64, 65, 128, 2048, 2049)
        for M, N, K in itertools.product(sides, sides, (8, *sides)):
            yield LinearProblem(M, N, K, dtype, needs_data_gradient=True, needs_weight_gradient=True)


@pytest.mark.parametrize(
    "device", [H200, Device("cuda", "A100", "sm_80", sms=108, triton=True)], ids=lambda device: device.name
)
def test_the_selftest_covers_whatever_can_be_planned(device: Device) -> None:
    from fusedlayers.bench.selftest.trials import all_trials, covered, launched

    trials = all_trials(device)
    tried = {type(trial.plan(device).problem) for trial in trials}
    assert tried == {operation.problem_type for operation in OPERATIONS.values()}, "an operation has no trials"
    assert [str(trial) for trial in trials if not launched(trial.plan(device))] == [], "no kernel runs"
    tested = covered(trials, device)
    planned = {name for problem in every_problem() for name in names(planning.plan(problem, device, "triton"))}
    assert planned - tested == set()
    families = {name.split()[0] for name in planned}
    unplanned = {name for name in tested - planned if name.split()[0] in families}
    assert unplanned == set(), "a configuration that nobody can get need not be tested"
