"""Calls of every public function for the tests of autograd's contract, and how ours are held against torch's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.switches import switched
from tests.support.compiled_cases import CALLS, Call, ffn, given
from tests.support.compiled_cases import gemm_reduce as reduce_call
from tests.support.compiled_cases import hidden_gradient as hidden_gradient_call
from tests.support.compiled_cases import weight_gradient as weight_gradient_call
from tests.support.operands import needs_kernels

ROWS = 3


def _without(name: str, call: Call) -> Call:
    return call[0], {key: value for key, value in call[1].items() if key != name}


# Sums of many terms of both signs, whose order shows in the digits that torch.testing compares.
WIDE = "recomputed wide ffn"
# The FFN takes every path: fused, chunked by torch's operations and by kernels, epilogue.
CONTRACT: dict[str, Callable[[int], Call]] = CALLS | {
    WIDE: lambda rows: ffn(rows, width=144, recompute=True, dropout_p=0.25),
    "mean with product": lambda rows: reduce_call(rows, op="mean", dim=-1, return_product=True),
    "argmin with product": lambda rows: reduce_call(rows, op="argmin", dim=-2, return_product=True),
    "linear hidden_gradient": lambda rows: _without(
        "z_gate", (hidden_gradient_call(rows)[0], hidden_gradient_call(rows)[1] | {"activation": None, "bias": True})
    ),
    "hidden_gradient with sums": lambda rows: (
        hidden_gradient_call(rows)[0], hidden_gradient_call(rows)[1] | {"activation": "gelu", "bias": True}
    ),
    "weight_gradient alone": lambda rows: weight_gradient_call(rows, bias=False),
}  # fmt: skip
NAMES = list(CONTRACT)
# An index depends on nothing, and the slope of no activation not on its argument.
DIFFERENTIABLE = [name for name in NAMES if name not in ("argmax", "linear hidden_gradient")]
BACKENDS = [pytest.param("triton", marks=needs_kernels), "torch"]
# How a call is made: plainly, while a dispatch mode of the user's sees it, or compiled.
WAYS = ["eager", "observed", "compiled"]


class Recorder(TorchDispatchMode):
    """The names of the operations that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    def ours(self) -> list[str]:
        return [name.removeprefix("fusedlayers::") for name in self.names if name.startswith("fusedlayers::")]


class Made(NamedTuple):
    """A call, ready to be made as often as asked, and the leaves among its arguments."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    names: list[str]
    leaves: list[Tensor]

    def __call__(self, *leaves: Tensor) -> list[Tensor]:
        """Its results that have a gradient, with the same dropout each time."""
        torch.manual_seed(1)
        arguments = self.arguments | dict(zip(self.names, leaves or self.leaves, strict=True))
        return [tensor for tensor in given(self.function(**arguments)) if tensor.is_floating_point()]


def made(name: str, dtype: torch.dtype = torch.float32, way: str = "eager", **changes: Any) -> Made:
    """The call of this name on the same numbers each time, made in this way."""
    torch.manual_seed(0)
    function, arguments = CONTRACT[name](ROWS)
    arguments |= {key: value for key, value in changes.items() if key in arguments}
    for key, value in arguments.items():
        if isinstance(value, Tensor) and value.requires_grad:
            arguments[key] = value.detach().to(dtype).requires_grad_()
    names = [key for key, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad]

    def call(**options: Any) -> Any:
        with Recorder() if way == "observed" else nullcontext():
            return function(**options)

    if way == "compiled":
        call = torch.compile(lambda **options: function(**options), backend="aot_eager", fullgraph=True)
    return Made(call, arguments, names, [arguments[key] for key in names])


def upstream(results: list[Tensor], *batch: int, seed: int = 2) -> list[Tensor]:
    """Gradients of results, the same numbers in every dtype."""
    torch.manual_seed(seed)
    drawn = [torch.randn((*batch, *result.shape), dtype=torch.float64) for result in results]
    return [each.to(result) for each, result in zip(drawn, results, strict=True)]


Found = dict[str, Tensor | None]
# By call and by what is derived from it: torch's, and the truth.
_of_torch: dict[str, tuple[Found, Found]] = {}


def named(call: Made, gradients: Any, prefix: str = "d") -> Found:
    """Gradients by the names of the leaves."""
    return {f"{prefix}{name}": gradient for name, gradient in zip(call.names, gradients, strict=True)}


def assert_as_torch(name: str, backend: str, way: str, derive: Callable[[Made], Found], **changes: Any) -> None:
    """What is derived from a call is as close to the truth as what is derived from torch's own operations."""
    with switched({"FUSEDLAYERS_BACKEND": backend}):
        ours = derive(made(name, way=way, **changes))
    # The same for every backend, and for every way to make the call.
    key = f"{name} {derive.__qualname__} {changes}"
    if key not in _of_torch:
        with switched({"FUSEDLAYERS_BACKEND": "torch"}):
            theirs = derive(made(name, **changes, recompute=False))
            _of_torch[key] = theirs, derive(made(name, torch.float64, **changes, recompute=False))
    theirs, truth = _of_torch[key]
    assert {key for key, value in ours.items() if value is None} == {k for k, v in theirs.items() if v is None}
    ours, theirs, truth = ({k: v for k, v in found.items() if v is not None} for found in (ours, theirs, truth))
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
    assert_all_close(ours, theirs, truth, independent=2 * ROWS)


def assert_near(found: Found, expected: Found) -> None:
    """The same gradients, up to the order in which products add up."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        other = expected[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            limit = 64 * torch.finfo(other.dtype).eps * other.abs().max()
            assert gradient.sub(other).abs().max() <= limit, name
