"""What is left because the source of a norm's forward does something else, or may: with the line that does."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from tests.support.norm_modules import WIDTH, Gemma, Llama
from tests.support.written import written

pytestmark = pytest.mark.filterwarnings("ignore:nothing was replaced")


SCALE = "scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)"
# Forwards, and what is said of the line that keeps each from being a norm.
LEFT: dict[str, tuple[str, str]] = {
    "in training": (
        f"{SCALE}\nreturn self.weight * x * scale * (2 if self.training else 1)",
        "branches on what is not known in `return self.weight",
    ),
    "detached": (
        f"{SCALE}.detach()\nreturn self.weight * (x * scale).to(x.dtype)",
        "calls detach of a tensor in `scale = torch.rsqrt(x.pow(2)",
    ),
    "global": (
        f"{SCALE} * len(NORMS)\nreturn self.weight * x * scale", "reads the global variable NORMS in `scale = "
    ),
    "over rows": (
        "return self.weight * x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + self.variance_epsilon)",
        "calls mean along another dimension than the last one in `return self.weight",
    ),
    "eps added to the root": (
        "return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)", "computes "
    ),
}  # fmt: skip


class Pooled(nn.Module):
    """A mean without a root."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((1, 2), keepdim=True)


class Unrolled(nn.Module):
    """A sum of Python's."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(sum(x.shape))


class Standardised(nn.Module):
    """With a mean and a deviation that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.std = [0.5], [0.5]

    def forward(self, x: Tensor) -> Tensor:
        return (x - torch.tensor(self.mean)) / torch.tensor(self.std)


@pytest.mark.parametrize("kind", [Pooled, Unrolled, Standardised], ids=lambda kind: kind.__name__)
def test_a_sum_without_a_root_looks_like_no_norm(kind: type[nn.Module]) -> None:
    assert fl.replace(kind()).skipped == ()


@pytest.mark.parametrize("root", ["** -0.5", "** 0.5", ".sqrt()", ".pow(-0.5)"])
def test_a_norm_over_rows_is_told_by_its_root(root: str) -> None:
    scale = f"(x * x).mean(0, keepdim=True){root}"
    [entry] = fl.replace(written(Llama, f"return self.weight * x * {scale}")()).skipped
    assert entry.reason.startswith("it looks like a norm, but calls mean along another dimension")


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_norm_stays_with_the_line(name: str) -> None:
    body, why = LEFT[name]
    kind = written(Llama, body)
    norm = kind()
    [entry] = fl.replace(norm).skipped
    assert type(norm) is kind
    assert entry.reason.startswith(f"it looks like a norm, but {why}")


def test_a_norm_of_float64_stays() -> None:
    [entry] = fl.replace(Llama().double()).skipped
    assert entry.reason == "it is a norm, but its own forward runs in torch.float64"


# What ``tests/support/hostile*.py`` does not insert into norms: other shapes, another dimension, the norm's own eps.
STATEMENTS = [
    "if x.ndim > 3: y = y * 2",
    "y = y.squeeze()",
    "y = y.view(-1)",
    "y = y - y.mean(-1, keepdim=True)",
    "y = y - y.mean(-1).unsqueeze(-1)",
    "y = y * self.variance_epsilon",
]


def norm_with(statement: str) -> nn.Module:
    """A norm in whose forward this statement stands before the end."""
    formula = "y = self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)"
    norm: nn.Module = written(Llama, f"{formula}\n{statement}\nreturn y")()
    return norm


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_statement_that_may_change_a_result_ends_it(statement: str) -> None:
    norm = norm_with(statement)
    [entry] = fl.replace(norm).skipped
    assert type(norm).__name__ == "Written"
    line = ast.unparse(ast.parse(statement)).splitlines()[0]
    computed = entry.reason.startswith("it looks like a norm, but computes ")
    assert computed or entry.reason.endswith(f" in `{line}`")


def test_a_branch_on_dtypes_is_read_for_each() -> None:
    """In float16 it computes something else, and so runs itself."""
    norm = norm_with("if x.dtype == torch.float16: y = y * 2")
    x = torch.randn(4, WIDTH).half()
    assert not fl.replace(norm_with("if x.dtype == torch.float16: y = y * 2").half()).replaced
    assert fl.replace(norm).replaced
    expected = norm_with("pass").to(torch.float16)
    expected.load_state_dict(norm.half().state_dict())
    assert torch.equal(norm(x), expected(x) * 2)


class Optional(Llama):
    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return y * 2 if hasattr(self, "extra") else y


def _on_the_instance(norm: Any, patch: pytest.MonkeyPatch) -> None:
    norm._norm = lambda x: x * 3


def _on_the_class(norm: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gemma, "_norm", lambda self, x: x * 3)


def _extra(norm: Any, patch: pytest.MonkeyPatch) -> None:
    norm.extra = True


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        (Gemma, _on_the_instance, "its _norm was set on the instance"),
        (Gemma, _on_the_class, "the _norm of Gemma was changed after replace"),
        (Optional, _extra, "its extra was absent when it was replaced"),
    ],
)
def test_what_was_read_is_watched(
    kind: type[nn.Module], change: Callable[..., None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, other, x = kind(), kind(), torch.randn(3, WIDTH)
    other.load_state_dict(norm.state_dict())
    assert fl.replace(norm).replaced
    assert norm.why_called(x) is None
    change(norm, monkeypatch)
    change(other, monkeypatch)
    assert norm.why_called(x) == why
    assert torch.equal(norm(x), other(x))


class AnyWidth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class WidthAsked(nn.Module):
    """Has a number that is no width, and asks for the width."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = 12

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y if x.shape[-1] == self.layer else y * 2


def test_without_parameters_any_width_is_one_that_nobody_asks_for() -> None:
    norm, other = AnyWidth(), WidthAsked()
    [entry] = fl.replace(norm).replaced
    assert entry.reason == "rms_norm, no weight, eps=1e-06, any number of columns"
    for shape in ((3, 8), (3, 1), (5,), (2, 0, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(norm(x), AnyWidth()(x))
    assert "its input is of []" in norm.why_called(torch.tensor(1.0))
    assert not fl.replace(other).replaced
