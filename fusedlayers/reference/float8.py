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
# Smaller maxima count as this: the inverse of a scale is still finite.
SMALLEST = 2.0**-100

# e4m3 values ``[rows, columns]`` and the float32 scale of each row, or of all.
Quantised = tuple[Tensor, Tensor]


def quantised_rows(x: Tensor) -> Quantised:
    """x ``[M, K]`` as e4m3 values and the scale of each row: the least power of two from its maximum / 448 on.

    The maximum is that of absolute values. A row that holds NaN or an infinity has that scale.
    """
    x = x.float()
    largest = x.abs().amax(1)
    # Two tensors are divided exactly; on a GPU torch multiplies by the inverse of a number.
    ratio = torch.where(largest < SMALLEST, SMALLEST, largest)
    ratio = ratio / torch.full_like(ratio, LARGEST)
    mantissa, exponent = torch.frexp(ratio)
    power = torch.ldexp(torch.ones_like(ratio), exponent - (mantissa == 0.5).int())
    scale = torch.where(ratio.isfinite(), power, ratio)
    # clamp keeps NaN.
    return (x / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scale


def transposed_pair(left: Quantised, right: Tensor, right_scale: Tensor) -> tuple[Quantised, Quantised]:
    """Both operands of ``leftᵀ right``, transposed: left ``[M, N]`` -> ``[N, M]``, right ``[M, K]`` -> ``[K, M]``.

    ``right_scale`` are the scales ``[M]`` of its rows. The products of both scales, relative to the largest one, are
    factors of left's values; the largest is its scale then, and that of right is 1.
    """
    values, scale = left
    largest = (scale.double() * right_scale.double()).amax()
    factors = (scale.double() * right_scale.double() / largest).float()
    moved = (values.float() * factors[:, None]).to(E4M3)
    found = (right.float() / right_scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return (moved.T.contiguous(), largest.float()), (found.T.contiguous(), torch.ones_like(scale[:1])[0])


def dequantised(operand: Quantised) -> Tensor:
    """What the values stand for, in float32."""
    values, scale = operand
    return values.float() * (scale[:, None] if scale.dim() else scale)


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
