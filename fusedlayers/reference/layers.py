"""Linear layers, feed-forward blocks and their gradients."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.activations import ACTIVATIONS, canonical_activation
from ..kernels.dropout import adapter_places, keep_mask, limit_and_scale
from .reductions import batched_product


def gemm_gemm(a: Tensor, b: Tensor, c: Tensor, *, activation: str | None = None) -> Tensor:
    """``act(a @ b) @ c``: a ``[*B, M, K]``, b ``[*B, K, N]``, c ``[*B, N, O]`` -> ``[*B, M, O]``; any dtype."""
    return batched_product(ACTIVATIONS[canonical_activation(activation)].torch(batched_product(a, b)), c)


def gemm_gemm_reassociated(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """:func:`gemm_gemm` without an activation, as ``a @ (b @ c)``."""
    return batched_product(a, batched_product(b, c))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None) -> Tensor:
    """``act(x Wᵀ + b)``: x ``[*B, M, K]``, weight ``[N, K]``, bias ``[N]`` -> ``[*B, M, N]``; any dtype."""
    return ACTIVATIONS[canonical_activation(activation)].torch(F.linear(x, weight, bias))


def hidden_gradient(
    dy: Tensor,
    w_down: Tensor,
    z: Tensor,
    z_gate: Tensor | None = None,
    *,
    activation: str | None,
    bias: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """``(dy W_down) ⊙ act'(z)``, or with a gate the gradients of ``act(z_gate) ⊙ z``; with ``bias`` also their sums.

    dy ``[*B, M, O]``, w_down ``[O, N]``, z and z_gate ``[*B, M, N]`` -> dz, dz_gate like z, db_up, db_gate ``[N]``.
    """
    act = ACTIVATIONS[canonical_activation(activation)]
    d_hidden = dy @ w_down
    if z_gate is None:
        return _summed(act.gradient(d_hidden, z), None, bias)
    return _summed(d_hidden * act.torch(z_gate), act.gradient(d_hidden * z, z_gate), bias)


def _summed(
    dz: Tensor, dz_gate: Tensor | None, bias: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(dz, dz_gate, db_up, db_gate): with ``bias`` the last two are the sums over all rows of the first two."""
    db_up, db_gate = (None if each is None or not bias else _matrix(each).sum(0) for each in (dz, dz_gate))
    return dz, dz_gate, db_up, db_gate


def _matrix(tensor: Tensor) -> Tensor:
    """The rows of ``[*B, M, N]`` as a matrix."""
    # Torch cannot reshape a sparse matrix.
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def weight_gradient(dy: Tensor, x: Tensor, *, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    """``dyᵀ x`` and the sum of dy over its rows: dy ``[*B, M, O]``, x ``[*B, M, K]`` -> ``[O, K]``, ``[O]``; any dtype.

    These are the gradients of weight and bias of a linear layer ``y = x Wᵀ + b``; the second is None without ``bias``.
    """
    dy, x = _matrix(dy), _matrix(x)
    return dy.T @ x, dy.sum(0) if bias else None


def ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
    *,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    residual: Tensor | None = None,
    seed: Tensor | None = None,
) -> Tensor:
    """``dropout(act(x W_upᵀ + b_up)) W_downᵀ + b_down + residual``.

    With a gate the hidden is ``act(x W_gateᵀ + b_gate) ⊙ (x W_upᵀ + b_up)``. Shapes: x ``[*B, M, K]``, w_up and w_gate
    ``[N, K]``, w_down ``[O, N]``, residual and result ``[*B, M, O]``; any dtype. Dropout draws from torch's generator;
    with ``seed`` it applies the mask that kernels derive from it.
    """
    up = F.linear(x, w_up, b_up)
    gate = None if w_gate is None else F.linear(x, w_gate, b_gate)
    values = dropped(hidden(up, gate, activation=activation), dropout_p, seed)
    y = F.linear(values, w_down, b_down)
    return y if residual is None else y + residual


def lora_ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
    up_a: Tensor | None = None,
    up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    gate_a: Tensor | None = None,
    gate_b: Tensor | None = None,
    *,
    activation: str = "gelu",
    up_scale: float = 1.0,
    down_scale: float = 1.0,
    gate_scale: float = 1.0,
    adapter_dropout_p: float = 0.0,
    shared_dropout: bool = False,
    seed: Tensor | None = None,
    drop: Callable[[Tensor, float, Tensor | None, tuple[int, int]], Tensor] | None = None,
) -> Tensor:
    """:func:`ffn` whose linear layers compute ``x Wᵀ + b + scale (dropout(x) Aᵀ) Bᵀ``: A ``[R, in]``, B ``[out, R]``.

    Each adapter has its own mask, or with ``shared_dropout`` gate and up projection share one. Masks come from torch's
    generator, or with ``seed`` from the kernels' generator. ``drop`` replaces :func:`dropped`.
    """
    offsets, inputs_after_dropout = adapter_places(shared_dropout), {}

    def adapted(
        name: str, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scale: float
    ) -> Tensor:
        y = F.linear(x, weight, bias)
        if a is None or b is None:
            return y
        if adapter_dropout_p:
            offset = offsets[name]
            if offset not in inputs_after_dropout:
                inputs_after_dropout[offset] = (drop or dropped)(x, adapter_dropout_p, seed, offset)
            x = inputs_after_dropout[offset]
        return torch.add(y, F.linear(F.linear(x, a), b), alpha=scale)

    up = adapted("up", x, w_up, b_up, up_a, up_b, up_scale)
    gate = None if w_gate is None else adapted("gate", x, w_gate, b_gate, gate_a, gate_b, gate_scale)
    return adapted("down", hidden(up, gate, activation=activation), w_down, b_down, down_a, down_b, down_scale)


def dropped(values: Tensor, dropout_p: float, seed: Tensor | None, start: tuple[int, int] = (0, 0)) -> Tensor:
    """``values`` ``[*B, M, N]`` after dropout; with ``seed`` by the kernels' mask, from its (row, column) ``start``."""
    if dropout_p and seed is not None:
        first_row, first_column = start
        rows, columns = math.prod(values.shape[:-1]), values.shape[-1]
        mask = keep_mask(seed, first_row, rows, columns, dropout_p, values.dtype, first_column)
        return values * mask.view(values.shape) * limit_and_scale(dropout_p)[1]
    return F.dropout(values, dropout_p) if dropout_p else values


def hidden(up: Tensor, gate: Tensor | None = None, *, activation: str) -> Tensor:
    """``act(up)``, or with a gate ``act(gate) ⊙ up``: the hidden of an FFN from its pre-activations ``[*B, M, N]``."""
    act = ACTIVATIONS[canonical_activation(activation)].torch
    return act(up) if gate is None else act(gate) * up
