"""Experts of mixtures through `moe_ffn`: the same results and gradients, what the report says, and the way back."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from fusedlayers.replacing.experts import FusedExperts
from tests.models.expert_families import (
    EXPERTS,
    FAMILIES,
    HIDDEN,
    LAYERS,
    WIDTH,
    Results,
    build,
    experts,
    replaced,
    results,
    routed,
    text,
    truth,
)
from tests.support.ffn_blocks import assert_same
from tests.support.operands import assert_close_or_again

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[models]'")

each_family = pytest.mark.parametrize("name", FAMILIES)
# The kernels know no families: a router, a layout and an activation of each kind.
DIFFERENT = ("Mixtral", "DeepSeek-V3", "gpt-oss", "Mixtral, relu")


def calls(paths: dict[str, int]) -> int:
    """How many modules of experts ran through ``moe_ffn``."""
    return sum(count for path, count in paths.items() if path.startswith("moe_ffn "))


@each_family
def test_results_and_gradients(name: str) -> None:
    model, inputs = build(name), text()
    exact = truth(copy.deepcopy(model), inputs)
    expected = results(model, inputs)
    assert len(replaced(model)) == LAYERS
    with decisions() as paths:
        found = results(model, inputs)
    assert calls(paths) == LAYERS
    assert_all_close(found, expected, exact)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "name", [name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def test_the_kernels_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(draw: int) -> tuple[Results, Results, Results]:
        model, inputs = build(name), text(draw)
        exact = truth(copy.deepcopy(model), inputs)
        expected = results(model, inputs)
        for module in experts(model):
            replaced(module)
        with monkeypatch.context() as kernels, decisions() as paths:
            kernels.setenv("FUSEDLAYERS_BACKEND", "triton")
            found = results(model, inputs)
        assert calls(paths) == LAYERS
        assert "moe_ffn torch" not in paths
        return found, expected, exact

    assert_close_or_again(compared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mixed", [False, True], ids=["cast", "autocast"])
@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_16_bits(name: str, mixed: bool, dtype: torch.dtype) -> None:
    if mixed and name == "gpt-oss":
        pytest.skip("its own forward adds float32 biases under autocast, and gates in float32")

    def compared(draw: int) -> tuple[Results, Results, Results]:
        module = experts(build(name))[0]
        module = module if mixed else module.to(dtype)
        x, index, weights = routed(dtype=torch.float32 if mixed else dtype, draw=draw)

        def run(dtype: torch.dtype, module: nn.Module) -> Results:
            given = [each.detach().to(dtype).requires_grad_() for each in (x, weights)]
            y = module(given[0], index, given[1])
            assert y.dtype is dtype
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(torch.bfloat16).to(dtype))
            gradients = {f"d {name}": parameter.grad.clone() for name, parameter in module.named_parameters()}
            module.zero_grad()
            return {"y": y.detach(), "dx": given[0].grad, "dw": given[1].grad} | gradients

        exact = run(torch.float64, copy.deepcopy(module).double())
        with torch.autocast("cpu", dtype, enabled=mixed):
            expected = run(x.dtype, module)
            replaced(module)
            assert isinstance(module, FusedExperts)
            with decisions() as paths:
                found = run(x.dtype, module)
        assert calls(paths) == 1
        return found, expected, exact

    assert_close_or_again(compared, computed_in=dtype)


@each_family
def test_the_way_back(name: str) -> None:
    model, inputs = build(name), text()
    kinds, expected = [type(module) for module in experts(model)], results(model, inputs)
    keys, tensors = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    replaced(model)
    for module, kind in zip(experts(model), kinds, strict=True):
        assert isinstance(module, FusedExperts)
        assert isinstance(module, kind)
    assert (list(model.state_dict()), [id(parameter) for parameter in model.parameters()]) == (keys, tensors)
    fl.restore(model)
    assert [type(module) for module in experts(model)] == kinds
    assert_same(results(model, inputs), expected)


@each_family
def test_the_report(name: str) -> None:
    model = build(name)
    entries = replaced(model)
    kind = type(experts(model)[0]).__name__
    assert {entry.became for entry in entries} == {kind}
    text = entries[0].reason
    _, expected, sizes = text.partition(": ")[2].rpartition(f", {experts(model)[0].num_experts} experts")[0::1]
    assert text.startswith("gate_up_proj, down_proj: ")
    assert FAMILIES[name][2] in text
    assert sizes == f", {WIDTH} -> {HIDDEN} -> {WIDTH}"
    assert expected
    # On a CPU.
    assert (entries[0].plan, entries[0].why_no_kernels is None) == ("torch", False)


def test_they_are_found_once() -> None:
    model = build("Mixtral")
    replaced(model)
    report = fl.replace(model, loss=False, norm=False)
    assert [entry.reason for entry in report.skipped] == ["already fused"] * LAYERS


def test_a_dry_run_changes_nothing() -> None:
    model = build("Mixtral")
    assert len(replaced(model, dry_run=True)) == LAYERS
    assert not any(isinstance(module, FusedExperts) for module in model.modules())


def test_recomputing_reaches_the_experts() -> None:
    model, inputs = build("Mixtral"), text()
    expected = results(model, inputs)
    replaced(model, recompute=True)
    module = experts(model)[0]
    assert module.call_arguments(*routed())["recompute"] is True
    assert_all_close(results(model, inputs), expected, truth(build("Mixtral"), inputs))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "fusedlayers"])
def test_verify_of_a_whole_model(implementation: str) -> None:
    model = build("Qwen3-MoE", experts_implementation=implementation)
    replaced(model)
    found = fl.verify(model, text()["input_ids"])
    assert found.ok
    assert model.config._experts_implementation == implementation


def test_explain_and_verify() -> None:
    module = experts(build("gpt-oss"))[0]
    replaced(module)
    assert "moe_ffn: y = " in fl.explain(module, *routed(), details=True)
    found = fl.verify(module, *routed())
    assert found.ok
    assert found.paths == {"moe_ffn torch": 1}
    assert {verdict.name for verdict in found.verdicts} >= {"y", "d gate_up_proj_bias", "d routing_weights"}


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_copies_and_files_are_fused(name: str, tmp_path: Path) -> None:
    model, inputs = build(name), text()
    replaced(model)
    expected = results(model, inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert [type(module) for module in experts(twin)] == [type(module) for module in experts(model)]
        assert_same(results(twin, inputs), expected)
    # Checkpoints notice nothing.
    plain = build(name)
    plain.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager", experts_implementation="eager")
    fl.restore(model)
    expected = results(model, inputs)
    assert_same(results(plain, inputs), expected)
    assert_same(results(loaded, inputs), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, inputs = build("Qwen3-MoE").train(), text()
    replaced(model)
    expected = results(model, inputs)
    # Named anew in later releases.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    with decisions() as paths:
        found = results(model, inputs)
    assert calls(paths) == 2 * LAYERS
    assert_same(found, expected)


@pytest.mark.parametrize(
    "name", ["gpt-oss", *(pytest.param(name, marks=pytest.mark.full) for name in ("Mixtral", "Qwen3-MoE, gelu"))]
)
def test_it_compiles_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model, inputs = build(name, num_hidden_layers=1), text()
    exact, expected = truth(copy.deepcopy(model), inputs), results(model, inputs)
    replaced(model)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled.zero_grad()
    outputs = compiled(**inputs)
    outputs.loss.backward()
    gradients = {f"d {name}": parameter.grad for name, parameter in model.named_parameters()}
    found = {"logits": outputs.logits.detach(), "loss": outputs.loss.detach()} | gradients
    assert_all_close(found, expected, exact)


def test_what_a_compiled_module_read_compiles_anew() -> None:
    torch._dynamo.reset()
    module = experts(build("gpt-oss", experts_implementation="grouped_mm"))[0]
    replaced(module)
    x, index, weights = routed()
    compiled: Any = torch.compile(module, backend="aot_eager")
    before = compiled(x, index, weights)
    module.limit = 0.05
    after = compiled(x, index, weights)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, module(x, index, weights))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_implementation_of_transformers_is_replaced(implementation: str) -> None:
    model = build("Mixtral", experts_implementation=implementation)
    x, index, weights = routed()
    expected = experts(model)[0](x, index, weights)
    assert len(replaced(model)) == LAYERS
    torch.testing.assert_close(experts(model)[0](x, index, weights), expected)


def test_tokens_for_other_processes_count_for_nothing() -> None:
    """Under transformers' expert parallelism these have an index behind all experts."""
    module = experts(build("Mixtral"))[0]
    x, index, weights = routed()
    index[0], index[1, 0] = EXPERTS, EXPERTS
    expected = module(x, index, weights)
    replaced(module)
    with decisions() as paths:
        found = module(x, index, weights)
    assert calls(paths) == 1
    torch.testing.assert_close(found, expected)
    assert not found[0].any()


def test_no_tokens() -> None:
    module = experts(build("Mixtral"))[0]
    replaced(module)
    x, index, weights = routed(0)
    y = module(x, index, weights)
    assert y.shape == (0, WIDTH)
