"""What a step is compared with: the same model in more bits, and how far torch and the recipe of 8 bits are from it."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fusedlayers.planning.float8 import why_narrow, why_uneven
from fusedlayers.reference.float8 import dequantised, quantised_rows
from fusedlayers.replacing.experts.formula import implementation, run_eagerly


class Truth:
    """The loss and the gradients of a model in more bits, and how far torch's are from them in its own dtype."""

    def __init__(self, plain: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        self.plain, self.inputs = plain, inputs
        own = next(plain.parameters()).dtype
        wider = torch.float64 if own is torch.float32 else torch.float32
        exact = copy.deepcopy(plain).to(wider)
        run_eagerly(exact)
        inputs = {name: tensor.to(wider) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        loss = exact(**inputs).loss
        loss.backward()
        self.loss = float(loss.detach())
        self.gradients = [parameter.grad for parameter in exact.parameters()]
        self.names = [name for name, _ in exact.named_parameters()]
        self.torch_errors: list[float] | None = None
        self._float8_error: float | None = None

    def errors(self) -> list[float]:
        """How far each gradient of the model is from the truth, as a norm over the norm of the truth."""
        return [
            _relative_error(parameter.grad, gradient)
            for parameter, gradient in zip(self.plain.parameters(), self.gradients, strict=True)
        ]

    @property
    def float8_error(self) -> float:
        """The median of these errors if torch computes the model with the operands of wide products in 8 bits."""
        if self._float8_error is None:
            head = self.plain.get_output_embeddings()  # type: ignore[operator]
            with _running_eagerly(self.plain), _Rounding(None if head is None else head.weight):
                self.plain(**self.inputs).loss.backward()
            self._float8_error = statistics.median(self.errors())
            self.plain.zero_grad(set_to_none=True)
        return self._float8_error


def _relative_error(gradient: Tensor | None, truth: Tensor | None) -> float:
    if gradient is None or truth is None:
        return 0.0 if gradient is truth else math.inf
    error, norm = float((gradient.to(truth.dtype) - truth).norm()), float(truth.norm())
    return error / norm if norm else error


@contextmanager
def _running_eagerly(model: nn.Module) -> Iterator[None]:
    """Inside, experts run their eager forward, which is made of linear layers."""
    before = [(cast(Any, module).config, name) for module in model.modules() if (name := implementation(module))]
    run_eagerly(model)
    try:
        yield
    finally:
        for config, name in before:
            config._experts_implementation = name


class _Rounding(TorchFunctionMode):
    """Inside, all linear layers but the head and narrow ones multiply what the recipe makes of their operands."""

    def __init__(self, head: Tensor | None) -> None:
        super().__init__()
        self.head = head

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.linear or args[1] is self.head or (why_uneven(args[1].shape) or why_narrow(args[1].shape)):
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        y = _Linear8.apply(x, weight)
        return y if not bias or bias[0] is None else y + bias[0]


class _Linear8(torch.autograd.Function):
    """A linear layer by torch, whose three products have operands with the values that 8 bits hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = _rounded(x.flatten(0, -2))
        ctx.save_for_backward(rows, weight)
        return F.linear(rows, _rounded(weight)).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        given = _rounded(dy.flatten(0, -2))
        dx = F.linear(given, _rounded(weight.T))
        return dx.unflatten(0, dy.shape[:-1]), given.T @ rows


def _rounded(x: Tensor) -> Tensor:
    """x ``[M, K]`` as 8 bits hold it, a scale for each row; any dtype holds these values, too."""
    return dequantised(quantised_rows(x)).to(x.dtype)
