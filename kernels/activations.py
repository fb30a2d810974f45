"""Every activation once: its formula, its torch twin, and one device function that returns value and slope together.

A kernel asks for both and uses what it needs; the compiler drops the unused half. ``ACCURACY`` is the error allowed:

    exact   the last bits of float32
    half    below the rounding of float16: erf is a fitted polynomial
    coarse  below the rounding of bfloat16: in addition, one hardware tanh (NVIDIA) replaces an exponential and a
            division
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .device import tl, triton

LEAKY_SLOPE = 0.01
# The largest absolute error of value and slope for |z| <= 8; None: that of float32 arithmetic.
ACCURACIES: dict[str, float | None] = {"exact": None, "half": 2.0**-13, "coarse": 2.0**-8}


# torch's own backward functions, used where they are differentiable themselves.
_aten = torch.ops.aten


def _silu_gradient(gradient: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return _aten.silu_backward(gradient, z)
    gate = torch.sigmoid(z)
    return gradient * gate * (1 + z * (1 - gate))


def _quick_gelu_gradient(gradient: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(1.702 * z)
    return gradient * gate + 1.702 * _aten.sigmoid_backward(gradient * z, gate)


# Defined outside the class, whose field ``torch`` shadows the module.
_Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Activation:
    """One activation: its name, its formula in plain text, and the torch function that defines its values.

    ``gradient`` is ``(g, z) -> g ⊙ act'(z)`` as autograd computes it. It is differentiable and, unlike torch.func.vjp,
    works under saved-tensor hooks, as in a checkpoint.
    """

    name: str
    formula: str
    torch: Callable[[torch.Tensor], torch.Tensor]
    gradient: _Gradient


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation("identity", "z", lambda z: z, lambda g, z: g),
        Activation("relu", "max(z, 0)", F.relu, lambda g, z: _aten.threshold_backward(g, z, 0)),
        Activation(
            "relu2",
            "max(z, 0)²",
            lambda z: F.relu(z).square(),
            lambda g, z: _aten.threshold_backward(g * (2 * F.relu(z)), z, 0),
        ),
        Activation("gelu", "z Φ(z) = z (1 + erf(z / √2)) / 2", F.gelu, _aten.gelu_backward),
        Activation(
            "gelu_tanh",
            "z (1 + tanh(√(2/π) (z + 0.044715 z³))) / 2",
            lambda z: F.gelu(z, approximate="tanh"),
            lambda g, z: _aten.gelu_backward(g, z, approximate="tanh"),
        ),
        Activation("silu", "z σ(z)", F.silu, _silu_gradient),
        Activation("quick_gelu", "z σ(1.702 z)", lambda z: z * torch.sigmoid(1.702 * z), _quick_gelu_gradient),
        Activation("tanh", "tanh(z)", torch.tanh, lambda g, z: _aten.tanh_backward(g, torch.tanh(z))),
        Activation(
            "sigmoid",
            "σ(z) = 1 / (1 + exp(-z))",
            torch.sigmoid,
            lambda g, z: _aten.sigmoid_backward(g, torch.sigmoid(z)),
        ),
        Activation(
            "leaky_relu",
            f"z if z > 0 else {LEAKY_SLOPE} z",
            lambda z: F.leaky_relu(z, LEAKY_SLOPE),
            lambda g, z: _aten.leaky_relu_backward(g, z, LEAKY_SLOPE, False),
        ),
    )
}

# Hugging Face's names (transformers.activations.ACT2FN) and PyTorch's, where they differ from ours.
ALIASES: dict[str, str] = {
    "linear": "identity",
    "none": "identity",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "swish": "silu",
    "relu_squared": "relu2",
}


def canonical_activation(name: str | None) -> str:
    """Our name for an activation, given our name, one of ``ALIASES``, or ``None`` for the identity.

    Raises:
        TypeError: ``name`` is neither a string nor ``None``.
        ValueError: the name is not known; the message lists the known ones.
    """
    if name is None:
        return "identity"
    if not isinstance(name, str):
        raise TypeError(f"activation must be a name (str) or None, got {name!r}")
    canonical = ALIASES.get(name, name)
    if canonical not in ACTIVATIONS:
        known = ", ".join([*ACTIVATIONS, *ALIASES])
        raise ValueError(f"activation {name!r} is not known; known are: {known}")
    return canonical


# Device code multiplies by these from the right: the interpreter cannot put a constexpr to the left of a tensor.
_INVERSE_SQRT_2 = tl.constexpr(1 / math.sqrt(2))
_INVERSE_SQRT_2PI = tl.constexpr(1 / math.sqrt(2 * math.pi))
_SQRT_2_OVER_PI = tl.constexpr(math.sqrt(2 / math.pi))
_GELU_CUBIC = tl.constexpr(0.044715 * math.sqrt(2 / math.pi))
_THREE_GELU_CUBIC = tl.constexpr(3 * 0.044715 * math.sqrt(2 / math.pi))
_HALF_QUICK_GELU = tl.constexpr(1.702 / 2)
_LEAKY_SLOPE = tl.constexpr(LEAKY_SLOPE)
_LOG2_E = tl.constexpr(math.log2(math.e))
# ln 2 in two parts: the first has 9 bits, so its product with an integer exponent is exact in float32.
_LN_2_HIGH = tl.constexpr(0.693359375)
_LN_2_LOW = tl.constexpr(math.log(2) - 0.693359375)
_PHI_0 = tl.constexpr(0.7976359095543584)
_PHI_1 = tl.constexpr(0.03690298395564577)
_PHI_2 = tl.constexpr(-0.0003267846831576575)
_THREE_PHI_1 = tl.constexpr(3 * 0.03690298395564577)
_FIVE_PHI_2 = tl.constexpr(5 * -0.0003267846831576575)


@triton.jit
def _hardware_tanh(z):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exact_exp(z):
    """exp(z) to the last bits of float32; z is clamped, so exp(-inf) may be the smallest float32 number, not 0."""
    # Compiled tl.exp rounds z log2(e), and the error grows with z: split off the integer power of two first.
    z = tl.where(z < -104.0, -104.0, tl.where(z > 90.0, 90.0, z))
    power = tl.floor(z * _LOG2_E + 0.5)
    return tl.exp(z - power * _LN_2_HIGH - power * _LN_2_LOW) * tl.exp2(power)


@triton.jit
def _sigmoid(z, ACCURACY: tl.constexpr):
    if ACCURACY == "coarse":
        return 0.5 * _hardware_tanh(0.5 * z) + 0.5
    elif ACCURACY == "half":
        return 1.0 / (1.0 + tl.exp(-z))
    else:
        return tl.div_rn(tl.full(z.shape, 1.0, z.dtype), 1.0 + exact_exp(-z))


@triton.jit
def _tanh(z, ACCURACY: tl.constexpr):
    if ACCURACY == "coarse":
        return _hardware_tanh(z)
    elif ACCURACY == "half":
        return 2.0 * _sigmoid(2.0 * z, ACCURACY) - 1.0
    else:
        # The exponential form cancels near zero, where the odd Taylor polynomial is exact to the last bits of float32.
        square = z * z
        series = -17.0 / 315.0 + square * (62.0 / 2835.0)
        series = 2.0 / 15.0 + square * series
        series = -1.0 / 3.0 + square * series
        near = z + z * square * series
        decay = exact_exp(-2.0 * tl.abs(z))
        # Above 1, compute 1 - tanh|z|: its error is smaller than that of tanh|z|, and the slope 1 - tanh² shows it.
        distant = tl.abs(z) > 1.0
        quotient = tl.div_rn(tl.where(distant, 2.0 * decay, 1.0 - decay), 1.0 + decay)
        far = tl.where(distant, 1.0 - quotient, quotient)
        far = tl.where(z < 0, -far, far)
        return tl.where(tl.abs(z) < 0.25, near, far)


@triton.jit
def _self_gated(z, u, u_slope, ACCURACY: tl.constexpr):
    """Value and slope of z σ(2u), given u and du/dz: SiLU and the GELUs have this form.

    With ``ACCURACY`` "coarse" both are doubled: `activation_unit` is the factor 1/2 of σ(2u) = (1 + tanh(u)) / 2.
    """
    # z du/dz may overflow where the gate's slope is 0 (inf times 0 is NaN), so multiply z by the gate's slope first.
    if ACCURACY == "coarse":
        tanh = _hardware_tanh(u)
        return z * tanh + z, (tanh + 1.0) + (z * (1.0 - tanh * tanh)) * u_slope
    else:
        gate = _sigmoid(2.0 * u, ACCURACY)
        if ACCURACY == "exact":
            # 1 - σ cancels where σ is close to 1, and large z and du/dz amplify the error.
            complement = _sigmoid(-2.0 * u, ACCURACY)
        else:
            complement = 1.0 - gate
        return z * gate, gate + z * ((gate * complement) * (2.0 * u_slope))


@triton.constexpr_function
def activation_unit(activation: str, accuracy: str) -> float:
    """The factor that value and slope of `activate` still need, before or after sums: a power of two, so exact."""
    self_gated = activation in ("gelu", "gelu_tanh", "silu", "quick_gelu")
    return 0.5 if self_gated and accuracy == "coarse" else 1.0


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr):
    """Value and slope of the named activation at ``z`` (float32), still to be multiplied by `activation_unit`.

    NaN, ±inf and ±0 give the same results as in torch.
    """
    if ACTIVATION == "identity":
        return z, tl.where(z == z, 1.0, 1.0)
    elif ACTIVATION == "relu":
        # Comparisons instead of a maximum: compiled maximum drops NaN, and torch's relu passes the gradient at NaN.
        return tl.where(z <= 0, 0.0, z), tl.where(z <= 0, 0.0, 1.0)
    elif ACTIVATION == "relu2":
        positive = tl.where(z <= 0, 0.0, z)
        return positive * positive, 2.0 * positive
    elif ACTIVATION == "leaky_relu":
        return tl.where(z > 0, z, z * _LEAKY_SLOPE), tl.where(z > 0, 1.0, _LEAKY_SLOPE)
    elif ACTIVATION == "tanh":
        value = _tanh(z, ACCURACY)
        return value, 1.0 - value * value
    elif ACTIVATION == "sigmoid":
        value = _sigmoid(z, ACCURACY)
        return value, value * (1.0 - value)
    elif ACTIVATION == "silu":
        return _self_gated(z, z * 0.5, 0.5, ACCURACY)
    elif ACTIVATION == "quick_gelu":
        return _self_gated(z, z * _HALF_QUICK_GELU, _HALF_QUICK_GELU, ACCURACY)
    elif ACTIVATION == "gelu_tanh":
        square = z * z
        u = z * (square * _GELU_CUBIC + _SQRT_2_OVER_PI)
        return _self_gated(z, u, square * _THREE_GELU_CUBIC + _SQRT_2_OVER_PI, ACCURACY)
    else:
        tl.static_assert(ACTIVATION == "gelu", "activate() has no such activation")
        if ACCURACY == "exact":
            cdf = 0.5 * (1.0 + tl.erf(z * _INVERSE_SQRT_2))
            density = exact_exp(-0.5 * z * z) * _INVERSE_SQRT_2PI
            return z * cdf, cdf + z * density
        else:
            # Φ(z) = σ(2 z p(z²)): p fitted to Φ and to the slope of z Φ(z) on |z| <= 6, beyond which Φ is 0 or 1 here.
            square = z * z
            square = tl.where(square > 36.0, 36.0, square)
            p = square * (square * _PHI_2 + _PHI_1) + _PHI_0
            p_slope = square * (square * _FIVE_PHI_2 + _THREE_PHI_1) + _PHI_0
            return _self_gated(z, z * p, p_slope, ACCURACY)


@triton.jit
def activated(z, ACTIVATION: tl.constexpr, ACCURACY: tl.constexpr):
    """The value of the named activation at ``z`` (float32), with its `activation_unit` applied."""
    value, _ = activate(z, ACTIVATION, ACCURACY)
    UNIT: tl.constexpr = activation_unit(ACTIVATION, ACCURACY)
    return value * UNIT if UNIT != 1.0 else value


@triton.jit
def hidden_and_slopes(z, z_gate, GATED: tl.constexpr, ARITHMETIC: tl.constexpr):
    """(H, ∂H/∂Z, ∂H/∂Zg) from the pre-activations; without a gate the last two are the same slope.

    ``ARITHMETIC`` is a ``matmul.arithmetic.Constants``.
    """
    ACTIVATION: tl.constexpr = ARITHMETIC.activation
    ACCURACY: tl.constexpr = ARITHMETIC.accuracy
    if GATED:
        value, slope = activate(z_gate, ACTIVATION, ACCURACY)
        return value * z, value, z * slope
    else:
        value, slope = activate(z, ACTIVATION, ACCURACY)
        return value, slope, slope


@triton.jit
def limited_hidden_and_slopes(z, z_gate, limits, GATED: tl.constexpr, ARITHMETIC: tl.constexpr):
    """`hidden_and_slopes`; gated and ``clamped``: H = ``act(min(Zg, limit)) ⊙ (clamp(Z, -limit, limit) + offset)``.

    ``limits`` are (limit, offset).
    """
    ACTIVATION: tl.constexpr = ARITHMETIC.activation
    ACCURACY: tl.constexpr = ARITHMETIC.accuracy
    if GATED and ARITHMETIC.clamped:
        limit, offset = limits
        # Comparisons instead of tl.minimum, which drops NaN in compiled code.
        up = tl.where(z > limit, limit, tl.where(z < -limit, -limit, z)) + offset
        value, slope = activate(tl.where(z_gate > limit, limit, z_gate), ACTIVATION, ACCURACY)
        free = (z >= -limit) & (z <= limit)
        return value * up, tl.where(free, value, 0.0), tl.where(z_gate <= limit, up * slope, 0.0)
    else:
        return hidden_and_slopes(z, z_gate, GATED, ARITHMETIC)


@triton.jit
def through_activation(gradient, slope, z, ARITHMETIC: tl.constexpr):
    """``gradient ⊙ slope``, the gradient at z; where relu is flat it is 0 even if ``gradient`` is NaN, as in torch."""
    product = gradient * slope
    if ARITHMETIC.activation == "relu" or ARITHMETIC.activation == "relu2":
        product = tl.where(z <= 0, 0.0, product)
    return product
