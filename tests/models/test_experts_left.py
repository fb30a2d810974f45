"""Experts that stay as they are, and why; and those that run their own forward although their class was replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.functional.dispatch import decisions
from fusedlayers.replacing.experts import FusedExperts
from tests.models.expert_families import HIDDEN, LAYERS, WIDTH, build, experts, replaced, routed, text

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[models]'")


def _norm(module: Any) -> None:
    module.has_post_expert_norm = True


def _tensor(module: Any) -> None:
    module.scale = nn.Parameter(torch.ones(HIDDEN))


def _activation(module: Any) -> None:
    module.act_fn = nn.PReLU()


def _other_activation(module: Any) -> None:
    module.act_fn = nn.Softplus()


def _forward(module: Any) -> None:
    module.forward = module.forward


def _implementation(module: Any) -> None:
    module.config._experts_implementation = "sonicmoe"


def _quantised(module: Any) -> None:
    for name in ("gate_up_proj", "down_proj"):
        module._parameters[name] = nn.Parameter(getattr(module, name).to(torch.float8_e4m3fn), False)


def _in_the_class(name: str, method: Callable[..., Any]) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        module.__class__ = type(type(module).__name__, (type(module),), {name: method})

    return change


def _gate(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate).clamp(max=0.5) * up


def _with_gate(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    result = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):
        rows, places = torch.where(top_k_index == expert)
        hidden = self._apply_gate(F.linear(hidden_states[rows], self.gate_up_proj[expert]))
        one = F.linear(hidden, self.down_proj[expert]) * top_k_weights[rows, places, None]
        result = result.index_add(0, rows, one)
    return result


def _in_training(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    y = _with_gate(self, hidden_states, top_k_index, top_k_weights)
    return y * 0.5 if self.training else y


def _in_float32(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    result = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):
        rows, places = torch.where(top_k_index == expert)
        hidden = self._apply_gate(F.linear(hidden_states[rows].float(), self.gate_up_proj[expert].float()))
        one = F.linear(hidden, self.down_proj[expert].float()) * top_k_weights[rows, places, None]
        result = result.index_add(0, rows, one.to(result.dtype))
    return result


def _gate_of_its_own(module: Any) -> None:
    _in_the_class("_apply_gate", _gate)(module)
    _in_the_class("forward", _with_gate)(module)


# What is done to Mixtral's experts, and what the report says of them.
LEFT: dict[str, tuple[Callable[[Any], None], str]] = {
    "norm": (_norm, "a norm follows every expert"),
    "tensor": (_tensor, "it has a tensor 'scale' that is no part of the experts' FFN"),
    "parameters in the activation": (
        _activation,
        "its forward reads torch.nn.functional.prelu in `return F.prelu(input, self.weight)`",
    ),
    "unknown activation": (_other_activation, "its forward gives options to softplus in `return F.softplus("),
    "forward of its own": (_forward, "has a forward of its own, set on the instance"),
    "implementation": (_implementation, "its configuration asks for experts_implementation='sonicmoe'"),
    "quantised": (_quantised, "its gate_up_proj is of torch.float8_e4m3fn on cpu"),
    "gate of its own": (_gate_of_its_own, "of no known activation and gate"),
    "other in training": (
        _in_the_class("forward", _in_training),
        "its forward branches on what is not known in `return y * 0.5 if self.training else y`",
    ),
    "in float32": (
        _in_the_class("forward", _in_float32),
        "its forward multiplies in float32, whatever its dtype in `hidden = ",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_left(case: str) -> None:
    module = experts(build("Mixtral"))[0]
    change, reason = LEFT[case]
    change(module)
    kind = type(module)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = fl.replace(module)
    [entry] = report.skipped
    assert entry.reason.startswith("experts of a mixture: ")
    assert reason in entry.reason
    assert entry.is_ffn_left
    assert type(module) is kind
    with pytest.raises(ValueError, match="experts of a mixture"):
        fl.replace(module, strict=True)


def test_a_forward_that_is_written_anew_is_proven_too() -> None:
    module = experts(build("Mixtral"))[0]
    _in_the_class("forward", _with_gate)(module)
    expected = module(*routed())
    assert replaced(module)
    assert isinstance(module, FusedExperts)
    torch.testing.assert_close(module(*routed()), expected)


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_releases_without_a_flag_for_the_layout(name: str) -> None:
    module = experts(build(name))[0]
    expected = module(*routed())
    del module.is_concatenated, module.has_post_expert_norm
    assert replaced(module)
    torch.testing.assert_close(module(*routed()), expected)


@pytest.mark.parametrize("name", ["MuseSparkTextModel", "OpenAIPrivacyFilterModel"])
def test_published_experts_that_are_left(name: str) -> None:
    from tests.models.every_family import FAMILIES

    families = {"MuseSparkTextModel": "muse_spark_text", "OpenAIPrivacyFilterModel": "openai_privacy_filter"}
    reasons = {
        "MuseSparkTextModel": "a norm follows every expert",
        "OpenAIPrivacyFilterModel": "sums its experts in another dtype",
    }
    if families[name] not in FAMILIES:
        pytest.skip("this release of transformers has no such family")
    with pytest.warns(UserWarning, match=reasons[name]):
        fl.replace(FAMILIES[families[name]].build(), loss=False, norm=False)


def _new_gate(module: Any) -> None:
    module._apply_gate = _gate.__get__(module)


def _new_option(module: Any) -> None:
    module.limit = 0.25


def _new_activation(module: Any) -> None:
    module.act_fn = nn.Sigmoid()


def _hook(module: Any) -> None:
    module.act_fn.register_forward_hook(lambda module, inputs, output: output * 2)


def _two_dimensions(module: Any) -> None:
    module._parameters["down_proj"] = nn.Parameter(module.down_proj.detach().flatten(1), False)


# What happens to experts after they were replaced, of which family, and what is said of it.
LATER: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "option": ("gpt-oss", _new_option, "its limit was 7.0 when it was replaced"),
    "activation": ("Mixtral", _new_activation, "its act_fn is another one than when it was replaced"),
    "hook": ("Mixtral", _hook, "its act_fn has a forward hook"),
    "gate": ("Mixtral", _new_gate, "has an _apply_gate of its own, set on the instance"),
}


@pytest.mark.parametrize("case", LATER)
def test_what_changes_later_runs_the_forward_of_the_class(case: str, caplog: pytest.LogCaptureFixture) -> None:
    name, change, reason = LATER[case]
    module = experts(build(name, experts_implementation="grouped_mm"))[0]
    replaced(module)
    change(module)
    assert module.why_called(*routed()) == reason
    with decisions() as paths, caplog.at_level(logging.INFO, "fusedlayers"):
        found = module(*routed())
    assert not paths
    fl.restore(module)
    torch.testing.assert_close(found, module(*routed()), rtol=0, atol=0)


def test_a_class_that_was_patched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    module = experts(build("Mixtral"))[0]
    kind = type(module)
    replaced(module)
    monkeypatch.setattr(kind, "forward", lambda self, *args: args[0] * 3)
    x, index, weights = routed()
    assert torch.equal(module(x, index, weights), x * 3)
    assert module.why_called() == "the forward of MixtralExperts was changed after replace"


def test_hooks_of_the_module_are_called() -> None:
    module = experts(build("Mixtral"))[0]
    replaced(module)
    seen: list[tuple[int, ...]] = []
    module.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    module(*routed())
    assert seen == [(7, WIDTH)]


def test_tokens_of_another_dtype_run_the_forward_of_the_class() -> None:
    module = experts(build("Mixtral"))[0].bfloat16()
    replaced(module)
    x, index, weights = routed()
    assert module.why_called(x, index, weights) == (
        "its tokens are of torch.float32, and its weights of torch.bfloat16"
    )
    with pytest.raises(RuntimeError, match="same dtype"):
        module(x, index, weights)


def test_adapters_of_peft_stay_fused() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[models]'")
    model = build("Mixtral")
    replaced(model)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=targets))
    adapters = {name: each for name, each in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for parameter in adapters.values():
            nn.init.normal_(parameter)

    def run() -> list[Tensor]:
        model.zero_grad()
        outputs = model(**text())
        outputs.loss.backward()
        return [outputs.logits.detach(), *(each.grad.clone() for each in adapters.values() if each.grad is not None)]

    with decisions() as paths:
        found = run()
    assert paths == {"moe_ffn torch": LAYERS}
    assert len(found) == 1 + 4 * LAYERS
    fl.restore(model)
    torch.testing.assert_close(found, run())


def test_parametrized_weights_are_read_as_the_forward_reads_them() -> None:
    """As adapters of peft are, while the module runs."""
    module = experts(build("Mixtral"))[0]
    replaced(module)

    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    before = module(*routed())
    nn.utils.parametrize.register_parametrization(module, "down_proj", Double())
    with decisions() as paths:
        after = module(*routed())
    assert paths == {"moe_ffn torch": 1}
    torch.testing.assert_close(after, before * 2)
