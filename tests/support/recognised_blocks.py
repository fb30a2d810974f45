"""Blocks as users write them, in the manners of nanoGPT, x-transformers, timm, lit-gpt, torchtune and others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

K, N = 6, 10


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu = nn.Linear(K, N, bias=False), nn.GELU()
        self.c_proj, self.dropout = nn.Linear(N, K, bias=False), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gelu(self.c_fc(x))
        x = self.c_proj(x)
        return self.dropout(x)


class SquaredRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class GLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.act = nn.Linear(K, 2 * N), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * self.act(gate)


class XTransformers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Sequential(GLU(), nn.Dropout(0.1), nn.Linear(N, K))

    def forward(self, x: Tensor) -> Tensor:
        return self.ff(x)


class TanhGELU(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return 0.5 * z * (1 + torch.tanh(0.7978845608028654 * (z + 0.044715 * z**3)))


class Timm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(K, N), TanhGELU(), nn.Dropout(0.1)
        self.norm, self.fc2, self.drop2 = nn.Identity(), nn.Linear(N, K), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(self.act(self.fc1(x)))
        return self.drop2(self.fc2(self.norm(x)))


class LitGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc_1, self.fc_2, self.proj = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        x_fc_1, x_fc_2 = self.fc_1(x), self.fc_2(x)
        return self.proj(F.silu(x_fc_1) * x_fc_2)


class Torchtune(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(K, N), nn.Linear(N, K), nn.Linear(K, N)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.w1(x))
        if self.w3 is not None:
            hidden = hidden * self.w3(x)
        return self.w2(hidden)


class Phi3(nn.Module):
    """Gate and up projection in one linear; ``rows`` says which rows are the gate's."""

    def __init__(self, rows: str = "first", dropout: float = 0.0) -> None:
        super().__init__()
        self.gate_up, self.down, self.rows, self.dropout = nn.Linear(K, 2 * N), nn.Linear(N, K), rows, dropout

    def forward(self, x: Tensor) -> Tensor:
        z = self.gate_up(x)
        size = z.shape[-1] // 2
        halves = {"first": (z[..., :size], z[..., size:]), "even": (z[..., ::2], z[..., 1::2])}
        gate, up = halves["first" if self.rows in ("first", "last") else "even"]
        if self.rows in ("last", "odd"):
            gate, up = up, gate
        return self.down(F.dropout(F.gelu(gate) * up, self.dropout, self.training))


class SizedByItself(nn.Module):
    """A block that keeps its sizes, and uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo, self.hidden_size = nn.Linear(16, 2 * 48), nn.Linear(48, 16), 48

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.wi(x).split(self.hidden_size, dim=-1)
        return self.wo(F.silu(gate) * up)


class Layer(nn.Module):
    """A layer with its FFN in the forward, and activation and dropout as functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(K), nn.LayerNorm(K)
        self.attention = nn.MultiheadAttention(K, 2, batch_first=True)
        self.fc1, self.fc2, self.p = nn.Linear(K, N), nn.Linear(N, K), 0.1
        self.scale = nn.Parameter(torch.ones(K))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask)[0]
        h = self.fc2(F.dropout(F.gelu(self.fc1(self.norm2(x))), self.p, self.training))
        return x + self.scale * h


class LayerOfMany(nn.Module):
    """A layer that nobody can call without its mask and its positions: its FFN alone is tried."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(K, K) for _ in range(4))
        self.norm, self.fc1, self.fc2, self.act = nn.LayerNorm(K), nn.Linear(K, N), nn.Linear(N, K), nn.ReLU()

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor], mask: dict[str, Tensor]) -> Tensor:
        cos, sin = positions
        q, k = self.q(x) * cos, self.k(x) * sin
        x = x + self.o((q @ k.mT + mask["causal"]).softmax(-1) @ self.v(x))
        residual = x
        x = self.fc1(self.norm(x))
        x = self.act(x)
        x = self.fc2(x)
        return residual + x


class GatedLayer(nn.Module):
    """A layer with a gated FFN between its norm and its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.w1, self.w3, self.w2 = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class PackedLayer(nn.Module):
    """The same with one linear for gate and up projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wi, self.wo, self.act = nn.LayerNorm(K), nn.Linear(K, 2 * N), nn.Linear(N, K), nn.GELU()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.wi(self.norm(x)).chunk(2, dim=-1)
        return x + self.wo(self.drop(up * self.act(gate)))


class Into(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        z = self.dense(x)
        return z * 0.5 * (1.0 + torch.erf(z / 2**0.5))


class OutOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Linear(N, K), nn.LayerNorm(K), nn.Dropout(0.1)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.dense(h)) + x)


class InTwoChildren(nn.Module):
    """As in ESM: a child computes the hidden, and writes its activation out."""

    def __init__(self) -> None:
        super().__init__()
        self.intermediate, self.output = Into(), OutOf()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.intermediate(x), x)


# How to build each, what the report says of it, and whether torch's path draws the masks of its modules.
BLOCKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "nanoGPT": (NanoGPT, "c_fc, c_proj: gelu, 6 -> 10 -> 6"),
    "squared relu": (SquaredRelu, "c_fc, c_proj: relu2, 6 -> 10 -> 6"),
    "x-transformers": (XTransformers, "0.proj, 2: gated silu, 6 -> 10 -> 6"),
    "timm": (Timm, "fc1, fc2: gelu_tanh, 6 -> 10 -> 6"),
    "lit-gpt": (LitGPT, "fc_2, fc_1, proj: gated silu, 6 -> 10 -> 6"),
    "torchtune": (Torchtune, "w3, w1, w2: gated silu, 6 -> 10 -> 6"),
    "gate first": (Phi3, "gate_up, down: gated gelu, 6 -> 10 -> 6"),
    "gate last": (lambda: Phi3("last", 0.1), "gate_up, down: gated gelu, 6 -> 10 -> 6"),
    "gate even": (lambda: Phi3("even"), "gate_up, down: gated gelu, 6 -> 10 -> 6"),
    "gate odd": (lambda: Phi3("odd", 0.1), "gate_up, down: gated gelu, 6 -> 10 -> 6"),
    "sizes": (SizedByItself, "wi, wo: gated silu, 16 -> 48 -> 16"),
    "layer": (Layer, "fc1, fc2: gelu, 6 -> 10 -> 6"),
    "gated layer": (GatedLayer, "w3, w1, w2: gated silu, 6 -> 10 -> 6"),
    "packed layer": (PackedLayer, "wi, wo: gated gelu, 6 -> 10 -> 6"),
    "two children": (InTwoChildren, "intermediate.dense, output.dense: gelu, 6 -> 10 -> 6"),
}
