"""Small models of nearly every family of transformers: what is fused, and that they compute what they computed."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from tests.models.device_table import changed
from tests.models.every_family import FAMILIES, Family, Inputs, Results
from tests.models.family_data import NO_TRUTH
from tests.models.small import blocks
from tests.support.ffn_blocks import assert_same, seeded_dropout
from tests.support.operands import assert_draws_close

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'fusedlayers[models]'")

# Where `replace` differs from the answer key: what it leaves, and a part of the reason that it gives.
LEFT: dict[str, dict[str, str]] = {
    "bridgetower": {"BridgeTowerResidualAttention": ""},
    "groupvit": {"GroupViTMixerMLP": "its forward calls super"},
    "mobilebert": {"MobileBertLayer": "its forward is wrapped: MobileBertLayer.forward has a decorator"},
    "moshi": {"MoshiGatingMLP": "its forward takes apart what is no tuple of so many"},
    "sam3_vision_model": {"Sam3MLP": "which is no activation of fc1(x)"},
    "sam3_vit_model": {"Sam3MLP": "which is no activation of fc1(x)"},
    "xmod": {"XmodLayer": ""},
}
# What it fuses besides: two of several linears in a row, or an FFN that the key counts for none, proven all the same.
FUSED_BESIDES: dict[str, dict[str, int]] = {
    "conditional_detr": {"ConditionalDetrMLPPredictionHead": 2},
    "dab-detr": {"DabDetrMLP": 4},
    "falcon_h1": {"FalconH1MLP": 2},
    "kimi_k25": {"Kimi_K25MultimodalProjection": 1},
    "minicpm_ocr": {"MiniCPMOcrViTWindowAttentionMerger": 1},
    "minicpmv4_6": {"MiniCPMV4_6ViTWindowAttentionMerger": 1},
    "minicpmv4_7": {"MiniCPMV4_7ViTWindowAttentionMerger": 1},
    "rt_detr": {"RTDetrMLPPredictionHead": 1},
    "rt_detr_v2": {"RTDetrV2MLPPredictionHead": 1},
    "sam": {"SamFeedForward": 5},
    "zaya": {"ZayaRouterMLP": 2},
}
# Every so many families are in the short run, by turns in training and in evaluation; they are in alphabetical order,
# so that all kinds are among them.
STEP = 40
# A single draw may be an unlucky one.
DRAWS = 3
Run = Callable[[nn.Module, Inputs], Results]


def _families() -> list[object]:
    return [
        pytest.param(name, training, marks=[] if place % (2 * STEP) == STEP * training else [pytest.mark.full])
        for place, name in enumerate(sorted(FAMILIES))
        for training in (False, True)
    ]


def _fused(report: fl.Report) -> dict[str, int]:
    """How many modules of which class are fused."""
    return dict(Counter(module for _, module in {(entry.path, entry.module) for entry in blocks(report.replaced)}))


def _replaced(model: nn.Module) -> fl.Report:
    with warnings.catch_warnings():
        # Of families without a single FFN that can be fused.
        warnings.filterwarnings("ignore", "nothing was replaced", UserWarning)
        return fl.replace(model)


@pytest.mark.parametrize(("name", "training"), _families())
def test_a_family(name: str, training: bool) -> None:
    family: Family = FAMILIES[name]
    model, inputs = family.build().train(training), family.inputs()
    state = copy.deepcopy(model.state_dict())
    # Some models choose their attention at the first call.
    _results(family, model, state, inputs, 0)
    plain = copy.deepcopy(model)
    before = [_results(family, plain, state, inputs, draw) for draw in range(DRAWS)]
    report = _replaced(model)
    expected = {kind: count for kind, count in family.expected.items() if kind not in LEFT.get(name, {})}
    assert _fused(report) == expected | FUSED_BESIDES.get(name, {})
    for kind, reason in LEFT.get(name, {}).items():
        said = [entry.reason for entry in report.skipped if entry.module == kind]
        assert any(reason in each for each in said) or not reason, said
    after = [_results(family, model, state, inputs, draw) for draw in range(DRAWS)]
    if name in NO_TRUTH:
        assert_same(after[0], before[0])
    elif not all(map(_equal, after, before)):
        double = family.build().double().train(training)
        _results(family, double, state, inputs, 0, family.truth)

        def truth(draw: int) -> Results:
            return _results(family, double, state, inputs, draw, family.truth)

        again = (
            (_results(family, model, state, inputs, draw), _results(family, plain, state, inputs, draw), truth(draw))
            for draw in range(DRAWS, 2 * DRAWS)
        )
        assert_draws_close(list(zip(after, before, map(truth, range(DRAWS)), strict=True)), again=again)
    assert list(model.state_dict()) == list(state)
    fl.restore(model)
    assert_same(_results(family, model, state, inputs, 0), before[0])


def _results(
    family: Family, model: nn.Module, state: dict[str, Tensor], inputs: Inputs, draw: int, run: Run | None = None
) -> Results:
    """The results of one draw, from the same state: batch norms write into their buffers.

    The gradients of convolutions' weights are the matrices of their products.
    """
    model.load_state_dict(state)
    with changed(model, draw), seeded_dropout():
        results = (run or family.results)(model, inputs)
    return {
        name: each.flatten(1) if each is not None and name.startswith("d") and each.dim() > 2 else each
        for name, each in results.items()
    }


def _equal(one: Results, other: Results) -> bool:
    pairs = [(one[name], other[name]) for name in one]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def test_nearly_every_family_is_fused() -> None:
    with_ffns = [name for name, family in FAMILIES.items() if family.expected or name in FUSED_BESIDES]
    fused = [
        name for name in with_ffns if set(FAMILIES[name].expected) - set(LEFT.get(name, {})) or name in FUSED_BESIDES
    ]
    assert len(FAMILIES) >= 380
    assert len(fused) >= 360
