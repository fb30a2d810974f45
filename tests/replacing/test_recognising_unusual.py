"""Blocks that compute an FFN most of the time: `replace` keeps what they do besides."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.replacing import torch_module_activation
from tests.support.ffn_blocks import count_fused_calls
from tests.support.recognised_blocks import InTwoChildren, K, N, NanoGPT


class Config:
    scale = 1.0

    def __init__(self) -> None:
        self.flag = False


class Block(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(K, N), nn.Linear(N, K), act or nn.SiLU()
        self.limit: float | None = None
        self.config, self.rate = Config(), 0.0

    def forward(self, x: Tensor) -> Any:
        return self.fc2(self.act(self.fc1(x)))


def block_with(forward: Callable[[Any, Tensor], Any]) -> Block:
    return type("Written", (Block,), {"forward": forward})()  # type: ignore[no-any-return]


def replaced(block: nn.Module) -> fl.replacing.Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return fl.replace(block)


def double(y: Tensor, when: bool) -> Tensor:
    return y * 2 if when else y


RESULTS: dict[str, tuple[Callable[[Any, Tensor], Any], Tensor]] = {
    "dtype": (lambda self, x: self.fc2(self.act(self.fc1(x))).float(), torch.randn(2, K).half()),
    "tuple": (lambda self, x: (self.fc2(self.act(self.fc1(x))),), torch.randn(2, 3, K)),
    "nothing": (lambda self, x: (self.fc2(self.act(self.fc1(x))), None), torch.randn(2, 3, K)),
    "dict": (lambda self, x: {"y": self.fc2(self.act(self.fc1(x)))}, torch.randn(2, 3, K)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_forward_with_another_kind_of_result_gives_it(name: str) -> None:
    forward, x = RESULTS[name]
    block = block_with(forward).to(x.dtype)
    twin = copy.deepcopy(block)
    replaced(block)
    for given in (x, x.clone().requires_grad_()):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(block(given), twin(given))


class Swish(nn.Module):
    def __init__(self, slope: float = 1.0) -> None:
        super().__init__()
        self._slope = slope

    def forward(self, z: Tensor) -> Tensor:
        return z * torch.sigmoid(self._slope * z)


def test_blocks_that_differ_in_a_private_option_are_told_apart() -> None:
    model = nn.ModuleList([Block(Swish()), Block(Swish(1.5)), Block(Swish(1.702))])
    assert [entry.path for entry in fl.replace(model).replaced] == ["0", "2"]
    assert [torch_module_activation(block.act) for block in model] == ["silu", None, "quick_gelu"]


def switching(self: Any, x: Tensor) -> Tensor:
    self.eval()
    return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


def test_a_forward_that_switches_its_modes_does_so() -> None:
    block = block_with(switching).train()
    replaced(block)
    block(torch.randn(2, K))
    assert not block.training


@dataclasses.dataclass
class Output:
    y: Tensor
    hidden: Tensor


def shown(self: Any, x: Tensor) -> Output:
    hidden = self.act(self.fc1(x))
    return Output(self.fc2(hidden), hidden)


def test_a_result_into_which_nobody_can_look_leaves_the_block() -> None:
    model = nn.ModuleList([block_with(shown), NanoGPT()])
    [entry] = fl.replace(model).skipped
    assert "its forward calls Output in `return Output(self.fc2(hidden), hidden)`" in entry.reason
    assert isinstance(model[0](torch.randn(2, K)).hidden, Tensor)


def test_a_dropout_that_drops_in_evaluation_is_left() -> None:
    class Sampling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.p = nn.Linear(K, N), nn.Linear(N, K), 0.0

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(F.dropout(F.relu(self.fc1(x)), self.p))  # type: ignore[no-any-return]

    block = Sampling().eval()
    assert (
        "its forward drops with a probability, or in a mode, that is no attribute of its own"
        in replaced(block).skipped[0].reason
    )
    block.p = 1.0
    assert torch.equal(block(torch.randn(K)), block.fc2.bias)


def test_a_block_with_a_dropout_that_it_does_not_call_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Block(), torch.randn(2, K)
    block.dropout = nn.Dropout(0.5)
    expected = block(x)
    calls = count_fused_calls(monkeypatch)
    fl.replace(block)
    torch.testing.assert_close(block(x), expected)
    assert len(calls) == 1


def test_blocks_whose_sizes_are_not_known_yet_are_left() -> None:
    block = Block()
    block.fc1, block.fc2 = nn.LazyLinear(N), nn.LazyLinear(K)
    replaced(nn.ModuleList([block, nn.Sequential(nn.LazyLinear(N), nn.ReLU(), nn.LazyLinear(K))]))
    assert block(torch.randn(2, K)).shape == (2, K)
    assert len(fl.replace(block).replaced) == 1


def in_float32(self: Any, x: Tensor) -> Tensor:
    return self.fc2(self.act(self.fc1(x).float()).to(x.dtype))  # type: ignore[no-any-return]


def test_casts_to_float32_and_back_are_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = block_with(in_float32).bfloat16(), torch.randn(2, K, dtype=torch.bfloat16)
    expected = block(x)
    calls = count_fused_calls(monkeypatch)
    assert len(fl.replace(block).replaced) == 1
    torch.testing.assert_close(block(x), expected)
    assert len(calls) == 1


def test_a_hook_on_all_modules_sees_the_children_that_hold_parts() -> None:
    block, x = InTwoChildren(), torch.randn(2, K)
    seen: list[list[str]] = []

    def see(module: nn.Module, *_: object) -> None:
        seen[-1].append(type(module).__name__)

    for change in (lambda: None, lambda: fl.replace(block)):
        change()
        seen.append([])
        handle = nn.modules.module.register_module_forward_hook(see)
        block(x)
        handle.remove()
    assert [name.removeprefix("Fused") for name in seen[1]] == seen[0]


def without_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


@torch.enable_grad()
def with_gradients(self: Any, x: Tensor) -> Tensor:
    return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [without_autocast, with_gradients])
def test_a_mode_that_a_forward_enters_is_entered(forward: Callable[[Any, Tensor], Tensor]) -> None:
    block, x = block_with(forward), torch.randn(2, K)
    twin = copy.deepcopy(block)
    replaced(block)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y, expected = block(x), twin(x)
    torch.testing.assert_close(y, expected)
    assert y.requires_grad is expected.requires_grad


def test_scripted_modules_are_left() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = torch.jit.script(NanoGPT().eval())
        linear = torch.jit.script(nn.Linear(K, N))
    model = nn.ModuleList([block, nn.Sequential(linear, nn.GELU(), nn.Linear(N, K)), NanoGPT()])
    report = fl.replace(model)
    assert [entry.path for entry in report.replaced] == ["2"]
    assert not any("no class can be derived" in entry.reason for entry in report.skipped)
    assert (report.skipped[0].path, report.skipped[0].module) == ("0", "NanoGPT")
    assert report.skipped[0].reason.endswith("but torch.jit has compiled it")


class CastsToItsWeights(nn.Module):
    """As in T5: the hidden gets the dtype of the linear that takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo, self.act = nn.Linear(6, 10), nn.Linear(10, 6), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.wi(x))
        if hidden.dtype != self.wo.weight.dtype and self.wo.weight.dtype != torch.int8:
            hidden = hidden.to(self.wo.weight.dtype)
        return self.wo(hidden)


