"""Calls of every public function for the tests of compilation: tensors of any length, and what a call gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fusedlayers import functional
from tests.support.operands import DEVICE

# (function, tensors and options by name) for a number of rows.
Call = tuple[Callable[..., Any], dict[str, Any]]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """No graph from another test."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def ffn(rows: int, gated: bool = False, width: int = 16, units: int = 24, **options: Any) -> Call:
    x, w_up, w_down, b_up = _leaf(2, rows, width), _leaf(units, width), _leaf(width, units), _leaf(units)
    more = {"w_gate": _leaf(units, width)} if gated else {"b_down": _leaf(width), "residual": _leaf(2, rows, width)}
    return functional.ffn, {"x": x, "w_up": w_up, "w_down": w_down, "b_up": b_up} | more | options


def lora_ffn(rows: int) -> Call:
    x, w_up, w_gate, w_down = _leaf(2, rows, 16), _leaf(24, 16), _leaf(24, 16), _leaf(16, 24)
    adapters = {"gate_a": _leaf(3, 16), "gate_b": _leaf(24, 3), "down_a": _leaf(5, 24), "down_b": _leaf(16, 5)}
    tensors = {"x": x, "w_up": w_up, "w_down": w_down, "w_gate": w_gate, "b_up": _leaf(24), "b_down": _leaf(16)}
    options = {"activation": "silu", "gate_scale": 0.5, "down_scale": 2.0, "adapter_dropout_p": 0.25}
    return functional.lora_ffn, tensors | adapters | options


def gemm_gemm(rows: int) -> Call:
    # The weights are one matrix for the whole batch.
    operands = {"a": _leaf(2, rows, 16), "b": _leaf(16, 24), "c": _leaf(1, 24, 8)}
    return functional.gemm_gemm, operands | {"activation": "gelu"}


def gemm_reduce(rows: int, **options: Any) -> Call:
    return functional.gemm_reduce, {"a": _leaf(2, rows, 16), "b": _leaf(2, 16, 24)} | options


def ragged(rows: int) -> Call:
    function, arguments = gemm_reduce(rows, op="max", dim=-2, return_indices=True, return_product=True)
    return function, arguments | {"bias": _leaf(24), "lengths": torch.tensor([2, rows - 1], device=DEVICE)}


def logsumexp(rows: int) -> Call:
    function, arguments = gemm_reduce(rows, op="logsumexp", dim=-1)
    return function, arguments | {"mask": torch.arange(24, device=DEVICE) % 3 > 0}


def maxsim(rows: int) -> Call:
    mask = torch.arange(3, device=DEVICE).expand(2, 3) < 2
    return functional.maxsim, {"queries": _leaf(2, rows, 16), "documents": _leaf(2, 3, 16), "document_mask": mask}


def packed(rows: int) -> Call:
    tensors = {"queries": _leaf(2, rows, 16), "documents": _leaf(5, 16)}
    return functional.maxsim, tensors | {"cu_seqlens_documents": torch.tensor([0, 3, 5], device=DEVICE)}


def weight_gradient(rows: int, **options: Any) -> Call:
    return functional.weight_gradient, {"dy": _leaf(2, rows, 16), "x": _leaf(2, rows, 24)} | options


def hidden_gradient(rows: int) -> Call:
    tensors = {"dy": _leaf(2, rows, 16), "w_down": _leaf(16, 24), "z": _leaf(2, rows, 24), "z_gate": _leaf(2, rows, 24)}
    return functional.hidden_gradient, tensors | {"activation": "silu", "bias": False}


def linear(rows: int, **options: Any) -> Call:
    return functional.linear, {"x": _leaf(2, rows, 16), "weight": _leaf(24, 16), "bias": _leaf(24)} | options


def linear_cross_entropy(rows: int, **options: Any) -> Call:
    target = (torch.arange(2 * rows, device=DEVICE) % 24).view(2, rows)
    tensors = {"input": _leaf(2, rows, 16), "linear_weight": _leaf(24, 16), "target": target, "linear_bias": _leaf(24)}
    return functional.linear_cross_entropy, tensors | {"ignore_index": 4} | options


def linear_log_probs(rows: int) -> Call:
    _, arguments = linear_cross_entropy(rows)
    return functional.linear_log_probs, arguments | {"return_entropy": True, "softcap": 5.0}


def moe_ffn(rows: int, **options: Any) -> Call:
    # The last expert has no token.
    index = (torch.arange(4 * rows, device=DEVICE) % 2).view(2, rows, 2)
    tensors = {"x": _leaf(2, rows, 16), "top_k_index": index, "top_k_weights": _leaf(2, rows, 2)}
    tensors |= {"w_up": _leaf(3, 16, 24), "w_down": _leaf(3, 12, 16), "b_up": _leaf(3, 24), "b_down": _leaf(3, 16)}
    return functional.moe_ffn, tensors | {"gate_and_up": "interleaved", "transposed": True} | options


CALLS: dict[str, Callable[[int], Call]] = {
    "ffn": ffn,
    "gated ffn": lambda rows: ffn(rows, gated=True, activation="silu", dropout_p=0.25),
    "recomputed ffn": lambda rows: ffn(rows, recompute=True, dropout_p=0.25),
    # No fused kernel holds this width in float32.
    "wide ffn": lambda rows: ffn(rows, width=144),
    # Rows of 21 hidden units end within a sector of memory.
    "wide gated ffn": lambda rows: ffn(rows, gated=True, width=144, units=21, activation="silu"),
    "lora_ffn": lora_ffn,
    "gemm_gemm": gemm_gemm,
    "gemm_reduce": ragged,
    "logsumexp": logsumexp,
    "argmax": lambda rows: gemm_reduce(rows, op="argmax", dim=-1),
    "sum": lambda rows: gemm_reduce(rows, op="sum", dim=-2),
    "maxsim": maxsim,
    "packed maxsim": packed,
    "weight_gradient": weight_gradient,
    "hidden_gradient": hidden_gradient,
    "linear": lambda rows: linear(rows, activation="gelu"),
    "split linear": lambda rows: linear(rows, split_k=2, reduction="atomic"),
    "linear_cross_entropy": lambda rows: linear_cross_entropy(rows, label_smoothing=0.1),
    "losses of tokens": lambda rows: linear_cross_entropy(rows, reduction="none", z_loss=0.1),
    "recomputed loss": lambda rows: linear_cross_entropy(rows, recompute=True),
    "linear_log_probs": linear_log_probs,
    "moe_ffn": lambda rows: moe_ffn(rows, activation="quick_gelu", limit=2.0, up_offset=1.0),
    "recomputed moe_ffn": lambda rows: moe_ffn(rows, activation="gelu", recompute=True),
}


def given(found: Any) -> list[Tensor]:
    """The tensors among what a public function returns."""
    return [tensor for tensor in (found if isinstance(found, tuple) else (found,)) if tensor is not None]


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Every result of a call, and every gradient for random gradients of these; the same random numbers each time."""
    torch.manual_seed(1)
    results = given(function(**arguments))
    found = {f"result {place}": tensor.detach() for place, tensor in enumerate(results)}
    outputs = [tensor for tensor in results if tensor.requires_grad]
    leaves = {name: t for name, t in arguments.items() if isinstance(t, Tensor) and t.requires_grad}
    if not outputs:
        return found
    torch.manual_seed(2)
    upstream = [torch.randn_like(tensor) for tensor in outputs]
    gradients: Sequence[Tensor] = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    return found | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
