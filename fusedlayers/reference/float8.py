"""The model of products in 8 bits: quantise the rows of both operands, and multiply what their values stand for.

A GPU sums such products with about 14 bits of the largest sum on the way; the model sums in float32, or in float64
where operands are.
"""

import torch
from torch import Tensor

from ..kernels.activations import ACTIVATIONS
from .layers import dropped, hidden

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
# Smaller maxima count as this: 448 divided by it is still finite.
SMALLEST = 2.0**-100

# e4m3 values ``[rows, columns]`` and the float32 scale of each row.
Quantised = tuple[Tensor, Tensor]


def quantised_rows(x: Tensor) -> Quantised:
    """x ``[M, K]`` as e4m3 values and the scale of each row, its absolute maximum / 448.

    A row of zeros has the scale 1. A row that holds NaN or an infinity has that scale, and holds NaN.
    """
    x = x.float()
    largest = x.abs().amax(1)
    bounded = torch.where(largest < SMALLEST, SMALLEST, largest)
    # Two tensors are divided exactly; on a GPU torch multiplies by the inverse of a number, or of what divides one.
    limit = torch.full_like(bounded, LARGEST)
    scale = torch.where(largest == 0, torch.ones_like(bounded), bounded / limit)
    # clamp keeps NaN.
    return (x * (limit / bounded)[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scale


def dequantised(operand: Quantised) -> Tensor:
    """What the values stand for, in float32."""
    values, scale = operand
    return values.float() * scale[:, None]


def scaled_product(left: Quantised, right: Quantised) -> Tensor:
    """``left rightᵀ`` in float32: left ``[M, K]``, right ``[N, K]`` -> ``[M, N]``."""
    return dequantised(left) @ dequantised(right).T


def scaled_hidden(
    x: Quantised,
    w_up: Quantised,
    b_up: Tensor | None = None,
    w_gate: Quantised | None = None,
    b_gate: Tensor | None = None,
    *,
    activation: str,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(h, z, z_gate) ``[M, N]`` in float32, h after its dropout."""
    z = scaled_product(x, w_up)
    z = z if b_up is None else z + b_up
    z_gate = None if w_gate is None else scaled_product(x, w_gate)
    z_gate = z_gate if z_gate is None or b_gate is None else z_gate + b_gate
    return dropped(hidden(z, z_gate, activation=activation), dropout_p, seed), z, z_gate


def scaled_hidden_gradient(
    dy: Quantised,
    w_down: Quantised,
    z: Tensor,
    z_gate: Tensor | None = None,
    *,
    activation: str,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dz, dz_gate, h) ``[M, N]`` in float32, for w_down transposed to ``[N, O]``."""
    act, z = ACTIVATIONS[activation], z.float()
    d_hidden = dropped(scaled_product(dy, w_down), dropout_p, seed)
    again = dropped(hidden(z, None if z_gate is None else z_gate.float(), activation=activation), dropout_p, seed)
    if z_gate is None:
        return act.gradient(d_hidden, z), None, again
    z_gate = z_gate.float()
    return d_hidden * act.torch(z_gate), act.gradient(d_hidden * z, z_gate), again