def test_a_cast_to_the_dtype_of_the_weights_is_part_of_a_formula() -> None:
    block = CastsToItsWeights()
    fl.replace(block)
    assert type(block).fused_rule.inside is None


class NormOfItsClass(nn.Module):
    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def test_an_option_of_a_norms_class_is_noticed() -> None:
    model, own, x = nn.Sequential(NormOfItsClass()), NormOfItsClass(), torch.randn(3, 8)
    assert fl.replace(model).replaced
    for norm in (model[0], own):
        norm.eps = 1.0
    torch.testing.assert_close(model(x), own(x))


class LongMethod(nn.Module):
    """A chain of layers, each with its input added, and behind it an FFN in the same method."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("layers", [*range(0, 12, 3), 40, 100])
def test_an_ffn_behind_a_long_chain_in_one_method(layers: int) -> None:
    """The chain's formula doubles with every layer if it is written out."""
    model, x = LongMethod(layers), torch.randn(3, 8)
    y = model(x)
    assert len(fl.replace(model).replaced) == 1
    assert torch.equal(model(x), y)


def test_a_long_sequence_of_layers() -> None:
    """No deeper recursion than in a short one."""
    model = nn.Sequential(*(layer for _ in range(300) for layer in (nn.Linear(4, 4), nn.ReLU())))
    assert len(fl.replace(model).replaced) == 150


def test_a_message_does_not_write_out_a_long_chain() -> None:
    class Wrong(LongMethod):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + torch.relu(layer(x))
            return self.down(torch.tanh(self.gate(x)) * self.up(x) * self.up(x))

    for layers, said in ((6, "…"), (30, "up(something)")):
        with pytest.warns(UserWarning, match="nothing was replaced"):
            [skipped] = fl.replace(Wrong(layers), dry_run=True).skipped
        assert said in skipped.reason
        assert len(skipped.reason) < 2000


def chosen(block: Any, x: Tensor) -> Tensor:
    return F.relu(x) if block.kind == "relu" else F.gelu(x)


class Chosen:
    """Chooses an activation; not a module itself."""

    def act(self, x: Tensor) -> Tensor:
        return chosen(self, x)


class OfKind(nn.Module, Chosen):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self.kind = nn.Linear(K, N), nn.Linear(N, K), kind

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class OfProperty(OfKind):
    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        return F.relu if self.kind == "relu" else F.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class NormOfProperty(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(K)), eps

    @property
    def eps(self) -> float:
        return self.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("kind", [OfKind, OfProperty])
def test_blocks_of_one_class_whose_properties_or_functions_choose(kind: Callable[[str], nn.Module]) -> None:
    report = fl.replace(nn.Sequential(kind("relu"), kind("gelu"), kind("relu")))
    assert not report.skipped
    assert [entry.reason.split()[2] for entry in report.replaced] == ["relu,", "gelu,", "relu,"]


def test_norms_of_one_class_whose_properties_differ() -> None:
    model = nn.Sequential(NormOfProperty(1e-5), NormOfProperty(1e-2))
    assert ["1e-05" in entry.reason for entry in fl.replace(model).replaced] == [True, False]
