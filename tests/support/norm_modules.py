"""Norms as models write them: Llama's, OLMo's, Gemma's, T5's, Cohere's, and one of a user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedlayers.replacing.norms import Norm, recognise_norm

WIDTH = 48


class Llama(nn.Module):
    """In float32, cast, then the weight."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(WIDTH)), eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)


class Olmo2(Llama):
    """In float32, the weight, then the cast."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide / (wide.square().mean(-1, True) + self.variance_epsilon).sqrt())).to(x.dtype)


class Gemma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(WIDTH)), 1e-6

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class T5(Llama):
    """The variance alone in float32."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x.to(self.weight.dtype) if self.weight.dtype != torch.float32 else x)


class Olmo(nn.Module):
    """Without parameters, and with eps in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape = (WIDTH,)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(torch.float32), self.normalized_shape, None, None, eps=1e-5).to(x.dtype)


class Cohere(Llama):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        mean = wide.mean(-1, keepdim=True)
        wide = (wide - mean) * torch.rsqrt((wide - mean).pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.to(torch.float32) * wide).to(x.dtype)


class WithBias(nn.Module):
    """Other names, the bias first."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.g = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.tiny = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
        return ((wide - mean) / (variance + self.tiny).sqrt()).to(x.dtype) * self.g + self.b


class LitGPT(nn.Module):
    def __init__(self, offset: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.dim, self.add_unit_offset = nn.Parameter(torch.randn(WIDTH)), 1e-5, -1, offset

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.float()
        x = x * torch.rsqrt(torch.mean(x * x, dim=self.dim, keepdim=True) + self.eps)
        weight = (1 + self.weight) if self.add_unit_offset else self.weight
        return (x * weight.float()).to(dtype)


class Torchtune(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps, self.scale = 1e-6, nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.scale


NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Llama": (Llama, "rms_norm, weight, eps=1e-06"),
    "OLMo 2": (Olmo2, "rms_norm, weight, eps=1e-06"),
    "Gemma": (Gemma, "rms_norm, weight + 1, eps=1e-06"),
    "T5": (T5, "rms_norm, weight, eps=1e-06"),
    "OLMo": (Olmo, "layer_norm, no weight, eps=1e-05"),
    "Cohere": (Cohere, "layer_norm, weight, eps=1e-06"),
    "lit-gpt": (lambda: LitGPT(False), "rms_norm, weight, eps=1e-05"),
    "lit-gpt, offset": (lambda: LitGPT(True), "rms_norm, weight + 1, eps=1e-05"),
    "torchtune": (Torchtune, "rms_norm, weight, eps=1e-06"),
    "with bias": (WithBias, "layer_norm, weight and bias, eps=1e-05"),
    "another eps": (lambda: Llama(0.03), "rms_norm, weight, eps=0.03"),
}


def in_float64(norm: nn.Module) -> nn.Module:
    """The formula in float64: the norms themselves compute in float32."""
    found = recognise_norm(norm)
    assert isinstance(found, Norm)
    exact = copy.deepcopy(norm).double()
    exact.forward = lambda x: found.run(x, *found.of(exact))  # type: ignore[method-assign]
    return exact
