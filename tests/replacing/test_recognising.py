"""`replace` reads what a block computes in the source of its methods."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.replacing.ffn import choosing
from tests.support.ffn_blocks import assert_same, count_fused_calls, results
from tests.support.recognised_blocks import BLOCKS, K, LayerOfMany, N, NanoGPT, Phi3
from tests.support.written import written

each_block = pytest.mark.parametrize("name", BLOCKS)
# Compiling takes long: every third shows it, and `make test-full` compiles all.
some_blocks = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (place % 3 > 0)) for place, name in enumerate(BLOCKS)]
)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return count_fused_calls(monkeypatch)


def built(name: str) -> tuple[nn.Module, Tensor]:
    model = nn.ModuleDict({"block": BLOCKS[name][0]()})
    return model, torch.randn(2, 3, 16 if name == "sizes" else K)


def compared(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor | None], ...]:
    """Results and gradients of the block before and after `replace`, and those of float64."""
    block = model["block"]
    truth = results(copy.deepcopy(block).double(), x.double())
    theirs = results(block, x)
    fl.replace(model)
    return results(block, x), theirs, truth


@each_block
@pytest.mark.parametrize("training", [True, False])
def test_a_block_of_the_users_is_fused(name: str, training: bool, fused_calls: list[float]) -> None:
    model, x = built(name)
    model.train(training)
    before = results(model["block"], x)
    assert_all_close(*compared(model, x))
    assert len(fused_calls) == 1
    [entry] = fl.replace(copy.deepcopy(BLOCKS[name][0]()), dry_run=True).replaced
    assert entry.reason == BLOCKS[name][1]
    fl.restore(model)
    assert_same(results(model["block"], x), before)


@each_block
@pytest.mark.interpreter
def test_the_kernels_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    model, x = built(name)
    assert_all_close(*compared(model.eval(), x))


@some_blocks
def test_it_compiles_in_one_graph(name: str) -> None:
    model, x = built(name)
    block = model.eval()["block"]
    expected = results(block, x)
    truth = results(copy.deepcopy(block).double(), x.double())
    fl.replace(model)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    # Dynamo lists torch's functions once in a process, as they are then; `results` puts another dropout there.
    compiled(x)
    assert_all_close(results(block, x, call=lambda x: compiled(x)), expected, truth)


def test_a_layer_that_cannot_be_called_by_anybody_is_fused(fused_calls: list[float]) -> None:
    """Its FFN is tried by itself: nobody knows what the mask and the positions may be."""
    layer, x = LayerOfMany(), torch.randn(2, 3, K)
    positions, mask = (torch.randn(K), torch.randn(K)), {"causal": torch.zeros(3, 3)}

    def call(x: Tensor) -> Tensor:
        return layer(x, positions, mask=mask)

    expected = results(layer, x, call=call)
    [entry] = fl.replace(layer).replaced
    assert entry.reason.startswith("fc1, fc2: relu")
    assert_same(results(layer, x, call=call), expected)
    assert len(fused_calls) == 1


def test_one_product_stays_one_where_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block with one linear for gate and up projection runs its own forward there, bit for bit."""
    block, x = Phi3(), torch.randn(2, 3, K)
    expected = results(block, x)
    calls: list[torch.Size] = []
    fl.replace(block)
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: calls.append(w.shape) or linear(x, w, b))
    for _ in range(4):
        assert_same(results(block, x), expected)
    assert set(calls) == {(2 * N, K), (K, N)}


# What an FFN is not.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(K, N), nn.Linear(N, K), nn.SiLU()


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:
        return dy


