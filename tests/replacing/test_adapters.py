"""FFNs whose linears carry peft's adapters: fused with them, called where an adapter is more than that."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from tests.support import seeds
from tests.support.ffn_blocks import assert_same, saved
from tests.support.operands import DEVICE, Tensors, assert_close_or_again, needs_kernels

peft = pytest.importorskip("peft", exc_type=ImportError)

ALL = ["up", "gate", "down"]


class Gated(nn.Module):
    """A gated FFN; its name is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(24, 40, bias=False), nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Merged(nn.Module):
    """A gated FFN whose gate and up projection are one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 80), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class Residual(nn.Module):
    """An FFN inside of a method, with dropout behind the activation."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 24)
        self.act, self.dropout = nn.GELU(), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(self.act(self.up(self.norm(x)))))


def adapted(block: nn.Module, targets: list[str] | None = None, **options: Any) -> nn.Module:
    """A model of one block with adapters of random numbers: with zeros in B they would compute nothing."""
    names = ALL if targets is None else targets
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False} | options, target_modules=names)
    torch.manual_seed(3)
    return peft.inject_adapter_in_model(config, nn.Sequential(block)).to(DEVICE)


def made(block: Callable[[], nn.Module] = Gated, targets: list[str] | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    return adapted(block(), targets, **options)


def outcome(model: nn.Module, dtype: torch.dtype = torch.float32, seed: int = 4) -> dict[str, Tensor | None]:
    """Result and gradients of the input and of all parameters, None for those that have none."""
    generator = seeds.generator(seed)
    x = torch.randn(2, 9, 24, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y))
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients}


def assert_fused(model: nn.Module, paths: set[str]) -> None:
    """The replaced model computes what the model did, by these operations; and again after `restore`."""
    exact = copy.deepcopy(model).double()

    def compared(draw: int) -> tuple[Tensors, Tensors, Tensors]:
        truth, theirs = outcome(exact, torch.float64, 4 + draw), outcome(model, seed=4 + draw)
        fl.replace(model)
        with decisions() as taken:
            ours = outcome(model, seed=4 + draw)
        assert set(taken) == paths
        assert {name for name in ours if ours[name] is None} == {name for name in theirs if theirs[name] is None}
        fl.restore(model)
        ours, theirs, truth, again = (
            {name: each for name, each in found.items() if each is not None}
            for found in (ours, theirs, truth, outcome(model, seed=4 + draw))
        )
        assert_same(again, theirs)
        return ours, theirs, truth

    assert_close_or_again(compared)


@needs_kernels
@pytest.mark.parametrize("targets", [ALL, ["up"], ["gate", "down"], ["down"]], ids=str)
def test_in_the_kernels(targets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    model = made(targets=targets)
    assert_fused(model, {"lora_ffn epilogue"})
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }


