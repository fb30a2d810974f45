"""The reference of products in 8 bits: quantise the rows of both operands, and multiply the dequantised values.

A GPU accumulates such products with about 14 bits of the largest partial sum; the reference sums in float32, or in
float64 if the operands are float64.
"""

import torch
from torch import Tensor

from ..kernels.activations import ACTIVATIONS
from .layers import dropped, hidden

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
# Smaller maxima count as this one, so that the inverse of a scale is finite.
SMALLEST = 2.0**-100
# Norms of units are limited to this range.
LEAST_NORM, MOST_NORM = 2.0**-40, 2.0**40

# e4m3 values ``[rows, columns]``, and the float32 scale of each row or one scale for all rows.
Quantised = tuple[Tensor, Tensor]


def quantised_rows(x: Tensor, scale: Tensor | None = None) -> Quantised:
    """x ``[M, K]`` as e4m3 values and the scale of each row: the smallest power of two that is >= max(abs(row)) / 448.

    The scale of a row with NaN or an infinity is NaN or infinity. A ``scale`` that is given is taken.
    """
    x = x.float()
    scale = scales_of(x.abs().amax(1)) if scale is None else scale
    # NaN passes through clamp.
    return (x / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scale


def scales_of(largest: Tensor) -> Tensor:
    """The scales of rows with these absolute maxima, or bounds of them."""
    # Divide by a tensor, which is exact: by a Python number torch on a GPU multiplies with the rounded inverse.
    ratio = torch.where(largest < SMALLEST, SMALLEST, largest)
    ratio = ratio / torch.full_like(ratio, LARGEST)
    mantissa, exponent = torch.frexp(ratio)
    power = torch.ldexp(torch.ones_like(ratio), exponent - (mantissa == 0.5).int())
    return torch.where(ratio.isfinite(), power, ratio)


def transposed_pair(left: Quantised, right: Tensor, right_scale: Tensor) -> tuple[Quantised, Quantised]:
    """Both operands of ``leftᵀ right``, transposed: left ``[M, N]`` -> ``[N, M]``, right ``[M, K]`` -> ``[K, M]``.

    ``right_scale`` ``[M]`` holds the scales of right's rows; right may be quantised by them before. The product of both
    scales of a row, relative to the largest such product, is multiplied into left's values. The largest product then is
    left's scale, and right's is 1.
    """
    values, scale = left
    largest = (scale.double() * right_scale.double()).amax()
    factors = (scale.double() * right_scale.double() / largest).float()
    scaled_left = (values.float() * factors[:, None]).to(E4M3)
    scaled_right = right if right.dtype == E4M3 else quantised_rows(right, right_scale)[0]
    one = torch.ones_like(scale[:1])[0]
    return (scaled_left.T.contiguous(), largest.float()), (scaled_right.T.contiguous(), one)


def unit_norms(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The norms ``[N]`` of the rows of a weight and its bias, as those who divide by them see them: rounded up.

    Their inverses are cut to bfloat16; see ``kernels.bounds``.
    """
    norms = torch.linalg.vector_norm(weight.float(), dim=1)
    norms = norms if bias is None else norms + bias.float().abs()
    inverse = 1 / norms.clamp(LEAST_NORM, MOST_NORM)
    return 1 / (inverse.view(torch.int32) & -65536).view(torch.float32)


def dequantised(operand: Quantised) -> Tensor:
    """The values times their scales, in float32."""
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
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dz, dz_gate, h) ``[M, N]`` in float32, for w_down transposed to ``[N, O]``; ``added`` is added to dh."""
    act, z = ACTIVATIONS[activation], z.float()
    d_hidden = scaled_product(dy, w_down)
    d_hidden = dropped(d_hidden if added is None else d_hidden + added, dropout_p, seed)
    again = dropped(hidden(z, None if z_gate is None else z_gate.float(), activation=activation), dropout_p, seed)
    if z_gate is None:
        return act.gradient(d_hidden, z), None, again
    z_gate = z_gate.float()
    return d_hidden * act.torch(z_gate), act.gradient(d_hidden * z, z_gate), again
