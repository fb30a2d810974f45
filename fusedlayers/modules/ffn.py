"""`FusedFFN`, the feed-forward block of a Transformer."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy

from ..functional.ffn.arguments import check_recompute, checked_dropout
from ..functional.options import checked_flag, checked_size
from ..functional.precision import Float8, precision_word
from ..kernels.activations import ACTIVATIONS, canonical_activation
from .adapters import ffn_pieces
from .children import say_once, why_not_now
from .guarding import BlockGuard, keep, kept
from .pieces import FFNPieces
from .traced import outside_of_traces, traceable, traced_ffn

# All that a call reads of the block.
_PARTS = ("up_proj", "gate_proj", "down_proj", "activation", "dropout", "training")


class FusedFFN(nn.Module):
    """The feed-forward block of a Transformer, x ``[*B, M, K]`` -> ``[*B, M, K]``, without keeping the hidden.

    ``down_proj(dropout(act(up_proj(x))))``; gated: ``down_proj(dropout(act(gate_proj(x)) * up_proj(x)))``, so that
    SwiGLU is ``activation="silu", gated=True`` (Shazeer, 2020, "GLU Variants Improve Transformer"). The letters:
    K is d_model, N is d_ff.

    Children are ordinary ``nn.Linear`` modules with Hugging Face's names, drawn in this order: ``up_proj`` ``[N, K]``,
    ``gate_proj`` ``[N, K]`` (gated only), ``down_proj`` ``[K, N]``. Children that are no longer plain (hooks,
    quantisation, parametrization, sharding, ...) are called, and the block computes the same without fusing.

    Args:
        d_model: width of input and output, K.
        d_ff: width of the hidden, N.
        activation: a name in ``fusedlayers.kernels.activations``, or Hugging Face's name for it.
        gated: multiply the activated gate projection with the up projection.
        bias: whether every child has a bias.
        dropout: probability in [0, 1) that a hidden value is dropped; in training only.
        recompute: True never allocates the hidden, forward or backward; False and "auto" take the fastest path; an int
            is the most bytes that a call may keep for its backward pass (see ``functional.ffn``).
        precision: "fp8" or a :class:`fusedlayers.Float8`: products run in 8 bits where they can and where that is
            faster (see ``functional.ffn``); None: in the dtype of the parameters.
        device, dtype: of the parameters, as in ``nn.Linear``; dtype is a floating point one.

    Raises:
        TypeError, ValueError: an argument is not what is described here; the message names it.
    """

    # Blocks that were pickled without it have none of their own.
    precision: str | None = None

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        recompute: Literal["auto"] | bool | int = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        precision: str | Float8 | None = None,
    ) -> None:
        super().__init__()
        self.d_model = checked_size("d_model", d_model)
        self.d_ff = checked_size("d_ff", d_ff)
        self.activation = canonical_activation(activation)
        self.gated = checked_flag("gated", gated)
        self.dropout = checked_dropout("dropout", dropout)
        check_recompute(recompute)
        self.recompute: Literal["auto"] | bool | int = recompute
        self.precision = precision_word(precision)
        if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating point dtype, got {dtype}")
        options: dict[str, Any] = {"bias": checked_flag("bias", bias), "device": device, "dtype": dtype}
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
        return ffn_pieces(self.up_proj, self.down_proj, self.gate_proj, self.activation, dropout_p)

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call with these tensors would call the children, or None if it would run ``functional.ffn``."""
        return self.ffn_pieces().why_not_plain() or why_not_now(*tensors)

    def call_arguments(self, x: Tensor, residual: Tensor | None = None) -> dict[str, Any]:
        """The arguments that ``forward(x, residual)`` gives to ``functional.ffn``, by name."""
        return self.ffn_pieces().arguments(x, residual, self.recompute, self.precision)

    @outside_of_traces
    def traceable(self) -> tuple[Any, ...] | None:
        """What a traced call takes as constant, or None if it must call the children."""
        pieces = self.ffn_pieces()
        return traceable(
            self, pieces.why_not_plain() or pieces,
            up="up_proj", down="down_proj", gate="gate_proj", activation="activation", dropout="dropout",
        )  # fmt: skip

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The FFN of x ``[*B, M, K]``, plus ``residual`` ``[*B, M, K]`` if given; same shape, floating point dtype.

        Raises:
            TypeError, ValueError: x or residual does not fit the weights; the message names it.
        """
        if is_dynamo_compiling():
            facts = self.traceable()
            y = None if facts is None else traced_ffn(self, facts, x, residual, None)
            if y is not None:
                return y
            dropout_p = self.dropout if self.training else 0.0
        else:
            known: FFNPieces | None = kept(self)
            if known is not None:
                tensors = known.tensors(x, residual)
                options = (known.activation, known.dropout_p, self.recompute, self.precision)
                call = known.calls.recall(tensors, options)
                if call is not None:
                    return cast(Tensor, call.operation.run(call, tensors))
            pieces = known or self.ffn_pieces()
            symbolic = isinstance(x, Proxy)  # torch.fx records the whole call as one node
            reason = pieces.why_not_plain() or (None if symbolic else why_not_now(x, residual))
            if reason is None:
                if known is None and pieces.may_be_kept and not symbolic:
                    keep(self, BlockGuard(self, pieces, _PARTS))
                return cast(Tensor, pieces.run(x, residual, self.recompute, self.precision))
            dropout_p = pieces.dropout_p
            say_once(self, reason)
        activate = ACTIVATIONS[canonical_activation(self.activation)].torch
        hidden = self.up_proj(x)
        hidden = activate(hidden) if self.gate_proj is None else activate(self.gate_proj(x)) * hidden
        y = self.down_proj(F.dropout(hidden, dropout_p))
        return y if residual is None else y + residual

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, d_ff={self.d_ff}, activation={self.activation!r}, gated={self.gated}, "
            f"dropout={self.dropout}, recompute={self.recompute!r}"
            f"{'' if self.precision is None else f', precision={self.precision!r}'}"
        )