@pytest.mark.parametrize("block", [Gated, Residual])
@pytest.mark.parametrize("options", [{"lora_bias": True}, {"use_rslora": True}, {"bias": "all"}], ids=str)
def test_kinds_of_adapters(block: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    # A bias of the adapter wants one of the linear, to be merged into.
    targets = ["up", "down"] if block is Residual or "lora_bias" in options else ALL
    assert_fused(made(block, targets, **options), {"lora_ffn torch"})


@needs_kernels
def test_one_linear_for_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(Merged, ["up", "down"])
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    assert_fused(model, {"lora_ffn epilogue"})
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    # Through torch it is one product as the block writes it.
    assert_fused(model, set())


def test_the_report_and_what_explains_a_block() -> None:
    model = made()
    report = fl.replace(model)
    [entry] = report.replaced
    assert entry.reason == "up, gate, down: gated silu, 24 -> 40 -> 24, with adapters"
    assert entry.became == "FusedGated"
    assert not report.skipped
    text = fl.explain(model[0], torch.randn(2, 24, device=DEVICE), details=True)  # type: ignore[index]
    assert "lora_ffn: h W_downᵀ + b_down + s (h Aᵀ) Bᵀ" in text
    assert "ranks up 4, gate 4, down 4" in text


def test_the_state_of_adapters_counts_at_every_call() -> None:
    model = made()
    other = copy.deepcopy(model)
    fl.replace(model)
    layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.Linear)]
    originals = [module for module in other.modules() if isinstance(module, peft.tuners.lora.Linear)]

    def both(change: Callable[[Any], object]) -> None:
        for layer in (*layers, *originals):
            change(layer)

    def taken() -> set[str]:
        with decisions() as paths:
            ours = outcome(model)["y"]
        torch.testing.assert_close(ours, outcome(other)["y"])
        return set(paths)

    assert taken() == {"lora_ffn torch"}
    both(lambda layer: layer.enable_adapters(False))
    assert taken() == {"ffn torch"}
    both(lambda layer: layer.enable_adapters(True))
    assert taken() == {"lora_ffn torch"}
    both(lambda layer: layer.merge())
    assert taken() == {"ffn torch"}
    # Called, as it unmerges itself then.
    both(lambda layer: layer.enable_adapters(False))
    assert taken() == set()
    assert taken() == {"ffn torch"}
    both(lambda layer: layer.enable_adapters(True))
    both(lambda layer: layer.scale_layer(0.5))
    assert taken() == {"lora_ffn torch"}


SECOND = peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False)


def _two_adapters(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(SECOND, model, adapter_name="second")
    model[0].up.set_adapter(["default", "second"])


def _hooked(model: Any) -> None:
    model[0].up.register_forward_hook(lambda *_: None)


def _hooked_inside(model: Any) -> None:
    model[0].up.lora_A["default"].register_forward_hook(lambda *_: None)


def _double(model: Any) -> None:
    model[0].up.lora_A.double()
    model[0].up.lora_B.double()


def _subclass(model: Any) -> None:
    """As the wrappers of quantised linears are."""
    model[0].up.__class__ = type("Linear4bit", (peft.tuners.lora.Linear,), {})


CALLED: dict[str, tuple[dict[str, Any], Callable[[Any], None] | None, str]] = {
    "DoRA": ({"use_dora": True}, None, "an adapter of another kind: DoraLinearVariant"),
    "dropout": ({"lora_dropout": 1.0}, None, r"an adapter with a dropout of p=1.0, outside \[0, 1\)"),
    "two": ({}, _two_adapters, "several active adapters"),
    "hook": ({}, _hooked, "a forward hook"),
    "hook inside": ({}, _hooked_inside, "an adapter whose A has a forward hook"),
    "dtype": ({}, _double, "an adapter of torch.float64, but a weight of torch.float32"),
    "quantised": ({}, _subclass, r"is a .*Linear4bit, not exactly nn.Linear"),
}


@pytest.mark.parametrize("name", CALLED)
def test_what_is_called(name: str) -> None:
    options, change, reason = CALLED[name]
    model = made(targets=["up"], **options).train()
    if change is not None:
        change(model)
    expected = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=f"the up linear .*{reason}"):
        fl.replace(model)
    # A block that was replaced before calls it, too.
    late = made(targets=["up"]).train()
    fl.replace(late)
    if change is None:
        return
    change(late)
    with decisions() as paths:
        torch.manual_seed(0)
        ours = outcome(late)["y"]
    torch.manual_seed(0)
    torch.testing.assert_close(ours, outcome(expected)["y"])
    assert not paths


def test_the_dropout_of_an_adapter_is_off_in_evaluation() -> None:
    assert_fused(made(lora_dropout=0.25).eval(), {"lora_ffn torch"})


def test_the_dropout_of_the_hidden_is_called() -> None:
    model = made(lambda: Residual(0.5), ["up"]).eval()
    fl.replace(model)
    with decisions() as paths:
        outcome(model)
        assert set(paths) == {"lora_ffn torch"}
        paths.clear()
        torch.manual_seed(0)
        ours = outcome(model.train())["y"]
        assert not paths
    fl.restore(model)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, outcome(model)["y"])


