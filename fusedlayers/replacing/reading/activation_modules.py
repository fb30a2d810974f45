"""Activations that are recognised by identity: torch's own modules and functions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.activations import LEAKY_SLOPE
from ...modules import class_path

# Functions that compute an activation without options, by this library's name of it.
TORCH_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "relu": (F.relu, torch.relu),
    "silu": (F.silu,),
    "tanh": (F.tanh, torch.tanh),
    "sigmoid": (F.sigmoid, torch.sigmoid),
    "leaky_relu": (F.leaky_relu,),
}
_CLASSES: dict[type[nn.Module], str] = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
}
# By name, so that transformers is not imported: in training it runs an autograd Function of its own.
_BY_PATH = {"transformers.models.bloom.modeling_bloom.BloomGelu": "gelu_tanh"}
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def known_activation(activation: object) -> str | None:
    """This library's name of an activation that is one of torch's modules, or ``functools.partial`` of F.gelu."""
    if isinstance(activation, functools.partial):
        options = set(activation.keywords)
        if activation.func is F.gelu and not activation.args and options <= {"approximate"}:
            return _GELU.get(activation.keywords.get("approximate", "none"))
        return None
    if type(activation) is nn.GELU:
        return _GELU.get(activation.approximate)
    if type(activation) is nn.LeakyReLU:
        return "leaky_relu" if activation.negative_slope == LEAKY_SLOPE else None
    return _CLASSES.get(type(activation)) or _BY_PATH.get(class_path(type(activation)))  # type: ignore[arg-type]
