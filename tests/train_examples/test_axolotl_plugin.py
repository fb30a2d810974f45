"""The plugin for axolotl, registered and called as axolotl does when it loads a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusedlayers.functional.dispatch import decisions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what axolotl imports
    base = pytest.importorskip("axolotl.integrations.base", reason="the recipe is for axolotl")
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    from train_examples.recipes import axolotl_plugin as recipe
    from train_examples.recipes.text_model import TextWindows, small_llama


@pytest.fixture
def plugins() -> Iterator[Any]:
    """axolotl's plugins: ours alone, by the name that a configuration has."""
    manager = base.PluginManager.get_instance()
    manager.register(f"{recipe.__name__}.FusedLayersPlugin")
    yield manager
    manager.plugins.clear()


def test_the_configuration_has_its_arguments(plugins: Any) -> None:
    _, configuration = merge_input_args()
    assert configuration.model_fields["fusedlayers"].default is None


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("loss", [None, False], ids=["default", "no loss"])
def test_a_loaded_model_is_replaced(
    adapters: bool, loss: bool | None, plugins: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_llama()
    if adapters:
        peft = pytest.importorskip("peft")
        chosen = peft.LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, chosen)
    batch = torch.utils.data.default_collate([TextWindows()[index] for index in range(2)])
    expected = model(**batch).loss
    plugins.post_model_load(DictDefault({} if loss is None else {"fusedlayers": {"loss": loss}}), model)
    assert f"{8 if loss is None else 7} replaced" in capsys.readouterr().out
    with decisions() as paths:
        found = model(**batch).loss
    assert paths["lora_ffn torch" if adapters else "ffn torch"] == 2
    torch.testing.assert_close(found, expected)
