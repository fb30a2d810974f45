"""`replace` with a precision: which blocks and linears it reaches, what the report says, and back."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.closeness.noise import OF_LAYER, sqnr
from fusedlayers.functional.dispatch import decisions
from fusedlayers.planning import float8 as planning
from tests.support.float8_twins import in_8_bits
from train_examples.mixture import Mixture

BFLOAT16 = torch.bfloat16
WIDTH, VOCABULARY = 64, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)
        self.router, self.odd = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 40)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.query(x)) + self.key(x).mean(-1, True) + self.router(x).sum(-1, True) + self.odd(x).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tied = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x) + self.tied(x)


@pytest.fixture
def model() -> Model:
    return Model().to(BFLOAT16)


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, 24))


def test_what_runs_in_8_bits_and_back(model: Model) -> None:
    given, before = tokens(), {path: type(module) for path, module in model.named_modules()}
    with torch.no_grad():
        expected = model(given)
    with in_8_bits():
        report = fl.replace(model, precision="fp8")
        became = {entry.path: entry.reason for entry in report.replaced}
        assert set(became) == {f"layers.{place}.{name}" for place in (0, 1) for name in ("query", "mlp")}
        assert all(reason.endswith("; fp8") for reason in became.values())
        assert {entry.plan for entry in report.replaced} == {"float8", None}
        left = {entry.path: entry.reason for entry in report.skipped}
        for path, reason in {
            "layers.0.key": "a width of 16 is below 32",
            "layers.0.router": "a width of 8 is no multiple of 16",
            "layers.1.odd": "a width of 40 is no multiple of 16",
            "lm_head": "the head of the model",
            "tied": "the head of the model",
        }.items():
            assert reason in left[path]
        with decisions() as taken:
            y = model(given)
        assert taken == {"ffn float8": 2, "linear float8": 2}
        with torch.no_grad():
            assert torch.equal(model(given), y)
        y.float().square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert set(model.state_dict()) == set(Model().state_dict())
        text = str(fl.explain(model, given.flatten()))
        assert text.count("in the float8 kernels") == 4
        with pytest.raises(ValueError, match="nothing in it can be replaced"):
            fl.replace(nn.Sequential(nn.Embedding(3, 4)), precision="fp8", strict=True)
        fl.restore(model)
        assert {path: type(module) for path, module in model.named_modules()} == before
        assert not torch.equal(y, expected)
        with torch.no_grad():
            assert torch.equal(model(given), expected)


def test_where_nothing_runs_in_8_bits_the_report_says_so(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "LIMITS", replace(planning.LIMITS, least_width=32))
    given = tokens()
    with torch.no_grad():
        expected = model(given)
        report = fl.replace(model, precision=fl.Float8())
        assert all("; not in 8 bits: " in entry.reason for entry in report.replaced)
        assert torch.equal(model(given), expected)
    again = fl.replace(model, precision="fp8")
    assert not again.replaced
    other = {entry.path: entry.reason for entry in fl.replace(model).skipped}
    assert "already fused, with precision='fp8'" in other["layers.0.mlp"]


def test_float32_weights_run_in_8_bits_under_autocast(model: Model) -> None:
    with in_8_bits():
        report = fl.replace(model.float(), precision="fp8")
        assert all(entry.reason.endswith("; fp8 under autocast") for entry in report.replaced)
        given = tokens()
        for entered, path in ((True, "float8"), (False, "torch")):
            with decisions() as taken, torch.autocast("cpu", BFLOAT16, enabled=entered):
                model(given)
            assert {name.split()[-1] for name in taken} == {path} or not entered


def test_blocks_of_this_library_have_their_own_precision() -> None:
    model = nn.Sequential(fl.FusedFFN(WIDTH, 128), nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    with in_8_bits():
        report = fl.replace(model, precision="fp8")
    assert [entry.path for entry in report.replaced] == ["1.0"]
    assert {entry.reason for entry in report.skipped} == {"already fused, with precision=None, an attribute of it"}


def test_experts_run_in_8_bits_and_back() -> None:
    model = Mixture(WIDTH, 96, 4, 2, "silu", gated=True).to(BFLOAT16)
    x, kind = torch.randn(2, 24, WIDTH).to(BFLOAT16), type(model.experts)
    with torch.no_grad():
        expected = model(x)
    with in_8_bits():
        report = fl.replace(model, precision="fp8")
        [entry] = report.replaced
        assert entry.path == "experts"
        assert entry.reason.endswith("; fp8")
        with decisions() as taken:
            y = model(x)
        assert taken == {"moe_ffn float8": 1}
        assert sqnr(y, expected.double()) >= OF_LAYER
        y.float().square().mean().backward()
        assert model.experts.down_proj.grad is not None
        assert "float8" in str(fl.explain(model, x))
        traced = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(traced, y)
        fl.restore(model)
    assert type(model.experts) is kind
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    [entry] = fl.replace(model, precision="fp8").replaced
    assert "; not in 8 bits: " in entry.reason


def test_rules_and_precision_together(model: Model) -> None:
    with in_8_bits():
        fl.replace(
            model, rules=[fl.LinearRule(names="*.key"), fl.LinearRule(names="*.query", split_k=2)], precision="fp8"
        )
        x = torch.randn(40, WIDTH).to(BFLOAT16)
        layer: Any = model.layers[0]
        for name, path in (("key", "torch"), ("query", "split_k")):
            linear = getattr(layer, name)
            assert linear.precision == "fp8"
            reason = fl.explain(linear, x).lines[0]
            assert reason.startswith("Runs in 16 bits"), (path, reason)


def test_a_rule_does_not_take_the_head_into_8_bits(model: Model) -> None:
    with in_8_bits():
        rules = [fl.LinearRule(names=("lm_head", "layers.0.query"))]
        texts = {entry.path: entry.reason for entry in fl.replace(model, rules=rules, precision="fp8").replaced}
    assert (model.lm_head.precision, model.layers[0].query.precision) == (None, "fp8")
    assert texts["lm_head"] == "split_k='auto', workspace, 64 -> 96; not in 8 bits: it is the head of the model"
    assert texts["layers.0.query"] == "split_k='auto', workspace, 64 -> 64; fp8"


def test_linears_keep_their_precision_until_they_are_restored(model: Model) -> None:
    with in_8_bits():
        fl.replace(model, precision="fp8")
        again = fl.replace(model, precision=fl.Float8(skip="*.query"))
    assert {entry.reason for entry in again.skipped if entry.path.endswith("query")} == {
        "already fused, with precision='fp8'; restore it first to change that"
    }


def test_copies_and_pickles_of_what_was_replaced(model: Model) -> None:
    with in_8_bits():
        fl.replace(model, precision="fp8")
        given = tokens()
        y = model(given)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with decisions() as taken:
                assert torch.equal(twin(given), y)
            assert taken == {"ffn float8": 2, "linear float8": 2}


def test_compiled_after_it_was_replaced(model: Model) -> None:
    with in_8_bits():
        fl.replace(model, precision="fp8")
        given = tokens()
        expected = model(given)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(given), expected)


@pytest.mark.parametrize("precision", ["fp4", 8, True])
def test_an_unknown_precision(model: Model, precision: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="precision must be None"):
        fl.replace(model, precision=precision)


@pytest.mark.parametrize(
    ("skip", "linears", "ffns"),
    [
        ("layers.0", {"layers.1.query"}, {"layers.1.mlp"}),
        ("*.mlp.2", {"layers.0.query", "layers.1.query"}, set()),
        (("*.query", "layers.1.mlp"), set(), {"layers.0.mlp"}),
        (("layers.?.*",), set(), set()),
    ],
)
def test_what_skip_names_stays_in_16_bits(
    model: Model, skip: str | tuple[str, ...], linears: set[str], ffns: set[str]
) -> None:
    wish = fl.Float8(skip=skip)
    with in_8_bits():
        report = fl.replace(model, precision=wish, dry_run=True)
        texts = {entry.path: entry.reason for entry in report.replaced}
        assert {path for path, text in texts.items() if path.endswith("query")} == linears
        assert {path for path, text in texts.items() if path.endswith("mlp") and text.endswith("; fp8")} == ffns
        left = {path for path, text in texts.items() if text.endswith("; not in 8 bits: the precision's skip names it")}
        assert left == {"layers.0.mlp", "layers.1.mlp"} - ffns
        reasons = {entry.path: entry.reason for entry in report.skipped}
        for place in (0, 1):
            skipped = f"layers.{place}.query" not in linears
            assert (reasons.get(f"layers.{place}.query") == "not in 8 bits: the precision's skip names it") is skipped
        fl.replace(model, precision=wish)
        assert {p for p, each in model.named_modules() if getattr(each, "fused_precision", None)} == ffns
        again = fl.replace(model, precision=wish)
    assert not again.replaced
    assert {entry.reason for entry in again.skipped if entry.path.endswith("mlp")} == {"already fused"}
    fl.restore(model)
    assert type(model.layers[0].mlp) is nn.Sequential


def test_skip_names_experts() -> None:
    layers = [Mixture(WIDTH, 96, 4, 2, "silu", gated=True) for _ in range(2)]
    model = nn.Sequential(*layers).to(BFLOAT16)
    with in_8_bits():
        report = fl.replace(model, precision=fl.Float8(skip="0"))
    assert [each.experts.fused_precision for each in layers] == [None, "fp8"]
    first, second = report.replaced
    assert first.reason.endswith("; not in 8 bits: the precision's skip names it")
    assert second.reason.endswith("; fp8")


def test_a_pattern_that_matches_nothing_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match=r"precision: skip has 'layer\.0': expected a pattern that some module's path"):
        fl.replace(model, precision=fl.Float8(skip=("layers.0", "layer.0")))
    assert not any("Fused" in type(each).__name__ for each in model.modules())
    for wrong in (3, ["layers.0"], ("a", 1)):
        with pytest.raises(TypeError, match="skip must be a str or a tuple of str, got"):
            fl.Float8(skip=wrong)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_exported(model: Model, strict: bool) -> None:
    """Also with stand-ins in the place of weights, as torch exports by default."""
    with in_8_bits(), torch.no_grad():
        fl.replace(model, precision="fp8")
        given = tokens()
        expected = model(given)
        program = torch.export.export(model, (given,), strict=strict)
        assert str(program.graph).count("fusedlayers") == 4
        assert torch.equal(program.module()(given), expected)
        with decisions() as taken:
            assert torch.equal(model(given), expected)
        assert taken == {"ffn float8": 2, "linear float8": 2}
