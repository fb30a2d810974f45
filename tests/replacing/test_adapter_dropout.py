"""FFNs whose adapters drop what they take while they train: fused, with masks that the backward pass draws again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from tests.functional.test_dropping import assert_checkpoints_agree, generator_state
from tests.support.operands import DEVICE, needs_kernels, seed_after

pytest.importorskip("peft", exc_type=ImportError)

from tests.replacing.test_adapters import ALL, Gated, Merged, Residual, made, outcome

BACKENDS = ["torch", pytest.param("triton", marks=needs_kernels)]
P = 0.25


def training(block: Callable[[], nn.Module] = Gated, targets: list[str] | None = None) -> Any:
    return made(block, targets, lora_dropout=P).train()


def set_dropout(layer: Any, p: float) -> None:
    layer.lora_dropout["default"].p = p


class Written(nn.Module):
    """The block as the reference computes it by the masks of a seed, with the parameters of the block."""

    def __init__(self, model: Any, seed: Tensor) -> None:
        super().__init__()
        self.model, self.seed = model, seed

    def forward(self, x: Tensor) -> Tensor:
        block, given = self.model[0], {}
        for name in ALL:
            linear = getattr(block, name)
            given |= {f"w_{name}": linear.base_layer.weight, f"b_{name}": linear.base_layer.bias}
            given |= {f"{name}_a": linear.lora_A["default"].weight, f"{name}_b": linear.lora_B["default"].weight}
            given |= {f"{name}_scale": linear.scaling["default"]}
        return reference.lora_ffn(x, **given, activation="silu", adapter_dropout_p=P, seed=self.seed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_trains_by_the_masks_of_a_seed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    model, seed = training(), seed_after(7)
    theirs = outcome(Written(model, seed))
    truth = outcome(Written(copy.deepcopy(model).double(), seed), torch.float64)
    [entry] = fl.replace(model).replaced
    assert entry.reason == f"up, gate, down: gated silu, 24 -> 40 -> 24, with adapters and a dropout of {P} in them"
    assert "dropout in the adapters" in fl.explain(model[0], torch.randn(2, 24, device=DEVICE), details=True)
    torch.manual_seed(7)
    with decisions() as paths:
        ours = outcome(model)
    assert set(paths) == {f"lora_ffn {'epilogue' if backend == 'triton' else 'torch'}"}
    theirs, truth = ({name.removeprefix("model."): t for name, t in each.items()} for each in (theirs, truth))
    wanted = {name for name, tensor in ours.items() if tensor is not None}
    assert wanted == {"y", "dx", *(name for name, _ in model.named_parameters() if "lora_" in name)}
    assert_all_close(*({name: found[name] for name in wanted} for found in (ours, theirs, truth)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [Gated, Residual])
def test_checkpoints(block: Callable[[], nn.Module], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    model = training(block, ALL if block is Gated else ["up", "down"])
    for parameter in model.parameters():
        parameter.requires_grad_()
    fl.replace(model)
    with decisions() as paths:
        assert_checkpoints_agree(model, torch.randn(9, 24, device=DEVICE))
    assert len(paths) == 1


def test_what_drops_counts_at_every_call() -> None:
    """train(), eval() and another probability, of a block that keeps what it found."""
    model = training()
    expected = outcome(copy.deepcopy(model).eval())["y"]
    layers = [getattr(model[0], name) for name in ALL]
    fl.replace(model)

    def again(seed: int = 3) -> Tensor:
        torch.manual_seed(seed)
        with decisions() as paths:
            y = outcome(model)["y"]
        assert set(paths) == {"lora_ffn torch"}
        assert y is not None
        return y

    state = generator_state()
    torch.testing.assert_close(outcome(model.eval())["y"], expected)
    assert torch.equal(generator_state(), state), "nothing is drawn"
    first = again()
    torch.testing.assert_close(first, expected)
    dropped = (model.train(), again())[1]
    assert torch.equal(dropped, again())
    assert not torch.equal(dropped, again(4))
    for layer in layers:
        set_dropout(layer, 0.75)
    assert not torch.equal(dropped, again())
    for layer in layers:
        set_dropout(layer, 0.0)
    torch.testing.assert_close(again(), expected)


def test_several_probabilities_are_called() -> None:
    model = training()
    set_dropout(model[0].up, 0.5)
    other = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"its adapters have dropouts of several probabilities: 0.25, 0.5"):
        fl.replace(model)
    late = training()
    fl.replace(late)
    outcome(late)
    set_dropout(late[0].up, 0.5)
    torch.manual_seed(0)
    with decisions() as paths:
        ours = outcome(late)["y"]
    assert not paths
    torch.manual_seed(0)
    torch.testing.assert_close(ours, outcome(other)["y"])


class WrittenMerged(nn.Module):
    """A block whose gate and up projection are one linear, by the masks of a seed: x is dropped once."""

    def __init__(self, model: Any, seed: Tensor) -> None:
        super().__init__()
        self.model, self.seed = model, seed

    def forward(self, x: Tensor) -> Tensor:
        block = self.model[0]
        merged, a, b = (block.up.base_layer, block.up.lora_A["default"], block.up.lora_B["default"])
        halves = {
            name: half.split(half.shape[0] // 2)
            for name, half in (("w", merged.weight), ("b", merged.bias), ("a", b.weight))
        }
        (w_gate, w_up), (b_gate, b_up), (gate_b, up_b) = (halves[name] for name in ("w", "b", "a"))
        down = block.down
        return reference.lora_ffn(
            x, w_up, down.base_layer.weight, b_up, down.base_layer.bias, w_gate, b_gate, a.weight, up_b,
            down.lora_A["default"].weight, down.lora_B["default"].weight, a.weight, gate_b, activation="silu",
            up_scale=block.up.scaling["default"], gate_scale=block.up.scaling["default"],
            down_scale=down.scaling["default"], adapter_dropout_p=P, shared_dropout=True, seed=self.seed,
        )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_mask_for_gate_and_up_projection(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one linear holds both, peft drops its input once."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    model, seed = training(Merged, ["up", "down"]), seed_after(7)
    theirs = outcome(WrittenMerged(model, seed))
    truth = outcome(WrittenMerged(copy.deepcopy(model).double(), seed), torch.float64)
    fl.replace(model)
    torch.manual_seed(7)
    with decisions() as paths:
        ours = outcome(model)
    assert set(paths) == {f"lora_ffn {'epilogue' if backend == 'triton' else 'torch'}"}
    theirs, truth = ({name.removeprefix("model."): t for name, t in each.items()} for each in (theirs, truth))
    wanted = [name for name, tensor in ours.items() if tensor is not None]
    assert {name for name in wanted if "lora_" in name} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }
    assert_all_close(*({name: found[name] for name in wanted} for found in (ours, theirs, truth)))


class _OnePathForEach(nn.Module):
    """Kernels where gradients are wanted, as auto mode may decide, and torch without."""

    def __init__(self, model: nn.Module, setenv: Callable[[str, str], None]) -> None:
        super().__init__()
        self.model, self.setenv = model, setenv

    def forward(self, x: Tensor) -> Tensor:
        self.setenv("FUSEDLAYERS_BACKEND", "triton" if torch.is_grad_enabled() else "torch")
        return self.model(x)


@needs_kernels
@pytest.mark.parametrize("targets", [["up", "down"], ["up"], ["down"]], ids=str)
@pytest.mark.parametrize("block", [Gated, Merged])
def test_checkpoints_whose_passes_take_two_paths(
    block: Callable[[], nn.Module], targets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is that of one seed on both, also where torch would run what the block itself writes."""
    model = training(block, targets)
    for parameter in model.parameters():
        parameter.requires_grad_()
    fl.replace(model)
    assert_checkpoints_agree(_OnePathForEach(model, monkeypatch.setenv), torch.randn(9, 24, device=DEVICE))


@needs_kernels
def test_an_adapter_behind_gate_and_up_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    model = training(Merged, ["down"])
    fl.replace(model)
    with decisions() as paths:
        outcome(model)
    assert set(paths) == {"lora_ffn epilogue"}


def test_compiled() -> None:
    model = training(Residual, ["up", "down"])
    layers = model[0].up, model[0].down
    fl.replace(model)
    graphs: list[list[str]] = []

    def noting(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def both() -> None:
        torch.manual_seed(2)
        found = outcome(compiled)
        torch.manual_seed(2)
        for name, tensor in outcome(model).items():
            torch.testing.assert_close(found[name if name in found else f"_orig_mod.{name}"], tensor)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=noting, fullgraph=True)
    both()
    both()
    assert len(graphs) == 1
    for layer in layers:
        set_dropout(layer, 0.5)
    both()
    assert len(graphs) == 2
    assert all("fusedlayers.lora_ffn.default" in graph for graph in graphs)
    # The probabilities are symbols now, and must still be compared.
    set_dropout(layers[0], 0.1)
    both()
    assert "fusedlayers.lora_ffn.default" not in graphs[-1]
