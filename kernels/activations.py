"""Every activation once: its formula, its torch twin, and one device function that returns value and slope together.

A kernel asks for both and uses what it needs; the compiler drops the unused half. ``FAST`` replaces the exponential and
the division by one hardware ``tanh`` (absolute error below 2^-10): under the rounding of bfloat16, above that of
float16 and float32, so only bfloat16 kernels compiled for NVIDIA GPUs ask for it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .device import tl, triton

LEAKY_SLOPE = 0.01


@dataclass(frozen=True)
class Activation:
    """One activation: its name, its formula in plain text, and the torch function that defines its values."""

    name: str
    formula: str
    torch: Callable[[torch.Tensor], torch.Tensor]


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation("identity", "z", lambda z: z),
        Activation("relu", "max(z, 0)", F.relu),
        Activation("relu2", "max(z, 0)²", lambda z: F.relu(z).square()),
        Activation("gelu", "z Φ(z) = z (1 + erf(z / √2)) / 2", F.gelu),
        Activation(
            "gelu_tanh",
            "z (1 + tanh(√(2/π) (z + 0.044715 z³))) / 2",
            lambda z: F.gelu(z, approximate="tanh"),
        ),
        Activation("silu", "z σ(z)", F.silu),
        Activation("quick_gelu", "z σ(1.702 z)", lambda z: z * torch.sigmoid(1.702 * z)),
        Activation("tanh", "tanh(z)", torch.tanh),
        Activation("sigmoid", "σ(z) = 1 / (1 + exp(-z))", torch.sigmoid),
        Activation("leaky_relu", f"z if z > 0 else {LEAKY_SLOPE} z", lambda z: F.leaky_relu(z, LEAKY_SLOPE)),
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
    """Our name of an activation given by our name, Hugging Face's name, or ``None`` for the identity.

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
_GELU_CUBIC = tl.constexpr(0.044715)
_QUICK_GELU = tl.constexpr(1.702)
_LEAKY_SLOPE = tl.constexpr(LEAKY_SLOPE)


@triton.jit
def _tanh(z, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)
    else:
        # The exponential form cancels near zero, where the odd Taylor polynomial is exact to the last bits of float32.
        square = z * z
        series = -17.0 / 315.0 + square * (62.0 / 2835.0)
        series = 2.0 / 15.0 + square * series
        series = -1.0 / 3.0 + square * series
        near = z + z * square * series
        decay = tl.exp(-2.0 * tl.abs(z))
        far = (1.0 - decay) / (1.0 + decay)
        far = tl.where(z < 0, -far, far)
        return tl.where(tl.abs(z) < 0.25, near, far)


@triton.jit
def _sigmoid(z, FAST: tl.constexpr):
    if FAST:
        return 0.5 * _tanh(0.5 * z, FAST) + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """Value and slope of the named activation at ``z`` (float32). NaN, ±inf and ±0 come out as torch gives them."""
    if ACTIVATION == "identity":
        return z, tl.full(z.shape, 1.0, z.dtype)
    elif ACTIVATION == "relu":
        # Comparisons instead of a maximum: compiled maximum drops NaN, and torch's relu passes the gradient at NaN.
        return tl.where(z <= 0, 0.0, z), tl.where(z <= 0, 0.0, 1.0)
    elif ACTIVATION == "relu2":
        positive = tl.where(z <= 0, 0.0, z)
        return positive * positive, 2.0 * positive
    elif ACTIVATION == "leaky_relu":
        return tl.where(z > 0, z, z * _LEAKY_SLOPE), tl.where(z > 0, 1.0, _LEAKY_SLOPE)
    elif ACTIVATION == "tanh":
        value = _tanh(z, FAST)
        return value, 1.0 - value * value
    elif ACTIVATION == "sigmoid":
        value = _sigmoid(z, FAST)
        return value, value * (1.0 - value)
    elif ACTIVATION == "silu":
        gate = _sigmoid(z, FAST)
        return z * gate, gate * (1.0 + z * (1.0 - gate))
    elif ACTIVATION == "quick_gelu":
        gate = _sigmoid(z * _QUICK_GELU, FAST)
        return z * gate, gate * (1.0 + z * _QUICK_GELU * (1.0 - gate))
    elif ACTIVATION == "gelu_tanh":
        square = z * z
        tanh = _tanh(z * _SQRT_2_OVER_PI * (1.0 + square * _GELU_CUBIC), FAST)
        half = 0.5 * (1.0 + tanh)
        inner_slope = (1.0 + square * (3.0 * _GELU_CUBIC)) * _SQRT_2_OVER_PI
        return z * half, half + 0.5 * z * (1.0 - tanh * tanh) * inner_slope
    else:
        tl.static_assert(ACTIVATION == "gelu", "activate() has no such activation")
        cdf = 0.5 * (1.0 + tl.erf(z * _INVERSE_SQRT_2))
        density = tl.exp(-0.5 * z * z) * _INVERSE_SQRT_2PI
        return z * cdf, cdf + z * density
