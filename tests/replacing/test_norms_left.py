"""What is left because the source of a norm's forward does something else, or may: with the line that does."""

from __future__ import annotations

import ast
import linecache
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from tests.support.norm_modules import WIDTH, Gemma, Llama

pytestmark = pytest.mark.filterwarnings("ignore:nothing was replaced")


class InTraining(Llama):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x * scale * (2 if self.training else 1)


class Detached(Llama):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon).detach()
        return self.weight * (x * scale).to(x.dtype)


class Global(Llama):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * len(SWITCHES)
        return self.weight * x * scale


SWITCHES = ["one"]


class OverRows(Llama):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + self.variance_epsilon)


class Outside(Llama):
    """Adds eps to the root."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (InTraining, "branches on what is not known in `return self.weight"),
        (Detached, "calls detach of a tensor in `scale = torch.rsqrt(x.float()"),
        (Global, "reads the global variable SWITCHES in `scale = "),
        (OverRows, "calls mean along another dimension than the last one in `return self.weight"),
        (Outside, "computes "),
    ],
)
def test_what_is_no_norm_stays_with_the_line(kind: type[nn.Module], why: str) -> None:
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
    "y = y * self.variance_epsilon",
]


def written(statement: str) -> type[Llama]:
    """A norm in whose forward this statement stands before the end."""
    text = f"""import torch
from torch import nn
from {__name__} import SWITCHES, Llama
class Written(Llama):
  def forward(self, x):
    y = self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
{textwrap.indent(statement, "    ")}
    return y
"""
    file = f"<norm with {statement}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, file, "exec", dont_inherit=True), space)
    return space["Written"]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_statement_that_may_change_a_result_ends_it(statement: str) -> None:
    norm = written(statement)()
    [entry] = fl.replace(norm).skipped
    assert type(norm).__name__ == "Written"
    line = ast.unparse(ast.parse(statement)).splitlines()[0]
    computed = entry.reason.startswith("it looks like a norm, but computes ")
    assert computed or entry.reason.endswith(f" in `{line}`")


def test_a_branch_on_dtypes_is_read_for_each() -> None:
    """In float16 it computes something else, and so runs itself."""
    norm = written("if x.dtype == torch.float16: y = y * 2")()
    x = torch.randn(4, WIDTH).half()
    assert not fl.replace(written("if x.dtype == torch.float16: y = y * 2")().half()).replaced
    assert fl.replace(norm).replaced
    expected = written("pass")().to(torch.float16)
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
