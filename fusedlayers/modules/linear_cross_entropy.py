"""`LinearCrossEntropyLoss`, the last linear layer of a classifier or language model together with its loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy

from .. import functional, reference
from ..functional.linear_cross_entropy.arguments import check_no_gradient, checked_options
from ..functional.shapes import Shapes
from .children import say_once, why_not_now, why_not_plain
from .traced import outside_of_traces


class LinearCrossEntropyLoss(nn.Module):
    """Cross-entropy of ``linear(input)`` and the target, without all logits in memory.

    Arguments, names and ``state_dict`` are those of ``torch.nn.LinearCrossEntropyLoss`` without ``options``; see
    :func:`fusedlayers.functional.linear_cross_entropy` for what they mean. A child ``linear`` that is no longer plain
    (LoRA, hooks, quantisation, parametrization, sharding, ...) is called, and the loss is the same.

    Args:
        in_features: width of the input, K.
        num_classes: the number of classes, V.
        out_features: d1, ...: a token has a loss at each of d1 · ... positions, for which the linear layer has
            V · d1 · ... rows. By default it has one.
        bias: whether the linear layer has a bias.
        device, dtype: of its parameters, as in ``nn.Linear``.
        weight: ``[V]``, factors of the losses of each class's tokens, or None; a buffer.
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
        out_features: Sequence[int] = (),
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        z_loss: float = 0.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        checked = checked_options(
            {
                "reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing,
                "softcap": softcap, "logit_scale": logit_scale, "z_loss": z_loss, "recompute": recompute,
            }
        )  # fmt: skip
        if not isinstance(out_features, Sequence) or any(type(each) is not int or each < 1 for each in out_features):
            raise TypeError(f"out_features must be a tuple of positive ints, got {out_features!r}")
        self.num_classes, self.out_features = num_classes, tuple(out_features)
        self.reduction, self.ignore_index, self.recompute = reduction, ignore_index, recompute
        self.label_smoothing: float = checked["label_smoothing"]
        self.softcap: float | None = checked["softcap"]
        self.logit_scale: float = checked["logit_scale"]
        self.z_loss: float = checked["z_loss"]
        rows = math.prod(self.out_features, start=num_classes)
        self.linear = nn.Linear(in_features, rows, bias=bias, device=device, dtype=dtype)
        Shapes(f"weight?: float({num_classes})").check(weight)
        check_no_gradient(weight)
        self.register_buffer("weight", weight)

    def reset_parameters(self) -> None:
        """Draw the parameters of the linear layer anew, as ``nn.Linear`` does."""
        self.linear.reset_parameters()

    def options(self) -> dict[str, Any]:
        """The arguments of the loss besides the tensors of the linear layer and of the call."""
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
        linear_weight: Tensor = self.linear.weight
        linear_bias: Tensor | None = self.linear.bias
        if self.out_features:
            shape = (self.num_classes, *self.out_features)
            linear_weight = linear_weight.reshape(*shape, -1)
            linear_bias = None if linear_bias is None else linear_bias.reshape(shape)
        layer = {"linear_weight": linear_weight, "linear_bias": linear_bias}
        return {"input": input, "target": target} | layer | self.options() | {"recompute": self.recompute}

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call with these tensors would call the linear layer, or None if it would read its weights."""
        reason = why_not_plain(self.linear)
        # Proxies of torch.fx, which records the whole call as one node, do not count as unusual tensors.
        given = [each for each in tensors if not isinstance(each, Proxy)]
        return why_not_now(*given) if reason is None else f"linear {reason}"

    @outside_of_traces
    def why_called_in_traces(self) -> str | None:
        """:meth:`why_called` while Dynamo traces a call, without guards."""
        return self.why_called()

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of input ``[*B, K]`` and of classes ``[*B, *out_features]`` or probabilities.

        Raises:
            TypeError, ValueError: input or target does not fit the linear layer; the message names it.
        """
        reason = self.why_called_in_traces() if is_dynamo_compiling() else self.why_called(input, target)
        if reason is None:
            return functional.linear_cross_entropy(**self.call_arguments(input, target))
        say_once(self, reason)
        return self.loss_of(self.linear(input), target)

    def loss_of(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of logits from a call of the linear layer."""
        if self.out_features:
            logits = logits.unflatten(-1, (self.num_classes, *self.out_features))
        return reference.cross_entropy(logits, target, out_features=self.out_features, **self.options())

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items() if name != "weight")
        return f"{options}, recompute={self.recompute}, weighted={self.weight is not None}"