def test_adapters_in_float32_are_fused_under_autocast() -> None:
    model = made()
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.base_layer.to(torch.bfloat16)
    theirs = copy.deepcopy(model)
    x = torch.randn(2, 24, dtype=torch.bfloat16, device=DEVICE)
    # Before a trainer enters autocast.
    [entry] = fl.replace(model).replaced
    assert entry.reason.endswith(", with adapters, under autocast alone")
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        plain = theirs(x)
        with decisions() as paths:
            ours = model(x)
    exact = copy.deepcopy(theirs).double()(x.double())
    assert_all_close({"y": ours}, {"y": plain}, {"y": exact})
    assert set(paths) == {"lora_ffn torch"}
    with decisions() as paths:
        torch.testing.assert_close(model(x), theirs(x))
    assert not paths


def test_a_fused_ffn_takes_adapters_and_a_residual() -> None:
    model = made(lambda: fl.FusedFFN(24, 40, activation="silu", gated=True), ["up_proj", "down_proj"])
    x = torch.randn(3, 24, device=DEVICE)
    with decisions() as paths:
        y = model[0](x, x)  # type: ignore[index]
    assert set(paths) == {"lora_ffn torch"}
    block: Any = model[0]  # type: ignore[index]
    expected = block.down_proj(nn.functional.silu(block.gate_proj(x)) * block.up_proj(x)) + x
    torch.testing.assert_close(y, expected)


def test_copies_and_stored_models() -> None:
    model = made()
    expected = outcome(model)["y"]
    fl.replace(model)
    for other in (copy.deepcopy(model), saved(model)):
        with decisions() as paths:
            torch.testing.assert_close(outcome(other)["y"], expected)
        assert set(paths) == {"lora_ffn torch"}


@pytest.mark.parametrize("block", [Gated, Merged, Residual])
def test_compiled_in_one_graph(block: Callable[[], nn.Module]) -> None:
    """With the adapters as they are at each call: another state compiles anew."""
    targets = ALL if block is Gated else ["up", "down"]
    model = made(block, targets, lora_bias=block is Residual)
    other = copy.deepcopy(model)
    fl.replace(model)
    graphs: list[list[str]] = []

    def noting(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=noting, fullgraph=True)

    def fused() -> bool:
        """Whether the latest graph has the operation; results and gradients are those of the other model."""
        found, expected = outcome(compiled), outcome(other)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name if name in found else f"_orig_mod.{name}"], tensor)
        return "fusedlayers.lora_ffn.default" in graphs[-1]

    def change(state: Callable[[Any], object]) -> None:
        for module in (*model.modules(), *other.modules()):
            if isinstance(module, peft.tuners.lora.Linear):
                state(module)

    assert fused()
    assert fused()
    assert len(graphs) == 1
    change(lambda layer: layer.scale_layer(0.5))
    assert fused()
    change(lambda layer: layer.enable_adapters(False))
    assert not fused()
    compiled_before = len(graphs)
    change(lambda layer: layer.enable_adapters(True))
    fused()
    assert len(graphs) == compiled_before, "it has the graph of this state"
    change(lambda layer: layer.merge())
    assert not fused()


def test_compiled_with_a_dropout_of_the_adapter() -> None:
    model = made(targets=["up"], lora_dropout=0.5).eval()
    fl.replace(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = outcome(compiled)["y"]
    torch.testing.assert_close(outcome(model)["y"], expected)
    assert not torch.equal(outcome(compiled.train())["y"], expected)  # type: ignore[arg-type]


def test_training_with_checkpoints_and_twice() -> None:
    model = made()
    expected = outcome(model)
    fl.replace(model)
    generator = seeds.generator(4)
    x = torch.randn(2, 9, 24, generator=generator, dtype=torch.float64).to(DEVICE, torch.float32).requires_grad_()
    model.zero_grad()
    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y))
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, expected[name])
