"""Inputs for the tests of experts, their results and gradients by name, and how they are held against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedlayers import functional, reference
from tests.support.operands import DEVICE, EPILOGUE, Tensors, assert_draws_close, on_path

PATHS = [EPILOGUE, "torch"]
LAYOUTS = ("separate", "concatenated", "interleaved")
# How gpt-oss computes its hidden, with a limit that many of these inputs pass.
CLAMPED: dict[str, Any] = {"activation": "quick_gelu", "limit": 0.7, "up_offset": 1.0}
ROUTINGS: dict[str, Callable[[int, int, int], Tensor]] = {
    "random": lambda tokens, experts, k: torch.rand(tokens, experts).argsort(1)[:, :k],
    # Also the same expert more than once.
    "repeated": lambda tokens, experts, k: torch.randint(experts, (tokens, k)),
    "one takes all": lambda tokens, experts, k: torch.full((tokens, k), experts - 1),
    "first and last": lambda tokens, experts, k: torch.randint(2, (tokens, k)) * (experts - 1),
    "sentinels": lambda tokens, experts, k: torch.randint(-1, experts + 1, (tokens, k)),
    "nobody": lambda tokens, experts, k: torch.full((tokens, k), experts),
}


def moe_inputs(
    leading: tuple[int, ...] | int,
    K: int,
    N: int,
    E: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    *,
    gated: bool = True,
    bias: bool = True,
    layout: str = "separate",
    transposed: bool = False,
    routing: str = "random",
    weights_dtype: torch.dtype | None = None,
    draw: Callable[..., Tensor] = torch.randn,
) -> dict[str, Tensor | None]:
    """The tensors of one call by name: weights / √fan_in, unless ``draw`` gives integers."""
    leading = (leading,) if isinstance(leading, int) else leading
    tokens = torch.Size(leading).numel()

    def tensor(*shape: int, fan_in: int = 1) -> Tensor:
        values = draw(*shape, dtype=torch.float64)
        return (values / max(fan_in, 1) ** 0.5 if draw is torch.randn else values).to(DEVICE, dtype)

    def weight(out: int, inner: int) -> Tensor:
        return tensor(E, inner, out, fan_in=inner) if transposed else tensor(E, out, inner, fan_in=inner)

    merged = gated and layout != "separate"
    rows = 2 * N if merged else N
    return {
        "x": tensor(*leading, K),
        "top_k_index": ROUTINGS[routing](tokens, E, k).reshape(*leading, k).to(DEVICE).contiguous(),
        "top_k_weights": tensor(*leading, k).to(weights_dtype or dtype),
        "w_up": weight(rows, K),
        "w_down": weight(K, N),
        "w_gate": weight(N, K) if gated and not merged else None,
        "b_up": tensor(E, rows) if bias else None,
        "b_down": tensor(E, K) if bias else None,
        "b_gate": tensor(E, N) if bias and gated and not merged else None,
    }


def how(gated: bool = True, layout: str = "separate", transposed: bool = False, **options: Any) -> dict[str, Any]:
    """The options of a call for inputs in this layout."""
    return {"gate_and_up": layout if gated else "separate", "transposed": transposed} | options


def results(
    call: Callable[..., Tensor], tensors: Tensors, dy: Tensor, frozen: tuple[str, ...] = (), **options: Any
) -> dict[str, Tensor | None]:
    """y, and for its gradient dy that of every floating-point tensor that is not frozen, as ``dx`` ..."""
    inputs = {
        name: t if t is None or not t.is_floating_point() else t.detach().requires_grad_(name not in frozen)
        for name, t in tensors.items()
    }
    y = call(**inputs, **options)
    if y.requires_grad:
        y.backward(dy)
    return {"y": y.detach()} | {f"d{name}": t.grad for name, t in inputs.items() if t is not None and t.requires_grad}


def wide(tensors: Tensors) -> dict[str, Tensor | None]:
    """The same in float64, but for the routing."""
    return {
        name: tensor if tensor is None or not tensor.is_floating_point() else tensor.double()
        for name, tensor in tensors.items()
    }


def like_x(tensors: Tensors, draw: Callable[..., Tensor] = torch.randn) -> Tensor:
    """A random upstream gradient."""
    x = tensors["x"]
    assert x is not None
    return draw(*x.shape, dtype=torch.float64).to(x.device, x.dtype)


def off_the_limit(
    tensors: Tensors, *, limit: float, gate_and_up: str = "separate", transposed: bool = False, **_: Any
) -> dict[str, Tensor | None]:
    """The same with other tokens in place of those that have a pre-activation within rounding of the limit.

    The slope jumps there, so that the gradients of two right results are far apart. ``x`` is normal, as it was.
    """
    double = wide(tensors)
    ways = [(double["w_up"], double["b_up"]), (double["w_gate"], double["b_gate"])]
    x = tensors["x"]
    assert x is not None
    tokens = x.flatten(0, -2).clone()
    near = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    while bool(near.any()):
        distances = []
        for weight, bias in ways:
            if weight is not None:
                # [E, M, N]: for all experts, whoever is chosen.
                z = tokens.double() @ (weight if transposed else weight.mT)
                z = z if bias is None else z + bias.unsqueeze(1)
                distances.append((z.abs() - limit).abs().amin((0, 2)))
        near = torch.stack(distances).amin(0) < torch.finfo(x.dtype).eps
        tokens[near] = torch.randn(int(near.sum()), x.shape[-1], dtype=torch.float64).to(tokens)
    return dict(tensors) | {"x": tokens.view(x.shape)}


def assert_moe_close(
    *draws: Tensors, path: str = "epilogue", frozen: tuple[str, ...] = (), own: Mapping[str, Any] | None = None,
    again: int = 0, **options: Any,
) -> None:  # fmt: skip
    """y and all gradients on ``path`` pass the closeness rule, all draws together; ``own`` options are ours.

    The last ``again`` draws judge again what fails in the others.
    """
    found = []
    for tensors in draws:
        if options.get("limit") is not None:
            tensors = off_the_limit(tensors, **options)
        dy = like_x(tensors)
        with on_path(path):
            ours = results(functional.moe_ffn, tensors, dy, frozen, **options, **(own or {}))
        theirs = results(reference.moe_ffn, tensors, dy, frozen, **options)
        truth = results(reference.moe_ffn, wide(tensors), dy.double(), frozen, **options)
        found.append((ours, theirs, truth))
    index, w_down = draws[0]["top_k_index"], draws[0]["w_down"]
    assert index is not None
    assert w_down is not None
    tokens, units, first = index.shape[:-1].numel(), min(w_down.shape[1:]), len(found) - again
    of_experts = [name for name in found[0][0] if name.startswith(("dw_", "db_"))]
    parts = [(tokens * units, _parts(found, [name for name in found[0][0] if name not in of_experts]))]
    # Each through some hidden units: the rows of one expert, which may be a single one, are the samples of its errors.
    chosen = torch.stack([tensors["top_k_index"].flatten() for tensors in draws[:first]])  # type: ignore[union-attr]
    for expert in range(w_down.shape[0]):
        samples = int((chosen == expert).sum()) * units // first
        parts.append((max(samples, 1), _parts(found, of_experts, expert)))
    for independent, results_of in parts:
        assert_draws_close(results_of[:first], independent=independent, again=results_of[first:])


def _parts(
    found: Sequence[tuple[Tensors, Tensors, Tensors]], names: Sequence[str], expert: int | None = None
) -> list[tuple[Tensors, Tensors, Tensors]]:
    """Of every draw the results of these names, or one expert's part of them."""

    def part(whole: Tensors) -> Tensors:
        chosen = {name: whole[name] for name in names}
        return chosen if expert is None else {n: None if t is None else t[expert] for n, t in chosen.items()}

    return [(part(ours), part(theirs), part(truth)) for ours, theirs, truth in found]
