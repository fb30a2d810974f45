"""`LinearCrossEntropyLoss`, the last linear layer of a classifier or language model together with its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import functional, reference
from ..functional.linear_cross_entropy.arguments import (
    check_class_weight,
    check_ignore_index,
    check_reduction,
    checked_scale,
    checked_smoothing,
    checked_softcap,
    checked_z_loss,
)
from ..functional.operands import checked_flag
from .children import say_once, why_not_now, why_not_plain
from .traced import outside_of_traces


class LinearCrossEntropyLoss(nn.Module):
    """Cross-entropy of ``linear(input)`` and the target, without all logits in memory.

    Arguments, names and ``state_dict`` are those of ``torch.nn.LinearCrossEntropyLoss`` without ``out_features`` and
    ``options``; see :func:`fusedlayers.functional.linear_cross_entropy` for what they mean. A child ``linear`` that is
    no longer plain (LoRA, hooks, quantisation, parametrization, sharding, ...) is called, and the loss is the same.

    Args:
        in_features: width of the input, K.
        num_classes: the number of classes, V.
        bias: whether the linear layer has a bias.
        device, dtype: of its parameters, as in ``nn.Linear``.
        weight: ``[V]``, what the losses of a class's tokens are multiplied by, or None; a buffer.
        reduction, ignore_index, label_smoothing, softcap, logit_scale, z_loss, recompute: as in the function.

    Raises:
        TypeError, ValueError: an argument is not what is described here; the message names it.
    """

    # What forward calls, for ``explain``.
    function = staticmethod(functional.linear_cross_entropy)
    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        check_reduction(reduction)
        check_ignore_index(ignore_index)
        self.reduction, self.ignore_index = reduction, ignore_index
        self.recompute = checked_flag("recompute", recompute)
        self.label_smoothing = checked_smoothing(label_smoothing)
        self.softcap = checked_softcap(softcap)
        self.logit_scale = checked_scale(logit_scale)
        self.z_loss = checked_z_loss(z_loss)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        if weight is not None:
            check_class_weight(weight, self.linear.weight.to(weight.device if isinstance(weight, Tensor) else "meta"))
        self.register_buffer("weight", weight)

    def reset_parameters(self) -> None:
        """Draw the parameters of the linear layer anew, as ``nn.Linear`` does."""
        self.linear.reset_parameters()

    def options(self) -> dict[str, Any]:
        """What the loss is told besides the tensors of the linear layer and of the call."""
        return {
            "weight": self.weight,
            "reduction": self.reduction,
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "z_loss": self.z_loss,
        }

    def call_arguments(self, input: Tensor, target: Tensor) -> dict[str, Any]:
        """The arguments that ``forward(input, target)`` gives to ``functional.linear_cross_entropy``, by name."""
        layer = {"linear_weight": self.linear.weight, "linear_bias": self.linear.bias}
        return {"input": input, "target": target} | layer | self.options() | {"recompute": self.recompute}

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call with these tensors would call the linear layer, or None if it would read its weights."""
        reason = why_not_plain(self.linear)
        return why_not_now(*tensors) if reason is None else f"linear {reason}"

    @outside_of_traces
    def why_called_in_traces(self) -> str | None:
        """The same while Dynamo traces a call, without guards."""
        return self.why_called()

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of input ``[*B, K]`` and of classes ``[*B]`` or probabilities ``[*B, V]``.

        Raises:
            TypeError, ValueError: input or target does not fit the linear layer; the message names it.
        """
        reason = self.why_called_in_traces() if is_dynamo_compiling() else self.why_called(input, target)
        if reason is None:
            return functional.linear_cross_entropy(**self.call_arguments(input, target))
        say_once(self, reason)
        return self.loss_of(self.linear(input), target)

    def loss_of(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of logits that the linear layer was called for."""
        return reference.cross_entropy(logits, target, **self.options())

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items() if name != "weight")
        return f"{options}, recompute={self.recompute}, weighted={self.weight is not None}"
