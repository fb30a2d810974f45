"""Small causal models of nearly every family of transformers: whose loss needs no logits, and that it is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.replacing.loss.lazy_logits import LazyLogits
from tests.models.every_family import quiet, small_options
from tests.models.family_data import NO_TRUTH, SPECIAL
from tests.models.loss_heads import in_kernels, losses, replaced
from tests.models.small import InFloat64

modeling_auto = pytest.importorskip(
    "transformers.models.auto.modeling_auto", reason="transformers is not installed: pip install 'fusedlayers[models]'"
)
pytestmark = pytest.mark.interpreter

# Their forwards compute the loss by themselves, or call a head that is more than a linear layer.
LEFT = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small",
    "camembert", "cpmant", "data2vec-text", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus",
    "plbart", "prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr",
    "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
}  # fmt: skip
# A small configuration takes more than this file knows, or an inner model.
NOT_BUILT = {
    "blt", "cohere_compass_text", "dbrx", "dots3_note", "emu3", "gemma3n", "gemma4_assistant",
    "gemma4_unified_assistant", "git", "inkling2_text", "inkling_text", "llama4", "longcat_flash", "musicgen",
    "musicgen_melody", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "reformer",
}  # fmt: skip
NAMES = sorted(set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_BUILT)
# Every so many families are in the short run.
STEP = 40
# Of the words below: all have one that follows but the last ones, and one is ignored.
TARGETS = 11


def build(name: str) -> nn.Module:
    import transformers

    kind = transformers.CONFIG_MAPPING[name]
    model: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    with quiet():
        config = kind(**small_options(kind, SPECIAL.get(name, {}).get("options", {})))
        config._attn_implementation = config._experts_implementation = "eager"
        torch.manual_seed(0)
        made: nn.Module = getattr(transformers, model if isinstance(model, str) else model[0])(config)
    return made.float().eval()


def run(model: nn.Module) -> tuple[Any, dict[str, Tensor | None]]:
    """The outputs, and the loss with all gradients."""
    torch.manual_seed(1)
    words = torch.randint(4, 40, (2, 7))
    labels = words.clone()
    labels[0, 3] = -100
    model.zero_grad()
    with quiet():
        outputs = model(input_ids=words, labels=labels)
    outputs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return outputs, {"loss": outputs.loss.detach()} | gradients


@pytest.mark.filterwarnings("ignore:nothing was replaced:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * bool(place % STEP)) for place, name in enumerate(NAMES)]
)
def test_a_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    if name in LEFT:
        report = fl.replace(model)
        assert "FusedLossHead" not in [entry.became for entry in report.replaced]
        return
    # Some models choose their attention at the first call.
    run(model)
    before, expected = run(model)
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        after, found = run(model)
    assert losses(paths) == 1
    assert type(after.logits) is LazyLogits
    assert torch.equal(torch.clone(after.logits), before.logits)
    if name in NO_TRUTH:
        largest = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
        # What cancels to zero, as the gradient of a key's bias does, is rounding alone.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * largest)
        return
    with InFloat64():
        exact = build(name).double()
        run(exact)
        _, truth = run(exact)
    assert_all_close(found, expected, truth, independent=TARGETS)