# Forwards, and what is said of them.
LEFT: dict[str, tuple[str, str]] = {
    "clamped": (
        "return self.fc2(self.act(self.fc1(x)).clamp(max=7.0))",
        "its forward cuts values off by clamp in `return self.fc2(self.act(self.fc1(x)).clamp(max=7.0))`",
    ),
    "scaled": (
        "return self.fc2(self.act(self.fc1(x) * 1.001))",
        "its fc2 takes 1.001 * fc1(x) * sigmoid(1.001 * fc1(x)), which is no activation of fc1(x)",
    ),
    # As in Gemma 3n: the smaller part of the hidden is left out.
    "sparse": (
        "z = self.fc1(x)\nreturn self.fc2(self.act((z - z.mean(-1, keepdim=True)).relu()))",
        "its fc2 takes relu(fc1(x) + -1 * mean(fc1(x))) * sigmoid(",
    ),
    "another slope in the backward pass": (
        "return self.fc2(StraightThrough.apply(self.fc1(x)))",
        "its forward reads the apply of something in `return self.fc2(StraightThrough.apply(self.fc1(x)))`",
    ),
    "refusing": (
        "raise RuntimeError('not today')", "its forward has a raise statement in `raise RuntimeError('not today')`"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_ffn_is_left_with_the_reason(name: str) -> None:
    body, reason = LEFT[name]
    kind = written(Block, body)
    model = nn.ModuleList([kind(), NanoGPT()])
    report = fl.replace(model)
    assert [entry.path for entry in report.replaced] == ["1"]
    [entry] = report.skipped
    assert (entry.path, entry.module) == ("0", kind.__name__)
    assert reason in entry.reason
    assert entry.reason.startswith("looks like an FFN (fc1, fc2: 6 -> 10 -> 6), but ")
    assert type(model[0]) is kind


class Remembering(Block):
    """A forward with every side effect that a trial must keep to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.last, self.seen = torch.zeros(3), []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last.add_(1)
        self.seen.append(random.random())
        self.train()
        return self.fc2(self.act(self.fc1(x))) + torch.rand(())


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_trial_changes_nothing_of_the_users(dry_run: bool) -> None:
    model = nn.ModuleList([Remembering(), NanoGPT(), Phi3(dropout=0.2)]).eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    hooked: list[object] = []
    model[0].register_forward_hook(lambda *_: hooked.append(1))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate()
    fl.replace(model, dry_run=dry_run)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert_same(dict(model.state_dict()), state)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert torch.equal(model[0].last, torch.zeros(3))
    assert not model[0].seen
    assert not hooked
    assert torch.is_grad_enabled()


def test_blocks_on_meta_in_half_precision_and_of_any_size_are_tried() -> None:
    """The trial is a small one, whatever the sizes: 2.6 GB of weights here."""

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up, self.down = nn.Linear(8192, 2 * 28672, bias=False), nn.Linear(28672, 8192, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.gate_up(x).chunk(2, -1)
            return self.down(F.silu(gate) * up)

    with torch.device("meta"):
        model = nn.Sequential(Llama().bfloat16())
        [entry] = fl.replace(model).replaced
    assert entry.reason.startswith("gate_up, down: gated silu, 8192 -> 28672 -> 8192")


def test_in_inference_mode_and_under_autocast_the_same_is_found() -> None:
    for surroundings in (torch.inference_mode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        model = nn.ModuleList([NanoGPT(), Phi3()])
        with surroundings:
            assert len(fl.replace(model).replaced) == 2


def test_layers_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[nn.Module] = []
    recognise = choosing.recognise
    monkeypatch.setattr(choosing, "recognise", lambda block, taken: tried.append(block) or recognise(block, taken))
    model = nn.ModuleList([Phi3(rows) for rows in ("first", "first", "odd", "first", "odd")])
    assert len(fl.replace(model).replaced) == 5
    # The option that the forward reads tells them apart.
    assert [block.rows for block in tried if isinstance(block, Phi3)] == ["odd", "first"]
    assert {type(block).fused_rule.gate_rows for block in model} == {"first", "odd"}


class Empty(nn.Module):
    """Whose linears are added later."""


def test_the_gate_of_a_block_without_activation_is_the_same_in_every_process() -> None:
    """The first by its name, whatever order the hashes of names have in this process."""
    for number in range(8):
        first, second = f"first_{number}", f"second_{number}"
        block = written(Empty, f"return self.down(self.{second}(x) * self.{first}(x))")()
        for name, sizes in ((second, (K, N)), (first, (K, N)), ("down", (N, K))):
            block.add_module(name, nn.Linear(*sizes))
        [entry] = fl.replace(nn.ModuleList([block])).replaced
        assert f"{second}, {first}, down: gated identity" in entry.reason
