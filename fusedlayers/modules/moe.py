"""`FusedMoE`, a mixture of experts in the place of a Transformer's feed-forward block."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .. import functional
from ..functional.options import checked_choice, checked_flag, checked_size
from ..functional.precision import Float8, precision_word
from ..functional.shapes import Shapes
from ..kernels.activations import canonical_activation
from .children import parameter
from .ffn import FusedFFN

SCORES = ("softmax", "sigmoid")


class ExpertWeights(nn.Module):
    """The parameters of all experts, in the layout and by the names of transformers' models.

    ``gate_up_proj`` ``[E, 2 N, K]``, gate first, or without a gate ``up_proj`` ``[E, N, K]``; ``down_proj``
    ``[E, K, N]``; and biases, if there are any, by the same names with the suffix ``_bias``.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        gated: bool,
        bias: bool,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.first = "gate_up_proj" if gated else "up_proj"
        rows = 2 * d_ff if gated else d_ff
        shapes = {self.first: (num_experts, rows, d_model), "down_proj": (num_experts, d_model, d_ff)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        for name, (experts, out, _) in shapes.items():
            values = nn.Parameter(torch.empty(experts, out, device=device, dtype=dtype)) if bias else None
            self.register_parameter(f"{name}_bias", values)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, each expert's as ``nn.Linear`` does."""
        for name in (self.first, "down_proj"):
            weight = getattr(self, name)
            bound = 1 / math.sqrt(weight.shape[-1])
            for each in (weight, getattr(self, f"{name}_bias")):
                if each is not None:
                    nn.init.uniform_(each, -bound, bound)

    def arguments(self) -> dict[str, Any]:
        """Weights, biases and their layout, as arguments of ``functional.moe_ffn``."""
        return {
            "w_up": getattr(self, self.first),
            "w_down": self.down_proj,
            "b_up": getattr(self, f"{self.first}_bias"),
            "b_down": self.down_proj_bias,
            "gate_and_up": "concatenated" if self.first == "gate_up_proj" else "separate",
        }


class FusedMoE(nn.Module):
    """Each token through the ``top_k`` experts that its router scores highest: x ``[*B, M, K]`` -> ``[*B, M, K]``.

    ``Σ_j score_j · expert_j(x)``, plus ``shared_expert(x)`` if there is one; see
    :func:`fusedlayers.functional.moe_ffn`. The parameters have the names of transformers' models: the router ``gate``,
    an ``nn.Linear``, ``experts.gate_up_proj`` and ``experts.down_proj``, and ``shared_expert``, a :class:`FusedFFN`.

    Args:
        d_model: width of input and output, K.
        d_ff: width of each expert's hidden, N.
        num_experts: E.
        top_k: number of experts per token.
        activation: a name in ``fusedlayers.kernels.activations``, or Hugging Face's name for it.
        gated: whether every expert multiplies its activated gate with its up projection.
        bias: whether every projection of the experts has a bias.
        scores: "softmax" or "sigmoid" of the router's logits, in float32.
        normalize: whether the chosen scores are divided by their sum.
        shared_d_ff: width of the hidden of an expert that every token goes through, or None for none.
        recompute: save only x and the routing for the backward pass.
        precision: None, or "fp8" or a :class:`fusedlayers.Float8`: the experts, and the shared one, run in 8 bits where
            they can and where that is faster.
        device, dtype: of the parameters, as in ``nn.Linear``.

    Raises:
        TypeError, ValueError: an argument is not what is described here; the message names it.
    """

    # What forward calls, for ``explain``.
    function = staticmethod(functional.moe_ffn)
    # Of a module that was pickled without it.
    precision: str | None = None

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        top_k: int,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        scores: str = "softmax",
        normalize: bool = True,
        shared_d_ff: int | None = None,
        recompute: bool = False,
        precision: str | Float8 | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.d_ff = checked_size("d_model", d_model), checked_size("d_ff", d_ff)
        self.num_experts, self.top_k = checked_size("num_experts", num_experts), checked_size("top_k", top_k)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be at most num_experts = {num_experts}, got {top_k}")
        self.activation, self.scores = canonical_activation(activation), checked_choice("scores", scores, SCORES)
        self.normalize, self.recompute = checked_flag("normalize", normalize), checked_flag("recompute", recompute)
        gated, bias = checked_flag("gated", gated), checked_flag("bias", bias)
        self.precision = precision_word(precision)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = nn.Linear(self.d_model, self.num_experts, bias=False, **options)
        self.experts = ExpertWeights(self.d_model, self.d_ff, self.num_experts, gated, bias, **options)
        self.shared_expert = None
        if shared_d_ff is not None:
            shared_d_ff = checked_size("shared_d_ff", shared_d_ff)
            self.shared_expert = FusedFFN(
                self.d_model, shared_d_ff, activation, gated, bias, precision=self.precision, **options
            )

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for child in (self.gate, self.experts, self.shared_expert):
            if child is not None:
                child.reset_parameters()

    def routing(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(index, weights) ``[*B, M, top_k]`` of the experts of every token, weights in the dtype of x.

        Raises:
            TypeError, ValueError: as in :meth:`forward`.
        """
        # The router runs first, and torch's error would name neither the argument nor the module.
        first = getattr(self.experts, self.experts.first)
        right = isinstance(x, Tensor) and x.dtype == first.dtype and x.shape[-1:] == (self.d_model,)
        if not right and not isinstance(x, Proxy):  # which has no values to check
            text = f"experts.{self.experts.first}: *any, x: *B M {self.d_model}"
            Shapes(text, note=f", as d_model is {self.d_model}").check(first, x)
        logits = self.gate(x)
        wide = logits.double() if self._router_weight().dtype is torch.float64 else logits.float()
        scores = wide.softmax(-1) if self.scores == "softmax" else wide.sigmoid()
        weights, index = scores.topk(self.top_k, -1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return index, weights.to(logits.dtype)

    def _router_weight(self) -> Tensor:
        """The router's weight; of a quantised one, whose weight is a method, the experts' instead."""
        kept = parameter(self.gate, "weight")
        return kept if isinstance(kept, Tensor) else cast(Tensor, self.experts.down_proj)

    def call_arguments(self, x: Tensor) -> dict[str, Any]:
        """The arguments that ``forward(x)`` gives to ``functional.moe_ffn``, by name; the routing is a placeholder."""
        shape = (*x.shape[:-1], self.top_k)
        weights = x.new_empty(shape).requires_grad_(self._router_weight().requires_grad or x.requires_grad)
        return self._arguments(x, x.new_zeros(shape, dtype=torch.int64), weights)

    def _arguments(self, x: Tensor, index: Tensor, weights: Tensor) -> dict[str, Any]:
        routed = {"x": x, "top_k_index": index, "top_k_weights": weights}
        options = {"activation": self.activation, "recompute": self.recompute, "precision": self.precision}
        return routed | self.experts.arguments() | options

    def forward(self, x: Tensor) -> Tensor:
        """The mixture of x ``[*B, M, K]``; same shape, floating point dtype.

        Raises:
            TypeError, ValueError: x does not fit the weights; the message names it.
        """
        y = functional.moe_ffn(**self._arguments(x, *self.routing(x)))
        if self.shared_expert is None:
            return y
        return self.shared_expert(x, residual=y)

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, d_ff={self.d_ff}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"activation={self.activation!r}, scores={self.scores!r}, normalize={self.normalize}, "
            f"recompute={self.recompute}{'' if self.precision is None else f', precision={self.precision!r}'}"
        )
