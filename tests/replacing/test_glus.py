"""GLUs between two linears of a sequence: modules that multiply the activation of one half of a tensor by the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from tests.support.ffn_blocks import assert_same, pickled, results

WIDTH, UNITS = 6, 10


class GEGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x, gates = x.chunk(2, dim=-1)
        return x * F.gelu(gates)


class SwiGLU(nn.Module):
    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        gates, x = torch.split(x, x.shape[-1] // 2, dim=self.dim)
        return F.silu(gates) * x


class Interleaved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x[..., ::2]) * x[..., 1::2]


class OfItself(nn.Module):
    """A GLU of one half alone, which no gated FFN computes."""

    def forward(self, x: Tensor) -> Tensor:
        x, _ = x.chunk(2, dim=-1)
        return x * F.gelu(x)


class Dropping(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        x, gates = x.chunk(2, dim=-1)
        return F.dropout(x * F.gelu(gates), self.p, self.training)


def sequence(glu: nn.Module, p: float = 0.0) -> nn.Sequential:
    linears = nn.Linear(WIDTH, 2 * UNITS, bias=False), nn.Linear(UNITS, WIDTH)
    return nn.Sequential(nn.LayerNorm(WIDTH), linears[0], glu, nn.Dropout(p), linears[1], nn.ReLU())


def assert_close_to(plain: nn.Module, ours: dict[str, Tensor | None], x: Tensor) -> None:
    assert_all_close(ours, results(plain, x), results(copy.deepcopy(plain).double(), x.double()))


GLUS = {"gelu": GEGLU, "silu": SwiGLU, "sigmoid": nn.GLU}


@pytest.mark.parametrize("activation", GLUS)
def test_it_runs_as_a_gated_ffn(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sequence(GLUS[activation]())
    fused = copy.deepcopy(plain)
    [entry] = fl.replace(fused).replaced
    assert entry.reason.startswith(f"1..4: gated {activation}, {WIDTH} -> {UNITS} -> {WIDTH}")
    x = torch.randn(2, 3, WIDTH)
    assert_same(results(fused, x), results(plain, x))
    assert_same(results(pickled(fused), x), results(plain, x))
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    with decisions() as taken:
        ours = results(fused, x)
    assert sum(taken.values()) == 1
    assert_close_to(plain, ours, x)


def test_even_and_odd_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sequence(Interleaved())
    fused, x = copy.deepcopy(plain), torch.randn(3, WIDTH)
    assert len(fl.replace(fused).replaced) == 1
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    assert_close_to(plain, results(fused, x), x)


def test_it_drops_out_in_training() -> None:
    fused = sequence(GEGLU(), p=0.5)
    fl.replace(fused)
    x = torch.randn(200, WIDTH)
    assert (fused(x) != fused(x)).any()
    assert torch.equal(fused.eval()(x), fused(x))


@pytest.mark.parametrize(
    "other", [OfItself(), nn.GLU(dim=0), SwiGLU(dim=0), Dropping()], ids=["half", "GLU of rows", "rows", "dropout"]
)
def test_what_is_no_glu_of_columns_is_left(other: nn.Module) -> None:
    plain = sequence(other)
    fused = copy.deepcopy(plain)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = fl.replace(fused)
    assert "is not a known one" in report.skipped[0].reason


def test_an_option_that_changes_later() -> None:
    fused = sequence(SwiGLU())
    fl.replace(fused)
    x = torch.randn(2, WIDTH)
    plain = copy.deepcopy(fused)
    fl.restore(plain)
    assert_same(results(fused, x), results(plain, x))
    fused[2].dim = plain[2].dim = -2
    for each in (plain, fused):
        with pytest.raises(ValueError, match="not enough values"):
            each(x)


def test_a_class_that_is_patched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = sequence(GEGLU())
    fl.replace(fused)
    x = torch.randn(2, WIDTH)
    fused(x)
    plain = copy.deepcopy(fused)
    fl.restore(plain)
    monkeypatch.setattr(GEGLU, "forward", lambda self, x: 2 * x[..., :UNITS])
    assert_same(results(fused, x), results(plain, x))


def test_compiled() -> None:
    fused = sequence(GEGLU())
    plain = copy.deepcopy(fused)
    fl.replace(fused)
    x: Any = torch.randn(4, WIDTH)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert_close_to(plain, results(fused, x, call=compiled), x)
