"""Losses of causal models without logits on a GPU: the same loss and gradients, compiled and not, and less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.replacing.loss.lazy_logits import LazyLogits
from fusedlayers.replacing.loss.logits import NoLogits
from tests.models.device_table import changed
from tests.models.loss_heads import FAMILIES, IGNORED, Inputs, build, in_kernels, losses, replaced, results, truth
from tests.support import seeds
from tests.support.operands import DEVICE, ON_GPU, assert_draws_close

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'fusedlayers[models]'")
pytestmark = pytest.mark.xdist_group("logits")
# Logits are by far the largest tensors.
WORDS, WIDTH, TOKENS = (32768, 256, 8192) if ON_GPU else (384, 32, 40)
# Few words make another one likely: the roundings of some logits decide its row of the gradient. Each draw is another
# text, and rounds other parameters.
DRAWS, AGAIN = 8, 8
MIB = 2**20


def large(name: str) -> nn.Module:
    """A model with a large vocabulary, in bfloat16."""
    sizes = {"vocab_size": WORDS, "n_embd" if name == "GPT-2" else "hidden_size": WIDTH}
    sizes |= {"head_dim": WIDTH // 2} if "head_dim" in FAMILIES[name][2] else {}
    return build(name, **sizes).to(DEVICE, torch.bfloat16 if ON_GPU else torch.float32).train()


def text(seed: int = 0) -> Inputs:
    """Of the last words alone: a row of the embedding's gradient is that of many tokens, whose errors do not vary."""
    generator = seeds.generator(seed)
    words = torch.randint(WORDS - 256, WORDS, (TOKENS // 8, 8), generator=generator).to(DEVICE)
    labels = words.clone()
    labels[0, :4] = IGNORED
    return {"input_ids": words, "labels": labels}


@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("name", ["Llama, tied", "GPT-2", "Phi", "Gemma 2", "Granite", "Cohere"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_large_vocabularies(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = large(name)
    texts = [text(seed) for seed in range(DRAWS + AGAIN)]
    # Where transformers does not know it, it warns, which Dynamo does not trace.
    model.loss_type = "ForCausalLM"
    options = {"num_items_in_batch": torch.tensor(TOKENS - 9, device=DEVICE)}
    exact = []
    for number, inputs in enumerate(texts):
        with changed(model, number):
            exact.append(truth(copy.deepcopy(model), inputs, **options))

    def way(fullgraph: bool) -> Any:
        torch._dynamo.reset()
        backend = "inductor" if ON_GPU else "aot_eager"
        return torch.compile(model, fullgraph=fullgraph, backend=backend) if compiled else model

    def found(run: Any) -> list[dict[str, Tensor]]:
        draws = []
        for number, inputs in enumerate(texts):
            with changed(model, number):
                named = results(run, inputs, **options)
            draws.append({name.replace("_orig_mod.", ""): tensor for name, tensor in named.items()})
        return draws

    theirs = found(way(fullgraph=False))
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        run = way(fullgraph=True)
        ours = found(run)
        outputs = run(**texts[0], **options)
    # A compiled call is counted where it is traced, too.
    assert losses(paths) >= 2
    assert type(outputs.logits) is (NoLogits if compiled else LazyLogits)
    draws = list(zip(ours, theirs, exact, strict=True))
    assert_draws_close(draws[:DRAWS], computed_in=model.dtype, again=draws[DRAWS:])


def test_the_logits_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = large("Llama"), text()
    logits = TOKENS * WORDS * 4 / MIB
    peaks = []
    for kind in ("torch", "ours"):
        if kind == "ours":
            replaced(model)
        with in_kernels(monkeypatch):
            for _ in range(2):
                model.zero_grad()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                model(**inputs).loss.backward()
        peaks.append((torch.cuda.max_memory_allocated() - before) / MIB)
    theirs, ours = peaks
    # In float32 they and their gradient are there at once in torch; of ours the largest are chunks of 16 bits.
    assert theirs > 2 * logits
    assert ours < logits / 2, f"{ours:.0f} MiB, and {theirs:.0f} MiB of torch"


def test_a_training_step_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole replaced model, blocks and loss, under autocast."""
    plain = large("Llama").float()
    ours, texts = copy.deepcopy(plain), [text(seed) for seed in range(DRAWS + AGAIN)]
    fl.replace(ours)
    exact: list[Any] = []
    found: tuple[list[Any], ...] = ([], [])
    for number, inputs in enumerate(texts):
        with changed(plain, number):
            exact.append(truth(copy.deepcopy(plain), inputs))
        for model, draws in zip((ours, plain), found, strict=True):
            mixed = torch.autocast(torch.device(DEVICE).type, torch.bfloat16, enabled=ON_GPU)
            with changed(model, number), in_kernels(monkeypatch), mixed:
                draws.append(results(model, inputs))
    computed_in = torch.bfloat16 if ON_GPU else torch.float32
    judged = list(zip(*found, exact, strict=True))
    assert_draws_close(judged[:DRAWS], computed_in=computed_in, again=judged[DRAWS:])
