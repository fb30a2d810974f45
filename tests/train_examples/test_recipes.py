"""The recipes: each trains for a few steps on real text through fused layers, and writes what plain torch can read."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

import fusedlayers as fl
from fusedlayers.functional.dispatch import decisions
from tests.support.processes import Processes

transformers = pytest.importorskip("transformers", reason="the recipes train a model of transformers")

STEPS = 12
LAYERS = 2
# Recipe -> what it needs besides, and the file that it writes.
RECIPES = {
    "hugging_face_trainer": ("accelerate", "model.safetensors"),
    "lora": ("peft", "adapter_model.safetensors"),
    "lightning_trainer": ("lightning", "last.ckpt"),
    "accelerate_loop": ("accelerate", "model.safetensors"),
    "plain_script": ("torch", "last.pt"),
    "trl_sft": ("trl", "model.safetensors"),
    "trl_dpo": ("trl", "model.safetensors"),
}
# What is replaced: of a Llama the norms and the loss, too; a model written by hand has norms of torch's.
ENTRIES = {"plain_script": LAYERS}
# How often a step calls each block: TRL checkpoints activations, and DPO has a reference model.
CALLS = {"trl_sft": 2, "trl_dpo": 3}

pytestmark = [
    # What the tools say of machines without a GPU, of few workers, and of one another's releases.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_enable|_disable)?` is deprecated:FutureWarning"),
]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_through_fused_layers(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed, written = RECIPES[name]
    pytest.importorskip(needed, reason=f"the recipe is for {needed}")
    main: Callable[[int, str], list[float]] = import_module(f"train_examples.recipes.{name}").main
    with decisions() as paths:
        losses = main(STEPS, str(tmp_path))
    operation = "lora_ffn" if name == "lora" else "ffn"
    assert paths[f"{operation} torch"] == STEPS * LAYERS * CALLS.get(name, 1), "every feed-forward block of every step"
    assert f"{ENTRIES.get(name, 3 * LAYERS + 2)} replaced" in capsys.readouterr().out
    assert all(math.isfinite(loss) for loss in losses)
    # Of random bytes it would be log 256 = 5.5 nats, from which the model starts.
    assert losses[-1] < (5.5 if len(losses) == 1 else losses[0])
    assert (tmp_path / written).is_file()


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("strategy", ["ModelParallelStrategy", pytest.param("ddp", marks=pytest.mark.full)])
def test_strategies_of_lightning_keep_blocks_fused(strategy: str, processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="the recipe is for lightning")
    from tests.support.lightning_checks import check_strategy

    processes.run(check_strategy, strategy, str(tmp_path))


def test_a_checkpoint_of_a_replaced_model_is_an_ordinary_one(tmp_path: Path) -> None:
    from train_examples.recipes.text_model import small_llama

    model = small_llama()
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fl.replace(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.model.layers[0].mlp) is not type(model.model.layers[0].mlp)
    assert loaded.state_dict().keys() == plain.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, plain[name]), name


def test_a_replaced_llama_is_verified() -> None:
    from train_examples.recipes.text_model import TextWindows, small_llama

    model = small_llama()
    fl.replace(model)
    batch = torch.utils.data.default_collate(list(map(TextWindows().__getitem__, range(4))))
    found = fl.verify(model, **batch)
    assert found.ok, found
    names = {verdict.name for verdict in found.verdicts}
    assert {"d model.layers.1.mlp.gate_proj.weight", "d model.embed_tokens.weight"} <= names
    assert len(names) == 2 + len(list(model.named_parameters()))


def test_recipes_are_short() -> None:
    folder = Path(import_module("train_examples.recipes").__file__ or "").parent
    for name in RECIPES:
        assert len((folder / f"{name}.py").read_text().splitlines()) < 60, name
