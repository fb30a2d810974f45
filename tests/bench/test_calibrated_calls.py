"""What `calibrate` measures: published sizes, calls named on the command line, and those of a user's own model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusedlayers.bench.calibrate import candidates
from fusedlayers.bench.cases import CASES, Options
from fusedlayers.bench.cases.trial import Trial
from tests.support.operands import forget_calls


def test_published_sizes_come_one_of_each_grid_after_the_other() -> None:
    found = candidates.published("bf16")
    assert len(found) == len(set(found)) > 100
    assert {trial.case for trial in found} == CASES.keys()
    first = [trial.case for trial in found[:40]]
    assert first.index("gemm_gemm") < 20, "a short run has something of everything"
    both = [trial for trial in found if trial.case == "ffn" and trial.shape == (16384, 1024, 4096)]
    assert [trial.backward for trial in both] == [False, True]
    assert any(trial.shape == (4095, 1024, 4096) for trial in found), "an odd number of fewer rows"
    assert all(not trial.backward for trial in found if trial.case == "weight_gradient")


@pytest.mark.parametrize(
    ("text", "options", "shape"),
    [
        ("ffn:64x32x128", CASES["ffn"].grids[0].options, (64, 32, 128)),
        ("ffn:64×32×128:silu,gated", Options("silu", gated=True), (64, 32, 128)),
        ("ffn:64x32x128:gelu,bias", Options("gelu", bias=True), (64, 32, 128)),
        ("gemm_reduce:2x3x4x8:max,columns", Options(op="max", dim=-1), (2, 3, 4, 8)),
        ("split_k:1x2x3:bias", Options(bias=True), (1, 2, 3)),
        ("linear_cross_entropy:8x16x100", Options(op="mean"), (8, 16, 100)),
    ],
)
def test_calls_are_named_in_one_word(text: str, options: Options, shape: tuple[int, ...]) -> None:
    assert candidates.parse_candidate(text) == (CASES[text.split(":")[0]], options, shape)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ff:1x2x3", "expected CASE:SIZES[:WORD,...] with a case out of "),
        ("ffn", "expected 3 positive integers MxKxN"),
        ("ffn:1x2", "expected 3 positive integers MxKxN"),
        ("ffn:1x2x3:swish", "'swish' of 'ffn:1x2x3:swish': expected words out of identity"),
        ("split_k:1x2x3:gated", "expected words out of identity"),
        ("gemm_reduce:1x2x3x4:bias", "expected words out of identity"),
        ("ffn:1x2x3:max", "'max' of"),
    ],
)
def test_a_wrong_word_is_named(text: str, words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        candidates.parse_candidate(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("trial", [trial for trial in candidates.published("bf16") if trial.shape[0] > 1], ids=str)
def test_the_call_of_a_problem_has_that_problem(trial: Trial) -> None:
    problem: Any = trial.problem()
    found = candidates.trial_of(problem)
    if found is None:
        # Both axes of these are one number in a problem, or how operands lie is part of it.
        assert trial.case in ("gemm_reduce", "maxsim")
    else:
        assert found.problem() == problem


MODEL = """
import torch
from torch import nn

def build():
    block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
    return nn.Sequential(nn.Linear(8, 16), block), {"input": torch.randn(40, 8)}

def tensor():
    return torch.ones(3)

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 4)
    def forward(self, x):
        from fusedlayers import functional
        queries = self.proj(x).unsqueeze(0)
        return {"scores": (functional.maxsim(queries, queries), None)}

def late():
    return Head(), torch.randn(5, 16)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_calls()
    yield
    sys.modules.pop("own_model", None)


@pytest.mark.usefixtures("model")
def test_a_model_is_measured_at_its_own_sizes() -> None:
    found, left = candidates.of_model("own_model:build")
    options = Options("gelu", bias=True, dropout_p=0.1)
    assert found == [
        Trial("ffn", options, (40, 16, 64), "fp32"),
        Trial("ffn", options, (9, 16, 64), "fp32"),
        Trial("ffn", replace(options, dropout_p=0.0), (40, 16, 64), "fp32", backward=False),
        Trial("ffn", replace(options, dropout_p=0.0), (9, 16, 64), "fp32", backward=False),
    ]
    assert left == []


@pytest.mark.usefixtures("model")
def test_what_no_case_calls_is_said() -> None:
    found, left = candidates.of_model("own_model:late")
    assert found == []
    assert [words.split(" (")[0] for words in left] == ["maxsim, Q=1"] * 2


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_model", "expected MODULE:FUNCTION"),
        ("own_model:nothing", "has no attribute 'nothing'"),
        ("no_such_module:build", "No module named"),
        ("own_model:tensor", "expected a function that gives (model, inputs)"),
    ],
)
def test_a_model_that_is_none_is_named(name: str, words: str) -> None:
    with pytest.raises(ValueError, match="argument --model: ") as caught:
        candidates.of_model(name)
    assert words in str(caught.value)
