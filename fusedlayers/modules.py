"""`FusedFFN`, `MaxSim`, and what every fused module asks: may its children be read through, or must they be called?

A child is read through (its weights go to ``functional.ffn``) when nobody could tell the difference: it is exactly
``nn.Linear``, with plain parameters, and nothing is attached to its call. LoRA, hooks, quantisation, parametrization
and sharding all live in that call, so any other child is called.
"""

from __future__ import annotations

import logging
import operator
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize

from . import functional
from .functional.arguments import check_dropout, check_recompute
from .kernels.activations import ACTIVATIONS, canonical_activation

_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}

_log = logging.getLogger(__name__)
_said: set[str] = set()


def class_name(module: object) -> str:
    """The class of ``module`` as a reader would write it: short for torch's own, with its package for others."""
    kind = type(module)
    return kind.__qualname__ if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}.{kind.__qualname__}"


def why_must_be_called(module: nn.Module) -> str | None:
    """What is attached to the call of ``module`` and would be lost without it, or None."""
    for attribute, hook in _HOOKS.items():
        if getattr(module, attribute):
            return f"has {hook}"
    # Offloading libraries put a forward on the instance.
    if "forward" in module.__dict__:
        return "has a forward of its own, set on the instance"
    if module._compiled_call_impl is not None:
        return "is compiled by itself"
    return None


