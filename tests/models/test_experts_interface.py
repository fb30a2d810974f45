"""``experts_implementation="fusedlayers"``: the name that transformers knows, whichever library is imported first."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from fusedlayers.replacing.experts.formula import IMPLEMENTATION
from tests.models.expert_families import LAYERS, build, experts, results, routed, text, truth
from tests.support.ffn_blocks import assert_same

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[models]'")


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_by_name(name: str) -> None:
    model: Any = build(name)
    inputs = text()
    exact, expected = truth(copy.deepcopy(model), inputs), results(model, inputs)
    kinds = [type(module) for module in experts(model)]
    model.set_experts_implementation(IMPLEMENTATION)
    with decisions() as paths:
        found = results(model, inputs)
    assert paths == {"moe_ffn torch": LAYERS}
    assert_all_close(found, expected, exact)
    assert [type(module) for module in experts(model)] == kinds
    model.set_experts_implementation("eager")
    assert_same(results(model, inputs), expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("observed", [False, True])
def test_the_first_call_may_be_made_under_a_checkpoint(observed: bool) -> None:
    """What is tried to know the experts is no part of what the checkpoint keeps, or computes again."""
    expected = results(build("Mixtral"), text())
    model: Any = build("Mixtral", experts_implementation=IMPLEMENTATION)
    options: dict[str, Any] = {"use_reentrant": False}
    if observed:
        save: Any = CheckpointPolicy.PREFER_RECOMPUTE
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: save)
    model.gradient_checkpointing_enable(options)
    with decisions() as paths:
        found = results(model.train(), text())
    assert set(paths) == {"moe_ffn torch"}
    assert paths["moe_ffn torch"] == 2 * LAYERS
    torch.testing.assert_close(found["loss"], expected["loss"])


def test_the_first_call_may_be_made_inside_a_transform() -> None:
    model: Any = build("Mixtral", experts_implementation=IMPLEMENTATION)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        called: Any = torch.func.functional_call(model, parameters, (), text())
        return called.loss

    with decisions() as paths:
        found = torch.func.grad(loss)(parameters)
        loss(parameters).backward()
    assert paths == {"moe_ffn torch": 2 * LAYERS}
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad)


def test_the_first_call_may_be_made_with_adapters() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[models]'")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapters = peft.LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
    model = peft.get_peft_model(build("Mixtral"), adapters)
    expected = model(**text()).logits
    model.base_model.model.set_experts_implementation(IMPLEMENTATION)
    with decisions() as paths:
        found = model(**text()).logits
    assert paths == {"moe_ffn torch": LAYERS}
    torch.testing.assert_close(found, expected)


def test_by_name_it_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    model = build("Mixtral", experts_implementation=IMPLEMENTATION, num_hidden_layers=1)
    expected = results(model, text())
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**text()).logits, expected["logits"])


def test_a_model_that_has_it_by_name_is_fused_already() -> None:
    report = fl.replace(build("Mixtral", experts_implementation=IMPLEMENTATION))
    assert [entry.reason for entry in report.skipped] == ["already fused"] * LAYERS


def test_experts_that_compute_no_ffn_run_as_transformers_would(caplog: pytest.LogCaptureFixture) -> None:
    module = experts(build("Mixtral", experts_implementation="grouped_mm"))[0]
    module.act_fn = torch.nn.Softplus()
    expected = module(*routed())
    module.config._experts_implementation = IMPLEMENTATION
    with caplog.at_level("INFO", "fusedlayers"), decisions() as paths:
        assert torch.equal(module(*routed()), expected)
    assert not paths
    assert "runs as with experts_implementation='grouped_mm': its forward gives options to softplus" in caplog.text


def test_what_changes_later_runs_as_transformers_would() -> None:
    module = experts(build("gpt-oss", experts_implementation=IMPLEMENTATION))[0]
    module(*routed())
    module.limit = 0.25
    found = module(*routed())
    module.config._experts_implementation = "grouped_mm"
    assert torch.equal(found, module(*routed()))


_IMPORTS = {
    "this library first": "import fusedlayers, transformers.integrations.moe as moe",
    "transformers first": "import transformers.integrations.moe as moe, fusedlayers",
}


# All tests here import this library first, because tests/conftest.py does.
@pytest.mark.parametrize(
    "order", [pytest.param(order, marks=[pytest.mark.full] * order.startswith("this")) for order in _IMPORTS]
)
def test_the_order_of_imports(order: str) -> None:
    said = f"{_IMPORTS[order]}\nprint('fusedlayers' in moe.ALL_EXPERTS_FUNCTIONS)"
    found = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True, timeout=100)
    assert found.stdout.split() == ["True"]
