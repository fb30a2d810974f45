"""Each operation in a few lines of torch: the specification, the oracle in float64, the CPU path, and the baseline."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels.activations import ACTIVATIONS, canonical_activation
from .kernels.dropout import keep_mask


def gemm_gemm(a: Tensor, b: Tensor, c: Tensor, *, activation: str | None = None) -> Tensor:
    """``act(a @ b) @ c``: a ``[*B, M, K]``, b ``[*B, K, N]``, c ``[*B, N, O]`` -> ``[*B, M, O]``; any dtype."""
    return ACTIVATIONS[canonical_activation(activation)].torch(a @ b) @ c


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
    first_row: int = 0,
) -> Tensor:
    """``dropout(act(x W_upᵀ + b_up)) W_downᵀ + b_down + residual``.

    With a gate the hidden is ``act(x W_gateᵀ + b_gate) ⊙ (x W_upᵀ + b_up)``. Shapes: x ``[*B, M, K]``, w_up and w_gate
    ``[N, K]``, w_down ``[O, N]``, residual and result ``[*B, M, O]``; any dtype. Dropout draws from torch's generator;
    with ``seed`` it replays the kernels' mask instead, counting the rows of x from ``first_row``.
    """
    act = ACTIVATIONS[canonical_activation(activation)].torch
    up = F.linear(x, w_up, b_up)
    hidden = act(up) if w_gate is None else act(F.linear(x, w_gate, b_gate)) * up
    if dropout_p and seed is not None:
        mask = keep_mask(seed, first_row, hidden[..., 0].numel(), hidden.shape[-1], dropout_p, hidden.dtype)
        hidden = hidden * mask.view(hidden.shape) * (1 / (1 - dropout_p))
    elif dropout_p:
        hidden = F.dropout(hidden, dropout_p)
    y = F.linear(hidden, w_down, b_down)
    return y if residual is None else y + residual


def ffn_chunked(x: Tensor, *weights_and_biases: Any, chunk_rows: int, **options: Any) -> Tensor:
    """The same FFN, ``chunk_rows`` rows of x ``[M, K]`` at a time: no temporary is larger than one chunk's hidden."""
    residual = options.pop("residual", None)
    y = x.new_empty(x.shape[0], weights_and_biases[1].shape[0])
    for first_row in range(0, x.shape[0], chunk_rows):
        rows = slice(first_row, first_row + chunk_rows)
        part = None if residual is None else residual[rows]
        y[rows] = ffn(x[rows], *weights_and_biases, residual=part, first_row=first_row, **options)
    return y


def ffn_chunked_gradients(
    dy: Tensor,
    tensors: tuple[Any, ...],
    wanted: tuple[bool, ...],
    *,
    chunk_rows: int,
    **options: Any,
) -> list[Tensor | None]:
    """Gradients of :func:`ffn_chunked` for the wanted ones of x, w_up, w_down, b_up, b_down, w_gate, b_gate.

    The hidden is recomputed chunk by chunk. dx is written chunk by chunk; weight gradients are summed over the chunks
    in at least float32 and rounded once.
    """
    x = tensors[0]
    sums: list[Any] = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if position == 0 and want
        else torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
        if want
        else None
        for position, (tensor, want) in enumerate(zip(tensors, wanted, strict=True))
    ]
    chosen = [position for position, want in enumerate(wanted) if want]
    for first_row in range(0, x.shape[0], chunk_rows):
        rows = slice(first_row, first_row + chunk_rows)
        with torch.enable_grad():
            leaves: list[Any] = [
                tensor if tensor is None else (tensor[rows] if position == 0 else tensor).detach().requires_grad_(want)
                for position, (tensor, want) in enumerate(zip(tensors, wanted, strict=True))
            ]
            y = ffn(*leaves, first_row=first_row, **options)
        gradients = torch.autograd.grad(y, [leaves[position] for position in chosen], dy[rows])
        for position, gradient in zip(chosen, gradients, strict=True):
            if position == 0:
                sums[0][rows] = gradient
            else:
                sums[position] += gradient
    return [total if total is None else total.to(tensor.dtype) for total, tensor in zip(sums, tensors, strict=True)]
