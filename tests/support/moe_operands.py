"""Inputs for the tests of experts, their results and gradients by name, and how they are held against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import compare_draws
from fusedlayers.functional.dispatch import decisions
from tests.support.operands import DEVICE, EPILOGUE, Tensors, on_path

PATHS = [EPILOGUE, "torch"]
# How many draws are judged together. A token's gradient is one sum through torch's operations and
# one for each expert in the reference, so that few errors decide it.
DRAWS = {"epilogue": 2, "torch": 6}
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


def in_8(tensors: Any, dy: Tensor, frozen: tuple[str, ...] = (), **options: Any) -> dict[str, Tensor | None]:
    """y and the gradients of a call that runs in 8 bits."""
    with decisions() as taken:
        found = results(functional.moe_ffn, tensors, dy, frozen, **({"precision": "fp8"} | options))
    assert taken == {"moe_ffn float8": 1}
    return found


def assert_same(found: Any, expected: Any) -> None:
    """That what was found has the same bits."""
    assert [name for name, value in found.items() if value is not None and not torch.equal(value, expected[name])] == []


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


def assert_moe_close(
    draw: Callable[[], Tensors], *, path: str = "epilogue", frozen: tuple[str, ...] = (),
    own: Mapping[str, Any] | None = None, draws: int | None = None, **options: Any,
) -> None:  # fmt: skip
    """y and all gradients on ``path`` pass the closeness rule, some draws together; ``own`` options are ours.

    As many draws judge again what fails in the first ones.
    """
    drawn: list[Tensors] = []

    def compared() -> tuple[Tensors, Tensors, Tensors]:
        drawn.append(tensors := draw())
        dy = like_x(tensors)
        with on_path(path):
            ours = results(functional.moe_ffn, tensors, dy, frozen, **options, **(own or {}))
        theirs = results(reference.moe_ffn, tensors, dy, frozen, **options)
        return ours, theirs, results(reference.moe_ffn, wide(tensors), dy.double(), frozen, **options)

    first = [compared() for _ in range(draws or DRAWS[path])]
    parts = list(_judged_together(first, drawn))
    if _red(parts, first, ()):
        red = _red(parts, first, [compared() for _ in first])
        assert not red, "\n".join(red)


# Names of results, the expert whose part of them is judged or None for the whole, and the samples of their errors.
_Part = tuple[list[str], int | None, int]


def _judged_together(found: Sequence[tuple[Tensors, Tensors, Tensors]], drawn: Sequence[Tensors]) -> Iterator[_Part]:
    """What has a row for each token as one, and what an expert has by itself: it may have few rows, or a single one."""
    index, w_down = drawn[0]["top_k_index"], drawn[0]["w_down"]
    assert index is not None
    assert w_down is not None
    units = min(w_down.shape[1:])
    of_experts = [name for name in found[0][0] if name.startswith(("dw_", "db_"))]
    yield [name for name in found[0][0] if name not in of_experts], None, index.shape[:-1].numel() * units
    chosen = torch.stack([tensors["top_k_index"].flatten() for tensors in drawn])  # type: ignore[union-attr]
    for expert in range(w_down.shape[0]):
        # Each row through some hidden units.
        yield of_experts, expert, max(int((chosen == expert).sum()) * units // len(drawn), 1)


def _red(
    parts: Sequence[_Part],
    found: Sequence[tuple[Tensors, Tensors, Tensors]],
    again: Sequence[tuple[Tensors, Tensors, Tensors]],
) -> list[str]:
    """The messages of what is not close, by experts."""
    red = []
    for names, expert, independent in parts:
        draws = [_parts(each, names, expert) for each in (found, again)]
        verdicts = compare_draws(draws[0], again=draws[1], independent=independent).values()
        where = "" if expert is None else f"expert {expert}: "
        red += [where + verdict.message for verdict in verdicts if not verdict.ok]
    return red


def _parts(
    found: Sequence[tuple[Tensors, Tensors, Tensors]], names: Sequence[str], expert: int | None
) -> list[tuple[Tensors, Tensors, Tensors]]:
    """Of every draw the results of these names, or one expert's part of them."""

    def part(whole: Tensors) -> Tensors:
        chosen = {name: whole[name] for name in names}
        return chosen if expert is None else {n: None if t is None else t[expert] for n, t in chosen.items()}

    return [(part(ours), part(theirs), part(truth)) for ours, theirs, truth in found]
