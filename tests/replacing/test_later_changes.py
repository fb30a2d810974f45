"""What somebody changes of a replaced block later, or has otherwise in another one: it computes what it says now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import ReLU

from tests.support.ffn_blocks import count_fused_calls, replaced
from tests.support.written import written

WIDTH, UNITS = 8, 32


class Block(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH), act or nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class HookPoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.point, self.down = nn.Linear(WIDTH, UNITS), nn.Identity(), nn.Linear(UNITS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.point(F.gelu(self.up(x))))


class Config:
    flag = False


class Selector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flag = True

    def act(self) -> Callable[[Tensor], Tensor]:
        return F.gelu if self.flag else F.relu


class Optional(Block):
    """With what the forwards below ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.flag, self.rate, self.limit = True, 0.0, None
        self.gamma, self.config, self.selector = nn.Parameter(torch.ones(WIDTH)), Config(), Selector()
        self.blocks = nn.ModuleList([nn.Identity()])


def choose(block: Any) -> Callable[[Tensor], Tensor]:
    return F.gelu if block.flag else F.relu


def with_forward(body: str) -> Callable[[], nn.Module]:
    return written(Optional, body)


def choosing(act: str) -> Callable[[], nn.Module]:
    """A block whose forward chooses its activation so."""
    return with_forward(f"act = {act}\nreturn x + self.down(act(self.up(x)))")


def set_to(path: str, value: object) -> Callable[[nn.Module], None]:
    holder, _, name = path.rpartition(".")
    return lambda block: setattr(block.get_submodule(holder), name, value)


class Swish(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def inner(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain


def in_a_row(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, UNITS), *between, nn.Linear(UNITS, WIDTH))


class Asking(Block):
    """Asks whether it has an attribute, and of which class its activation is."""

    def __init__(self, plain: bool = True) -> None:
        super().__init__()
        self.act: nn.Module = nn.GELU()
        if plain:
            self.plain = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        if not hasattr(self, "plain"):
            h = h * 2
        if isinstance(self.act, ReLU):
            h = h * 3
        return self.down(h)


class AskingNorm(nn.Module):
    def __init__(self, plain: bool = True) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(WIDTH)), 1e-5
        if plain:
            self.plain = True

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * self.weight if hasattr(self, "plain") else x * (1 + self.weight)


class MaybeGated(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate: nn.Module | None = nn.Linear(WIDTH, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.relu(self.up(x)))


class Into(nn.Module):
    """Holds the up linear, and writes out its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.slope = nn.Linear(WIDTH, UNITS), 1.0

    def act(self, z: Tensor) -> Tensor:
        return z * torch.sigmoid(self.slope * z)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x))


class OutOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(UNITS, WIDTH)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.dense(x) + residual


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_of = Into(), OutOf()

    def forward(self, x: Tensor) -> Tensor:
        return self.out_of(self.into(x), x)


class Row(nn.Module):
    """The MLP of DETR's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < 1 else layer(x)
        return x


class RowInside(Row):
    """Has its input added behind the FFN, and names the last of its layers by a negative index."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers[-1](F.gelu(self.layers[0](x)))


class RowInSlices(Row):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Doubled(nn.GELU):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


class DoubledInside(nn.GELU):
    def _call_impl(self, *args: Any) -> Tensor:
        return super()._call_impl(*args) * 2


class OfItsClass(nn.Module):
    """What a block of this kind does is written in its class, until an instance says something else."""

    after = False
    act = staticmethod(F.silu)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.up(x)))
        return torch.relu(y) if self.after else y


class GEGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return a * F.gelu(b)


class Activation(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.inner = inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Glued(Block):
    """A block whose activation takes twice as many columns as it gives."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__(act)
        self.up = nn.Linear(WIDTH, 2 * UNITS)


def glued(act: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * UNITS), act, nn.Dropout(0.0), nn.Linear(UNITS, WIDTH))


def zeroed(part: nn.Module) -> None:
    part.register_forward_hook(lambda module, inputs, output: output * 0)


def zeroed_inside(part: nn.Module) -> None:
    zeroed(list(part.modules())[-1])


def with_a_child(part: nn.Module) -> None:
    part.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    part.other = nn.Linear(2, 2)


def with_another_child(part: Any) -> None:
    part.inner = nn.ReLU()


def with_another_option(part: nn.Module) -> None:
    for each in part.modules():
        if isinstance(each, nn.GELU):
            each.approximate = "tanh"


# Modules between two linears, in a row and in a block, and what may happen to any of them.
BETWEEN: dict[str, Callable[[], nn.Module]] = {
    "GEGLU": lambda: glued(GEGLU()),
    "GEGLU in a block": lambda: Glued(GEGLU()),
    "GLU": lambda: glued(nn.GLU()),
    "GLU in a block": lambda: Glued(nn.GLU()),
    "activation": lambda: in_a_row(Activation()),
    "activation in a block": lambda: Block(Activation()),
    "nested": lambda: in_a_row(Activation(Activation)),
    "nested in a block": lambda: Block(Activation(Activation)),
}
ITS_CHANGES = [zeroed, zeroed_inside, with_a_child, with_another_child, with_another_option]


