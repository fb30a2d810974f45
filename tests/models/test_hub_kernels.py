"""What docs/questions.md says of transformers' ``KernelConfig``, with Hugging Face's package ``kernels``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A layer as the package takes it: a forward, and nothing of its own.
LAYERS = """
from torch import nn
import fusedlayers as fl

class GatedMLP(nn.Module):
    has_backward = True

    def forward(self, x):
        weights = self.up_proj.weight, self.down_proj.weight
        return fl.functional.ffn(x, *weights, w_gate=self.gate_proj.weight, activation=self.config.hidden_act)
"""

FACTS = """
import sys
from pathlib import Path

import kernels
import torch
from peft import LoraConfig, get_peft_model
from transformers import KernelConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import fusedlayers as fl
from fusedlayers.functional.dispatch import decisions

SIZES = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(32)[None]
LOCAL = {"LlamaMLP": sys.argv[1] + ":GatedMLP"}

def llama(adapters=False):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES))
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))
    return model

def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits

def refusal(model):
    try:
        model.set_use_kernels(True, KernelConfig(LOCAL, use_local_kernel=True))
    except ValueError as error:
        return str(error)

# transformers has no name for a feed-forward block, and takes no layer on a CPU.
assert "Layer LlamaMLP is not registered in the model" in refusal(llama())
kernels.replace_kernel_forward_from_hub(LlamaMLP, "LlamaMLP")
assert "Only devices in" in refusal(llama())

def kernelized(model):
    repository = kernels.LocalLayerRepository(repo_path=Path(sys.argv[1]), layer_name="GatedMLP")
    with kernels.use_kernel_mapping({"LlamaMLP": {"cpu": repository}}):
        return kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")

plain = logits(llama())
with decisions() as paths:
    torch.testing.assert_close(logits(kernelized(llama())), plain)
assert paths["ffn torch"] == 2

# A forward alone reads past adapters and hooks; replace does not.
adapted = logits(llama(adapters=True))
assert not torch.allclose(adapted, plain)
torch.testing.assert_close(logits(kernelized(llama(adapters=True))), plain)
replaced = llama(adapters=True)
fl.replace(replaced)
with decisions() as paths:
    torch.testing.assert_close(logits(replaced), adapted)
assert paths["lora_ffn torch"] == 2

def hook_calls(model):
    calls = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *given: calls.append(given))
    logits(model)
    return len(calls)

replaced = llama()
fl.replace(replaced)
assert (hook_calls(llama()), hook_calls(kernelized(llama())), hook_calls(replaced)) == (1, 0, 1)

# A block that has such a layer is left as it is.
report = fl.replace(kernelized(llama()), norm=False, loss=False, dry_run=True)
assert not report.replaced
assert "has a forward of its own, set on the instance" in str(report)
"""


def missing() -> list[str]:
    """What is not installed; in a clone without the package ``kernels``, the folder of that name would be found."""
    installed = {distribution.name for distribution in metadata.distributions()}
    return [name for name in ("kernels", "transformers", "peft") if name not in installed]


@pytest.mark.skipif(bool(missing()), reason="Hugging Face's kernels, transformers and peft are not all installed")
def test_what_a_forward_alone_loses(tmp_path: Path) -> None:
    variant = tmp_path / "layers" / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    (variant / "layers.py").write_text(LAYERS)
    (variant / "__init__.py").write_text("from . import layers\n")
    about = {"id": "fusedlayers_layers_1", "name": "fusedlayers-layers", "version": 1, "license": "Apache-2.0"}
    (variant / "metadata.json").write_text(json.dumps(about | {"python-depends": [], "backend": {"type": "cpu"}}))
    # In the clone, whose folder of the same name hands over to the package.
    command = [sys.executable, "-c", FACTS, str(tmp_path / "layers")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