def why_not_plain_tensor(tensor: Tensor) -> str | None:
    """Why ``tensor`` is more than an ordinary dense tensor (a DTensor, a quantised or nested one), or None."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return f"is a {class_name(tensor)}, not a plain tensor"
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    return None


def why_not_plain(linear: nn.Module) -> str | None:
    """Why the weights of ``linear`` may not be read past its call, or None if it is a plain ``nn.Linear``."""
    if type(linear) is not nn.Linear:
        # torch's parametrization changes the class, too.
        parametrized = parametrize.is_parametrized(linear)
        return "is parametrized" if parametrized else f"is a {class_name(linear)}, not exactly nn.Linear"
    if reason := why_must_be_called(linear):
        return reason
    weight, bias = linear.weight, linear.bias
    if reason := why_not_plain_tensor(weight):
        return f"has a weight that {reason}"
    if not weight.is_floating_point():
        return f"has a weight of {weight.dtype}"
    if bias is None:
        return None
    if reason := why_not_plain_tensor(bias):
        return f"has a bias that {reason}"
    if bias.dtype != weight.dtype or bias.device != weight.device:
        return f"has a bias of {bias.dtype} on {bias.device}, but a weight of {weight.dtype} on {weight.device}"
    return None


def why_not_now(*tensors: Tensor | None) -> str | None:
    """Why a call with these tensors must go through the children although they are plain, or None."""
    if _has_any_global_hook():
        return "a hook is registered for all modules"
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return "torch.jit is tracing"
    for tensor in tensors:
        # What is no tensor at all goes on, to the error that names the argument.
        is_tensor = isinstance(tensor, Tensor) or hasattr(type(tensor), "__torch_function__")
        if is_tensor and (reason := why_not_plain_tensor(cast(Tensor, tensor))):
            return f"an input {reason}"
    return None


class FFNPieces(NamedTuple):
    """One FFN as it stands in a module: its linear children, and how the hidden is made from them."""

    up: nn.Module
    down: nn.Module
    gate: nn.Module | None
    activation: str
    dropout_p: float

    def why_not_plain(self) -> str | None:
        """The first linear child that must be called, and why; None if all are plain."""
        for role, linear in (("up", self.up), ("gate", self.gate), ("down", self.down)):
            if linear is not None and (reason := why_not_plain(linear)):
                return f"the {role} linear {reason}"
        return None

    def arguments(
        self, x: Tensor, residual: Tensor | None = None, recompute: Literal["auto"] | bool = "auto"
    ) -> dict[str, Any]:
        """The arguments of ``functional.ffn`` for input x; only for plain children."""
        linears = {"up": self.up, "down": self.down} | ({} if self.gate is None else {"gate": self.gate})
        weights = {f"w_{role}": linear.weight for role, linear in linears.items()}
        biases = {f"b_{role}": linear.bias for role, linear in linears.items()}
        options = {"activation": self.activation, "dropout_p": self.dropout_p, "recompute": recompute}
        return {"x": x, **weights, **biases, **options, "residual": residual}


def say_once(module: nn.Module, reason: str) -> None:
    """One INFO line per class and reason: this FFN calls its children instead of running fused."""
    if torch.compiler.is_compiling():
        return
    line = f"{class_name(module)} calls its children: {reason}"
    if line not in _said:
        _said.add(line)
        _log.info(line)


def _positive(name: str, value: int) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a positive int, got {value!r} ({type(value).__name__})")
    if size <= 0:
        raise ValueError(f"{name} must be a positive int, got {size}")
    return size


def _flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


class FusedFFN(nn.Module):
    """The feed-forward block of a Transformer, x ``[*B, M, K]`` -> ``[*B, M, K]``, without keeping the hidden.

    ``down_proj(dropout(act(up_proj(x))))``; gated: ``down_proj(dropout(act(gate_proj(x)) * up_proj(x)))``, so that
    SwiGLU is ``activation="silu", gated=True`` (Shazeer, 2020, "GLU Variants Improve Transformer"). The letters:
    K is d_model, N is d_ff.

    Children are ordinary ``nn.Linear`` modules with Hugging Face's names, drawn in this order: ``up_proj`` ``[N, K]``,
    ``gate_proj`` ``[N, K]`` (gated only), ``down_proj`` ``[K, N]``. Children that are no longer plain (LoRA, hooks,
    quantisation, parametrization, sharding, ...) are called, and the block computes the same without fusing.

    Args:
        d_model: width of input and output, K.
        d_ff: width of the hidden, N.
        activation: a name in ``fusedlayers.kernels.activations``, or Hugging Face's name for it.
        gated: multiply the activated gate projection with the up projection.
        bias: whether every child has a bias.
        dropout: probability in [0, 1) that a hidden value is dropped; in training only.
        recompute: True never allocates the hidden, forward or backward; False and "auto" take the fastest path.
        device, dtype: of the parameters, as in ``nn.Linear``; dtype is a floating point one.

    Raises:
        TypeError, ValueError: an argument is not what is described here; the message names it.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        recompute: Literal["auto"] | bool = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model = _positive("d_model", d_model)
        self.d_ff = _positive("d_ff", d_ff)
        self.activation = canonical_activation(activation)
        self.gated = _flag("gated", gated)
        check_dropout("dropout", dropout)
        self.dropout = float(dropout)
        check_recompute(recompute)
        self.recompute: Literal["auto"] | bool = recompute
        if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating point dtype, got {dtype}")
        options: dict[str, Any] = {"bias": _flag("bias", bias), "device": device, "dtype": dtype}
        self.up_proj = nn.Linear(self.d_model, self.d_ff, **options)
        self.gate_proj = nn.Linear(self.d_model, self.d_ff, **options) if gated else None
        self.down_proj = nn.Linear(self.d_ff, self.d_model, **options)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as ``nn.Linear`` does, in the order in which the children were built."""
        for child in (self.up_proj, self.gate_proj, self.down_proj):
            if child is not None:
                child.reset_parameters()

    def ffn_pieces(self) -> FFNPieces:
        """The children and options that the next call of ``forward`` reads."""
        dropout_p = self.dropout if self.training else 0.0
        return FFNPieces(self.up_proj, self.down_proj, self.gate_proj, self.activation, dropout_p)

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call with these tensors would call the children, or None if it would run ``functional.ffn``."""
        return self.ffn_pieces().why_not_plain() or why_not_now(*tensors)

    def call_arguments(self, x: Tensor, residual: Tensor | None = None) -> dict[str, Any]:
        """The arguments that ``forward(x, residual)`` gives to ``functional.ffn``, by name."""
        return self.ffn_pieces().arguments(x, residual, self.recompute)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The FFN of x ``[*B, M, K]``, plus ``residual`` ``[*B, M, K]`` if given; same shape, floating point dtype.

        Raises:
            TypeError, ValueError: x or residual does not fit the weights; the message names it.
        """
        pieces = self.ffn_pieces()
        reason = pieces.why_not_plain() or why_not_now(x, residual)
        if reason is None:
            return functional.ffn(**pieces.arguments(x, residual, self.recompute))
        say_once(self, reason)
        activate = ACTIVATIONS[canonical_activation(self.activation)].torch
        hidden = self.up_proj(x)
        hidden = activate(hidden) if self.gate_proj is None else activate(self.gate_proj(x)) * hidden
        y = self.down_proj(F.dropout(hidden, pieces.dropout_p))
        return y if residual is None else y + residual

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, d_ff={self.d_ff}, activation={self.activation!r}, gated={self.gated}, "
            f"dropout={self.dropout}, recompute={self.recompute!r}"
        )


class MaxSim(nn.Module):
    """Late interaction (Khattab and Zaharia, 2020, "ColBERT"): the scores of all pairs of queries and documents.

    ``scores[q, e] = Σ_i max_j queries[q, i] · documents[e, j]``, without the similarities in memory. No parameters.
    """

    # What forward calls, for ``explain``.
    function = staticmethod(functional.maxsim)

    def forward(
        self,
        queries: Tensor,
        documents: Tensor,
        query_mask: Tensor | None = None,
        document_mask: Tensor | None = None,
        *,
        cu_seqlens_queries: Tensor | None = None,
        cu_seqlens_documents: Tensor | None = None,
    ) -> Tensor:
        """:func:`fusedlayers.functional.maxsim` of these arguments: scores ``[Q, D]``."""
        return functional.maxsim(
            queries, documents, query_mask, document_mask,
            cu_seqlens_queries=cu_seqlens_queries, cu_seqlens_documents=cu_seqlens_documents,
        )  # fmt: skip