def of_what_is_between(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda block: change(block.act if isinstance(block, Block) else block[1])


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "option of an activation": (lambda: in_a_row(Swish()), lambda m: setattr(m[1], "beta", 3.0)),
    "helper of an activation": (lambda: in_a_row(Swish()), lambda m: setattr(m[1], "inner", torch.relu)),
    "hook of an identity": (HookPoint, lambda m: zeroed(m.point)),
    "forward of an identity": (HookPoint, lambda m: setattr(m.point, "forward", lambda x: x * 0)),
    "hook of an identity in a row": (lambda: in_a_row(nn.GELU(), nn.Identity()), lambda m: zeroed(m[2])),
    "attribute deleted": (Asking, lambda m: delattr(m, "plain")),
    "class of an activation": (Asking, lambda m: setattr(m, "act", nn.ReLU())),
    "attribute of a norm deleted": (AskingNorm, lambda m: delattr(m, "plain")),
    "no gate": (MaybeGated, lambda m: setattr(m, "gate", None)),
    "helper of a holder": (Layer, lambda m: setattr(m.into, "act", torch.relu)),
    "another layer": (Row, lambda m: m.layers.append(nn.Identity())),
    "another last layer": (RowInside, lambda m: m.layers.append(nn.AdaptiveAvgPool1d(WIDTH))),
    "another layer behind a slice": (RowInSlices, lambda m: m.layers.append(nn.Identity())),
    "another first layer": (RowInside, lambda m: m.layers.insert(0, nn.Upsample(scale_factor=UNITS / WIDTH))),
    "option": (
        with_forward(
            "z = self.up(x)\nreturn self.down(self.act(z if self.limit is None else z.clamp(max=self.limit)))"
        ),
        set_to("limit", 0.01),
    ),
    "option of a configuration": (
        with_forward("y = self.down(self.act(self.up(x)))\nreturn y * 2 if self.config.flag else y"),
        lambda m: setattr(m.config, "flag", True),
    ),
    "rate": (
        with_forward("return self.down(F.dropout(self.act(self.up(x)), self.rate, self.training))"),
        set_to("rate", 1.0),
    ),
    "option of a child": (Layer, set_to("into.slope", 1.5)),
    "option of the class": (OfItsClass, set_to("after", True)),
    "activation of the class": (OfItsClass, set_to("act", torch.relu)),
    "option of an activation's class": (lambda: Block(Swish()), set_to("act.gain", 1.5)),
    "chosen by a function": (choosing("choose(self)"), set_to("flag", False)),
    "chosen by a child": (choosing("self.selector.act()"), set_to("selector.flag", False)),
    "chosen by a parameter": (choosing("F.gelu if self.gamma is not None else F.relu"), set_to("gamma", None)),
    "chosen by a length": (
        choosing("F.gelu if len(self.blocks) > 1 else F.relu"), lambda m: m.blocks.append(nn.Identity())
    ),
    "named like a function": (choosing("F.relu"), set_to("relu", nn.LeakyReLU())),
    **{
        f"{change.__name__}, {name}": (make, of_what_is_between(change))
        for name, make in BETWEEN.items()
        for change in ITS_CHANGES
    },
}  # fmt: skip
COMPILED = [
    "option", "option of a configuration", "rate", "option of a child", "option of an activation",
    "option of the class", "activation of the class", "option of an activation's class", "another last layer",
]  # fmt: skip


def check_change(change: str, called: bool, compiled: bool = False) -> None:
    make, changed = CHANGES[change]
    torch.manual_seed(0)
    original, x = make(), torch.randn(2, 3, WIDTH)
    block = copy.deepcopy(original)
    # A block with a parameter of its own may stay as it is.
    assert type(replaced(block)) is not type(original) or change == "chosen by a parameter"
    run = torch.compile(block, backend="eager") if compiled else block
    if called:
        for _ in range(3):
            torch.testing.assert_close(run(x), original(x))
    changed(original)
    changed(block)
    for _ in range(3):
        torch.testing.assert_close(run(x), original(x))


@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "after it"])
@pytest.mark.parametrize("change", CHANGES)
def test_it_computes_what_the_block_says_now(change: str, called: bool) -> None:
    check_change(change, called)


@pytest.mark.parametrize("change", COMPILED)
def test_compiled_it_computes_what_the_block_says_now(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_fused_calls(monkeypatch)
    torch._dynamo.reset()
    check_change(change, called=True, compiled=True)
    assert calls


def test_an_attribute_of_a_class_that_changes() -> None:
    original, x = in_a_row(Swish()), torch.randn(2, 3, WIDTH)
    block = replaced(copy.deepcopy(original))
    block(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Swish, "gain", 3.0)
        torch.testing.assert_close(block(x), original(x))


@pytest.mark.parametrize("kind", [Asking, AskingNorm])
def test_two_of_a_class_that_differ_in_what_they_have(kind: Callable[[bool], nn.Module]) -> None:
    original, x = nn.Sequential(kind(True), kind(False)), torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(replaced(copy.deepcopy(original))(x), original(x))


@pytest.mark.parametrize("activation", [Doubled, DoubledInside])
def test_an_activation_with_a_call_of_its_own_is_called(activation: Callable[[], nn.Module]) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, UNITS, 0.0, activation=activation(), batch_first=True)
    for original in (in_a_row(activation()), layer):
        x = torch.randn(2, 3, WIDTH)
        torch.testing.assert_close(replaced(copy.deepcopy(original))(x), original(x))
