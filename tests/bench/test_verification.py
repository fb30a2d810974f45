"""The verification of the benchmark: exact integers are exact, every kind of input is judged, faults are found."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import reference
from fusedlayers.bench import cases, exactness, verification
from fusedlayers.bench.cases import CASES, Options
from fusedlayers.bench.contenders import Contender
from fusedlayers.bench.work import Work, random_work, reference_results
from tests.support import seeds

CPU = torch.device("cpu")
FFN, GEMM_GEMM, GEMM_REDUCE = CASES["ffn"], CASES["gemm_gemm"], CASES["gemm_reduce"]
WEIGHT_GRADIENT = CASES["weight_gradient"]
PLAIN = Options("gelu_tanh", bias=True)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("case", "options", "shape"),
    [
        (FFN, Options("relu", bias=True), (130, 48, 100)),
        (FFN, Options("relu", gated=True), (130, 48, 100)),
        (GEMM_GEMM, Options("identity"), (2, 70, 130, 24, 40)),
        (GEMM_REDUCE, Options(op="max", dim=-1), (2, 70, 130, 24)),
        (GEMM_REDUCE, Options(op="sum"), (2, 70, 130, 24)),
        (CASES["maxsim"], Options("identity"), (5, 7, 9, 33, 24)),
        (WEIGHT_GRADIENT, Options(bias=True), (70, 24, 40)),
        (WEIGHT_GRADIENT, Options(), (70, 24, 40)),
    ],
    ids=["ffn", "gated_ffn", "gemm_gemm", "reduce max", "reduce sum", "maxsim", "weight_gradient", "without db"],
)
def test_integer_inputs_stay_exact(case: cases.Case, options: Options, shape: cases.Shape, dtype: str) -> None:
    work, truth = exactness.exact_work(case, options, shape, dtype=cases.DTYPES[dtype], device=CPU, seed=0)
    for tensor in (*work.inputs.values(), *work.upstream):
        assert set(tensor.unique().tolist()) <= {-2, -1, 0, 1, 2}
    for tensor in truth:
        assert tensor.any()
        assert torch.equal(tensor, tensor.round())
        assert torch.equal(tensor, tensor.to(cases.DTYPES[dtype]).double())
    found = verification.verify(case, options, shape, init="integer", dtype=cases.DTYPES[dtype], device=CPU)
    expected = ["y", *(f"d{name}" for name in work.inputs)] if case.backward else case.results[: len(truth)]
    assert [finding.message for finding in found[0].findings] == [f"{name}: equal" for name in expected]
    assert found[0].status == "green"


def test_frozen_operands_have_no_gradient_to_be_judged_or_counted() -> None:
    case, shape = CASES["lora_ffn"], (40, 24, 40, 4)
    work = random_work(case, PLAIN, shape, cases.Draw(torch.float32, CPU), backward=True)
    assert list(work.leaves) == ["x", "up_a", "up_b", "down_a", "down_b"]
    assert not any(work.inputs[name].requires_grad for name in ("w_up", "w_down", "b_up", "b_down"))
    found = verification.verify(case, PLAIN, shape, init="normal", dtype=torch.float32, device=CPU)
    assert found[0].status == "green"
    assert [finding.tensor for finding in found[0].findings] == ["y", *(f"d{name}" for name in work.leaves)]
    assert case.flops(shape, PLAIN, True) == 2 * case.flops(shape, PLAIN, False)


@pytest.mark.parametrize(("lucky", "fault", "draws"), [(0, 1.0, 1), (1, 1.0, 4), (0, 1.001, 4)])
def test_what_is_not_close_is_judged_over_more_draws(
    monkeypatch: pytest.MonkeyPatch, lucky: int, fault: float, draws: int
) -> None:
    """A right result becomes green where torch was lucky in the first of them, and a wrong one stays red."""
    errors, drawing, run = [], seeds.generator(), Work.run

    def rounded(work: Work, size: float) -> tuple[Tensor, ...]:
        """The right results and errors of this size: those of real products depend on the processor."""
        exact = reference_results(FFN, PLAIN, work)
        noise = (torch.randn(each.shape, generator=drawing, dtype=each.dtype) for each in exact)
        return tuple((each + size * each.std() * more).float() for each, more in zip(exact, noise, strict=True))

    def theirs(case: cases.Case, options: Options, work: Work) -> tuple[Tensor, ...]:
        errors.append(4e-6 if len(errors) < lucky else 1e-5)
        return rounded(work, errors[-1])

    ours = Contender("auto", lambda **inputs: pytest.fail("its results are made up"))
    monkeypatch.setattr(verification, "contender", lambda *arguments: ours)
    monkeypatch.setattr(verification, "torch_results", theirs)
    monkeypatch.setattr(
        Work, "run", lambda work, call: [fault * each for each in rounded(work, 1e-5)] if call is ours.call
        else run(work, call)
    )  # fmt: skip
    found = verification.verify(FFN, PLAIN, (200, 300, 64), init="normal", dtype=torch.float32, device=CPU)
    assert found[0].status == ("green" if fault == 1.0 else "red"), found[0].summary()
    assert len(errors) == draws


def test_an_integer_result_that_is_off_by_one_is_red() -> None:
    def off_by_one(*, x: Tensor, **keywords: Any) -> Tensor:
        bump = torch.zeros(x.shape[0], 1)
        bump[7] = 1
        return reference.ffn(x, **keywords) + bump

    case = dataclasses.replace(FFN, ours=off_by_one)
    found = verification.verify(case, Options("relu"), (70, 24, 40), init="integer", dtype=torch.float32, device=CPU)
    assert found[0].status == "red"
    assert "y: NOT equal at 24 of 1680 elements, first at (7, 0)" in found[0].summary()


def test_the_exactness_watch_sees_inside_the_computation() -> None:
    """The hidden overflows the integers of bfloat16 although the result does not."""
    with exactness.ExactnessWatch() as watch:
        hidden = torch.full((1, 1), 300.0, dtype=torch.float64) * 1
        _ = hidden * 0
    assert not watch.within(torch.bfloat16)
    assert watch.within(torch.float16)
    with exactness.ExactnessWatch() as watch:
        _ = torch.full((1, 1), 3.0, dtype=torch.float64) * 0.5
    assert not watch.within(torch.bfloat16)


def test_integers_that_cannot_stay_exact_are_refused() -> None:
    with pytest.raises(ValueError, match="activation gelu leaves the integers"):
        exactness.exact_work(FFN, Options("gelu"), (8, 8, 8), dtype=torch.float32, device=CPU, seed=0)
    # A sum over so many tokens leaves the integers of bfloat16 until the inputs are so sparse that a result vanishes.
    many_tokens = (20000, 1, 1)
    with pytest.raises(ValueError, match="no density of non-zero values keeps every step of 20000x1x1 exact"):
        exactness.exact_work(FFN, Options("relu2"), many_tokens, dtype=torch.bfloat16, device=CPU, seed=1)


@pytest.mark.parametrize("init", ["normal", "uniform", "zeros"])
def test_every_kind_of_input_verifies(init: str) -> None:
    for options in (PLAIN, Options("silu", gated=True, bias=True), dataclasses.replace(PLAIN, recompute=True)):
        found = verification.verify(FFN, options, (70, 24, 40), init=init, dtype=torch.float32, device=CPU)
        assert found[0].status == "green"
        assert found[0].path == ("chunked" if options.recompute is True else "torch")


@pytest.mark.interpreter
def test_the_forced_kernels_are_verified_too() -> None:
    for init in ("normal", "integer"):
        found = verification.verify(FFN, Options("relu"), (40, 16, 40), init=init, dtype=torch.float32, device=CPU)
        assert [(one.contender, one.path, one.status) for one in found] == [
            ("auto", "torch", "green"),
            ("fused", "fused", "green"),
        ]
    found = verification.verify(FFN, PLAIN, (40, 16, 40), init="normal", dtype=torch.bfloat16, device=CPU)
    assert found[1].summary() == "fused: not run: Triton's interpreter computes bfloat16 products wrongly"


def test_the_users_switches_do_not_decide_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "nonsense")
    monkeypatch.delenv("FUSEDLAYERS_STRICT", raising=False)
    found = verification.verify(FFN, PLAIN, (8, 8, 8), init="normal", dtype=torch.float32, device=CPU)
    assert found[0].status == "green"
    assert os.environ["FUSEDLAYERS_BACKEND"] == "nonsense"
    assert "FUSEDLAYERS_STRICT" not in os.environ
