"""The layers that are measured in 8 bits, and in what ways their products and what surrounds them run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedlayers import FusedFFN, SplitKLinear
from fusedlayers.functional import lora_ffn

TORCH, COMPILED, SEPARATE = "torch", "torch.compile", "separate"
BF16, FP8, KEPT = "bf16", "fp8", "fp8, weights kept"
_E4M3, _LARGEST = torch.float8_e4m3fn, 448.0


class AdaptedFFN(FusedFFN):
    """An FFN of frozen weights with an adapter of low rank on each of its linear layers."""

    scale = 2.0

    def __init__(self, columns: int, hidden: int, rank: int, **options: Any) -> None:
        super().__init__(columns, hidden, **options)
        self.requires_grad_(False)
        made: dict[str, Any] = {"bias": False, "device": self.up_proj.weight.device, "dtype": self.up_proj.weight.dtype}
        self.adapters = nn.ModuleDict()
        for name in ("up_proj", "down_proj", "gate_proj"):
            linear = getattr(self, name)
            sizes = (linear.in_features, rank), (rank, linear.out_features)
            self.adapters[name] = nn.Sequential(*(nn.Linear(*each, **made) for each in sizes))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert self.gate_proj is not None
        factors = list(self.adapters.parameters())
        return lora_ffn(
            x, self.up_proj.weight, self.down_proj.weight, None, None, self.gate_proj.weight, None, *factors,
            activation=self.activation, up_scale=self.scale, down_scale=self.scale, gate_scale=self.scale,
            precision=self.precision,
        )  # fmt: skip


class Layer(NamedTuple):
    """A layer of the sizes M, K, N; without an activation a linear one, and with a ``rank`` one of frozen weights."""

    title: str
    shape: tuple[int, int, int]
    activation: str = ""
    gated: bool = False
    rank: int = 0

    def ours(self, precision: str | None, device: torch.device) -> nn.Module:
        """The layer in bf16, with other weights every time."""
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16, "precision": precision}
        _, columns, hidden = self.shape
        if not self.activation:
            return SplitKLinear(columns, hidden, **options)
        options |= {"activation": self.activation, "gated": self.gated}
        return AdaptedFFN(columns, hidden, self.rank, **options) if self.rank else FusedFFN(columns, hidden, **options)


LAYERS = (
    Layer("FFN, gelu", (16384, 1024, 4096), "gelu"),
    Layer("gated FFN, silu", (16384, 2048, 8192), "silu", gated=True),
    Layer("gated FFN, silu", (8192, 4096, 14336), "silu", gated=True),
    Layer("gated FFN, silu, LoRA", (16384, 2048, 8192), "silu", gated=True, rank=16),
    Layer("gated FFN, silu, LoRA", (8192, 4096, 14336), "silu", gated=True, rank=16),
    Layer("linear", (16384, 2048, 2048)),
    Layer("linear", (8192, 4096, 4096)),
)


class _ScaledLinear(torch.autograd.Function):
    """torchao's ``rowwise_with_gw_hp``, with sums on chip as fast as ours: gradients of weights are those of bf16.

    For dx the weight is quantised along its columns as it lies, so that only bytes are to be transposed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        (left, rows), (right, columns) = _quantised(x, 1), _quantised(weight, 1)
        return _product(left, right.t(), rows, columns.t())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        (left, rows), (right, columns) = _quantised(dy, 1), _quantised(weight, 0)
        dw = dy.t() @ x if ctx.needs_input_grad[1] else None
        return _product(left, right.t().contiguous().t(), rows, columns), dw


def _scaled_linear(x: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = _ScaledLinear.apply(x, weight)  # dynamo knows a call of this kind, and no stored one
    return found


def _quantised(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The matrix in e4m3, and for each of its lines along ``dim`` what that is to be multiplied by, in float32."""
    scale = x.abs().amax(dim, keepdim=True).float().clamp_min(1e-12) / _LARGEST
    return (x.float() / scale).clamp(-_LARGEST, _LARGEST).to(_E4M3), scale


def _product(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    options: dict[str, Any] = {"scale_a": rows, "scale_b": columns, "out_dtype": torch.bfloat16}
    found: Tensor = torch._scaled_mm(left.contiguous(), right, **options, use_fast_accum=True)
    return found


class Plain(nn.Module):
    """One of our layers in the operations of torch, with the same weights; ``product`` takes x and a weight."""

    def __init__(self, ours: Any, product: Callable[[Tensor, Tensor], Tensor] = F.linear) -> None:
        super().__init__()
        self.ours, self.product, self.ffn = ours, product, isinstance(ours, FusedFFN)

    def forward(self, x: Tensor) -> Tensor:
        if not self.ffn:
            return self.product(x, self.ours.weight)
        hidden = self._linear("up_proj", x)
        if self.ours.gate_proj is None:
            return self._linear("down_proj", F.gelu(hidden))
        return self._linear("down_proj", F.silu(self._linear("gate_proj", x)) * hidden)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = self.product(x, getattr(self.ours, name).weight)
        return y + self.ours.adapters[name](x) * self.ours.scale if isinstance(self.ours, AdaptedFFN) else y


def contenders(layer: Layer, device: torch.device, backward: bool) -> dict[str, nn.Module]:
    """Each by its name, all with the same weights; without gradients no quantised weight is kept."""
    ours, narrow = layer.ours(None, device), layer.ours("fp8", device)
    narrow.load_state_dict(ours.state_dict())
    found: dict[str, Any] = {TORCH: Plain(ours)}
    for name, product in ((COMPILED, F.linear), (SEPARATE, _scaled_linear)):
        found[name] = torch.compile(Plain(ours, product), fullgraph=True, dynamic=False)
    return found | {BF16: ours, FP8: narrow} | ({KEPT: narrow} if backward else {})
