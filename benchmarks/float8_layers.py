"""The layers that are measured in 8 bits, and the contenders that run them."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedlayers import FusedFFN, SplitKLinear
from fusedlayers.bench.cases.moe_ffn import CASE as EXPERTS
from fusedlayers.functional import lora_ffn, moe_ffn
from fusedlayers.modules.moe import ExpertWeights

TORCH, COMPILED = "torch", "torch.compile"
SEPARATE, TORCHAO = "separate", "torchao"
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


class Experts(nn.Module):
    """Gated experts in bf16, with a routing that is random and always the same."""

    def __init__(self, shape: tuple[int, ...], activation: str, precision: str | None, device: torch.device) -> None:
        super().__init__()
        tokens, columns, hidden, experts, k = shape
        self.weights = ExpertWeights(
            columns, hidden, experts, gated=True, bias=False, device=device, dtype=torch.bfloat16
        )
        logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0)).to(device)
        scores, self.index = logits.softmax(-1).topk(k, -1)
        self.scores = scores.bfloat16()
        self.activation, self.precision = activation, precision

    def arguments(self) -> dict[str, Any]:
        """The arguments of the functional call after x, but for the precision."""
        routing = {"top_k_index": self.index, "top_k_weights": self.scores, "activation": self.activation}
        return routing | self.weights.arguments()

    def forward(self, x: Tensor) -> Tensor:
        return moe_ffn(x, **self.arguments(), precision=self.precision)


class PlainExperts(nn.Module):
    """The same experts through torch's grouped products."""

    def __init__(self, ours: Experts) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, x: Tensor) -> Tensor:
        found = EXPERTS.torch_expression(x, **self.ours.arguments())
        assert isinstance(found, Tensor)
        return found


class Layer(NamedTuple):
    """A layer of the sizes M, K, N; without an activation a linear one, and with a ``rank`` one of frozen weights.

    Experts have two sizes more: how many there are, and how many a token has.

    ``recipe`` is torchao's name of what auto mode does: weight gradients from operands in 8 bits are ``rowwise``, from
    operands in 16 bits ``rowwise_with_gw_hp``. Without weight gradients both are the same, but for a weight's scales.
    """

    title: str
    shape: tuple[int, ...]
    activation: str = ""
    gated: bool = False
    rank: int = 0
    recipe: str = "rowwise"

    def ours(self, precision: str | None, device: torch.device) -> nn.Module:
        """The layer in bf16, with other weights every time."""
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16, "precision": precision}
        _, columns, hidden, *experts = self.shape
        if experts:
            return Experts(self.shape, self.activation, precision, device)
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
    Layer("gated experts, silu", (16384, 2048, 768, 128, 8), "silu", gated=True),
    Layer("gated experts, silu", (8192, 4096, 14336, 8, 2), "silu", gated=True),
)


class _ScaledProduct(torch.autograd.Function):
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


def _quantised(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The matrix in e4m3, and for each of its lines along ``dim`` what that is to be multiplied by, in float32."""
    scale = x.abs().amax(dim, keepdim=True).float().clamp_min(1e-12) / _LARGEST
    return (x.float() / scale).clamp(-_LARGEST, _LARGEST).to(_E4M3), scale


def _product(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    options: dict[str, Any] = {"scale_a": rows, "scale_b": columns, "out_dtype": torch.bfloat16}
    found: Tensor = torch._scaled_mm(left.contiguous(), right, **options, use_fast_accum=True)
    return found


class ScaledLinear(nn.Linear):
    """A linear layer without bias whose operands are quantised apart from its product."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _ScaledProduct.apply(x, self.weight)
        return found


class Plain(nn.Module):
    """One of our layers in the operations of torch; its linear layers, of class ``linear``, share the weights."""

    def __init__(self, ours: Any, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        # In the order of our children, so that gradients come in the order of ours.
        children = ours.named_children() if isinstance(ours, FusedFFN) else [("linear", ours)]
        linears = {name: _sharing(child, linear) for name, child in children if isinstance(child, nn.Linear)}
        self.linears = nn.ModuleDict(linears)
        self.adapters = ours.adapters if isinstance(ours, AdaptedFFN) else None

    def forward(self, x: Tensor) -> Tensor:
        if "linear" in self.linears:
            return self._adapted("linear", x)
        up = self._adapted("up_proj", x)
        hidden = F.silu(self._adapted("gate_proj", x)) * up if "gate_proj" in self.linears else F.gelu(up)
        return self._adapted("down_proj", hidden)

    def _adapted(self, name: str, x: Tensor) -> Tensor:
        y: Tensor = self.linears[name](x)
        return y if self.adapters is None else y + self.adapters[name](x) * AdaptedFFN.scale


def _sharing(source: nn.Linear, linear: type[nn.Linear]) -> nn.Linear:
    """A layer of this class with the same weight."""
    found = linear(source.in_features, source.out_features, bias=False, device="meta")
    found.weight = source.weight
    return found


def has_torchao() -> bool:
    """Whether torchao is installed."""
    return importlib.util.find_spec("torchao") is not None


def converted(plain: Plain, recipe: str) -> Plain:
    """``plain`` itself, with torchao's layers in place of its linear ones, those of adapters excepted.

    They compute gradients of frozen weights, too, which torch.compile removes.
    """
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(plain.linears, config=config)
    return plain


def contenders(layer: Layer, device: torch.device, backward: bool) -> dict[str, nn.Module]:
    """Each by its name, all with the same weights; without gradients no quantised weight is kept.

    Of experts torch has no product in 8 bits with gradients, and the results of ``bench moe_ffn`` have torch.compile's.
    """
    ours, narrow = layer.ours(None, device), layer.ours("fp8", device)
    narrow.load_state_dict(ours.state_dict())
    mine = {BF16: ours, FP8: narrow} | ({KEPT: narrow} if backward else {})
    if isinstance(ours, Experts):
        return {TORCH: PlainExperts(ours)} | mine
    plain = {COMPILED: Plain(ours), SEPARATE: Plain(ours, ScaledLinear)}
    if has_torchao():
        plain[TORCHAO] = converted(Plain(ours), layer.recipe)
    compiled: dict[str, Any] = {
        name: torch.compile(each, fullgraph=True, dynamic=False) for name, each in plain.items()
    }
    return {TORCH: Plain(ours)} | compiled | mine
