"""FFNs with children that compute something on the way: GLUs, and activations within modules of the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl

WIDTH, UNITS = 8, 32


class GEGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return a * F.gelu(b)


class Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, UNITS), nn.Linear(WIDTH, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class Block(nn.Module):
    def __init__(self, act: nn.Module, units: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, units), act, nn.Linear(UNITS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def row(act: nn.Module, units: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, units), act, nn.Dropout(0.0), nn.Linear(UNITS, WIDTH))


def middle(block: nn.Module) -> Any:
    return block.act if hasattr(block, "act") else block[1]  # type: ignore[index]


def hooked(act: Any) -> None:
    act.register_forward_hook(lambda module, args, result: result * 2)


def hooked_inside(act: Any) -> None:
    hooked(list(act.modules())[-1])


def with_a_child(act: Any) -> None:
    act.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    act.other = nn.Linear(2, 2)


def with_another_child(act: Any) -> None:
    if hasattr(act, "inner"):
        act.inner = nn.ReLU()


def with_another_option(act: Any) -> None:
    for each in act.modules():
        if isinstance(each, nn.GELU):
            each.approximate = "tanh"


CHANGES = [hooked, hooked_inside, with_a_child, with_another_child, with_another_option]
MIDDLES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "GEGLU": (GEGLU, 2 * UNITS), "GLU": (nn.GLU, 2 * UNITS), "one": (Activation, UNITS), "nested": (Nested, UNITS),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(("act", "units"), MIDDLES.values(), ids=MIDDLES)
@pytest.mark.parametrize("make", [row, Block])
def test_the_ffn_is_fused_and_notices_changes(
    make: Callable[[nn.Module, int], nn.Module], act: Callable[[], nn.Module], units: int, change: Callable[[Any], None]
) -> None:
    original, x = make(act(), units), torch.randn(2, 3, WIDTH)
    block = copy.deepcopy(original)
    assert fl.replace(block).replaced
    torch.testing.assert_close(block(x), original(x))
    for each in (original, block):
        change(middle(each))
    torch.testing.assert_close(block(x), original(x))


PATCHED: list[tuple[Callable[[], nn.Module], type[nn.Module]]] = [
    (lambda: row(GEGLU(), 2 * UNITS), GEGLU), (lambda: row(nn.GLU(), 2 * UNITS), nn.GLU),
    (lambda: Block(Activation(), UNITS), Activation), (lambda: Block(Nested(), UNITS), Activation),
    (lambda: nn.Sequential(Gate(), nn.Linear(UNITS, WIDTH)), Gate),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind"), PATCHED, ids=lambda each: each.__name__)
def test_a_forward_that_is_patched_later_runs(
    make: Callable[[], nn.Module], kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, x = make(), torch.randn(2, 3, WIDTH)
    block = copy.deepcopy(original)
    assert fl.replace(block).replaced
    block(x)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x) * 2)
    torch.testing.assert_close(block(x), original(x))


def test_a_run_that_a_hook_keeps_from_being_fused_stays_a_run() -> None:
    block = nn.Sequential(nn.Linear(WIDTH, UNITS), nn.GELU(), nn.Linear(UNITS, WIDTH))
    hooked(block[0])
    with pytest.warns(UserWarning, match="nothing was replaced"):
        assert "a forward hook" in str(fl.replace(block))
