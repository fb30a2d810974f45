"""What `replace` reports: which blocks it leaves and why, the table, the warning, and bad arguments."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.planning import Device
from fusedlayers.replacing import FFNRule, LinearRule, saving
from fusedlayers.replacing.rules import LIGER_RULES
from tests.support.ffn_blocks import GatedBlock, encoder, long_sequence, mlp, rule_for

RULE = rule_for(GatedBlock)
CPU = Device("cpu", "cpu")


class NormedBlock(GatedBlock):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)


class ScaledBlock(GatedBlock):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))


class CountingBlock(GatedBlock):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


class TwoInputs(GatedBlock):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) + y


class Mlp(nn.Sequential):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + x.square())


class Unnamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo, self.query = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 6)


class Named(nn.Module):
    def __init__(self, **linears: tuple[int, int]) -> None:
        super().__init__()
        for name, sizes in linears.items():
            self.add_module(name, nn.Linear(*sizes))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(4, 20, 6)), nn.Parameter(torch.zeros(4, 6, 10))


def _with(block: GatedBlock, **changes: object) -> GatedBlock:
    for name, value in changes.items():
        setattr(block, name, value)
    return block


# A module that is left alone, and what the report must say.
LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "child unnamed": (lambda: NormedBlock(), "the block has a child 'norm' that the rule does not name"),
    "parameter unnamed": (lambda: ScaledBlock(), "the block has a tensor 'scale' of its own"),
    "buffer unnamed": (lambda: CountingBlock(), "the block has a tensor 'calls' of its own"),
    "two inputs": (lambda: TwoInputs(), "has a forward that does not take exactly one tensor"),
    "forward set": (lambda: _with(GatedBlock(), forward=abs), "has a forward of its own, set on the instance"),
    "ff_block set": (lambda: _with(encoder("relu", False, False), _ff_block=abs), "has a _ff_block of its own"),
    "no such child": (lambda: _with(GatedBlock(), fc=None), "the rule's up='fc' or down='proj' is no child"),
    "no such gate": (lambda: _with(GatedBlock(), gate=None, other=nn.Linear(6, 10)), "calls what is not known in"),
    "odd dropout": (lambda: _with(GatedBlock(), p="high"), "the dropout is a builtins.str, not an nn.Dropout"),
    "odd activation": (lambda: GatedBlock(F.softplus), "the activation softplus is not a known one"),
    "odd sizes": (lambda: _with(GatedBlock(), gate=nn.Linear(6, 1)), "up (10, 6), gate (1, 6), down (6, 10)"),
    "two dtypes": (lambda: _with(GatedBlock(), proj=nn.Linear(10, 6).half()), "the linears differ in dtype or device"),
    "sizes of a run": (lambda: nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(9, 6)), "do not fit together"),
    "complex": (lambda: _complex(mlp()), "the up linear has a weight of torch.complex64"),
    "whole numbers": (lambda: _whole_numbers(mlp()), "the up linear has a weight of torch.int8"),
    "quantised": (lambda: _quantised(mlp()), "torch.ao.nn.quantized.dynamic.modules.linear.Linear, not exactly"),
    "two bias dtypes": (lambda: _half_bias(mlp()), "has a bias of torch.float16 on cpu, but a weight of torch.float32"),
    "sequential subclass": (
        lambda: Mlp(*mlp()),
        "looks like an FFN (0, 2: 6 -> 10 -> 6), but its forward calls super in",
    ),
    "layer subclass": (lambda: EncoderLayer(6, 2, 10), "looks like an FFN (linear1, linear2: 6 -> 10 -> 6), but its"),
    "rule subclass": (lambda: Derived(), "its forward cuts values off by clamp"),
    "no rule": (lambda: Unnamed(), "looks like an FFN (wi, wo: 6 -> 10 -> 6), but no method of it runs them"),
    "one linear for both": (lambda: Named(wi=(6, 20), wo=(10, 6)), "a gated FFN (wi, wo: 6 -> 2 × 10 -> 6), but no"),
    "in two children": (
        lambda: nn.ModuleDict({"a": Named(wi=(6, 10)), "b": Named(wo=(10, 6))}),
        "looks like an FFN in two children (a.wi, b.wo: 6 -> 10 -> 6), but no method of it runs them",
    ),
    "experts": (lambda: Experts(), "looks like the experts of a mixture (up, down: 4 experts)"),
    "not joined": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), "just an activation and a dropout between"),
}


class Derived(GatedBlock):
    """The gate is clamped."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.proj(self.act(self.gate(x).clamp(max=7)) * self.fc(x)) * scale


class EncoderLayer(nn.TransformerEncoderLayer):
    """The hidden is scaled."""

    def _ff_block(self, x: Tensor) -> Tensor:
        return self.linear2(0.5 * self.activation(self.linear1(x)))


def _complex(model: nn.Sequential) -> nn.Sequential:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.complex64)
    return model


def _whole_numbers(model: nn.Sequential) -> nn.Sequential:
    model[0].weight = nn.Parameter(model[0].weight.detach().to(torch.int8), requires_grad=False)
    return model


def _quantised(model: nn.Sequential) -> nn.Sequential:
    # torch says that its own quantised tensors are deprecated.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model[0] = torch.ao.nn.quantized.dynamic.Linear(6, 10)
    return model


def _half_bias(model: nn.Sequential) -> nn.Sequential:
    model[0].bias = nn.Parameter(model[0].bias.detach().half())
    return model


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_reported(name: str) -> None:
    build, reason = LEFT[name]
    block = build()
    model = nn.ModuleDict({"good": mlp(), "left": block})
    rule = [rule_for(type(block))] if isinstance(block, GatedBlock) and type(block) is not Derived else [RULE]
    before = type(block)
    report = fl.replace(model, rules=rule)
    assert [entry.path for entry in report.replaced] == ["good"]
    entries = [entry for entry in report.skipped if entry.path == "left"]
    assert len(entries) == 1
    assert reason in entries[0].reason
    assert type(block) is before


def test_the_report_is_a_table(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"ffn": mlp(), "odd": mlp(nn.Softplus()), "layer": encoder("relu", False, False)})
    monkeypatch.setattr(saving, "describe", lambda device: CPU)
    with caplog.at_level(logging.INFO, logger="fusedlayers"):
        report = fl.replace(model, rules=[RULE])
    assert str(report).splitlines() == [
        "fusedlayers.replace: 2 replaced, 2 skipped; keeps 272 bytes a token for backward, torch 272",
        "  replaced  ffn      Sequential -> FusedSequentialFFN                         "
        "0..2: gelu, 6 -> 10 -> 6, keeps 104 bytes a token for backward, torch 104",
        "  replaced  layer    TransformerEncoderLayer -> FusedTransformerEncoderLayer  "
        "linear1, linear2: relu, 6 -> 10 -> 6, keeps 168 bytes a token for backward, torch 168",
        "  skipped   odd      Sequential                                               "
        "0..2: the activation Softplus(beta=1.0, threshold=20.0) is not a known one",
        "  skipped   (rules)  GatedBlock                                               "
        "no module is exactly of this class",
        "As the model is now, torch runs every block and no kernel does: the kernels need a CUDA or ROCm GPU, and the "
        "tensors are on device type cpu.",
    ]
    assert repr(report) == str(report)
    assert [record.getMessage() for record in caplog.records] == [str(report)]
    trial = fl.replace(mlp(), dry_run=True)
    assert str(trial).splitlines()[0] == (
        "fusedlayers.replace: 1 replaced, 0 skipped (dry run: nothing changed); "
        "keeps 104 bytes a token for backward, torch 104"
    )
    assert trial.replaced[0].path == ""
    assert "(model)" in str(trial)


def test_blocks_of_a_kind_share_a_line() -> None:
    model = nn.ModuleList([nn.ModuleDict({"ffn": mlp(), "left": Derived()}) for _ in range(12)])
    lines = str(fl.replace(model, dry_run=True)).splitlines()
    assert lines[0].startswith("fusedlayers.replace: 12 replaced, 12 skipped (dry run: nothing changed)")
    assert [" ".join(line.split()[:5]) for line in lines[1:3]] == [
        "replaced *.ffn 12 × Sequential",
        "skipped *.left 12 × Derived",
    ]
    assert len(lines) == 4


def test_the_path_of_a_training_batch_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "describe", lambda device: H200)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).bfloat16()
    [entry] = fl.replace(model, dry_run=True).replaced
    assert entry.plan == "epilogue"
    assert "0..2: gelu, 1024 -> 4096 -> 1024, epilogue path, keeps" in str(entry)


@pytest.mark.parametrize("left", [Derived, lambda: mlp(nn.Softplus()), lambda: _whole_numbers(mlp())])
def test_strict_refuses_what_would_stay(left: Callable[[], nn.Module]) -> None:
    model = nn.ModuleList([mlp(), left()])
    with pytest.raises(ValueError, match=r"FFNs of it would not be fused\n(.|\n)*1 replaced, 1 skipped"):
        fl.replace(model, strict=True)
    assert type(model[0]) is nn.Sequential
    # An attention, and what is fused already, is no FFN that stays.
    model = nn.ModuleList([mlp(), nn.MultiheadAttention(6, 2), fl.FusedFFN(6, 10)])
    assert len(fl.replace(model, strict=True).replaced) == 1
    assert not fl.replace(model, strict=True).replaced


H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True, backend="sm90")
A100 = Device("cuda", "NVIDIA A100", "sm_80", sms=108, triton=True)
HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "backend", "why"),
    [
        (H200, HALF, "auto", None),
        (H200, HALF, "torch", "the backend is set to torch"),
        (H200, torch.float32, "auto", "float32 products in IEEE precision do not use the matrix units; torch's kernels "
         "are faster (unless autocast changes the dtype)"),
        (H200, torch.float32, "triton", None),
        (A100, HALF, "auto", "the kernels were not measured on sm_80; python -m fusedlayers.bench calibrate does "
         "that, FUSEDLAYERS_BACKEND=triton runs them"),
        (A100, HALF, "triton", None),
        (replace(H200, triton=False), HALF, "triton", "Triton is not installed"),
    ],
)  # fmt: skip
def test_a_closing_line_where_no_kernel_will_run(
    device: Device, dtype: torch.dtype, backend: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "describe", lambda where: device)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    model = nn.ModuleList([mlp().to(dtype), nn.Linear(6, 10).to(dtype)])
    report = fl.replace(model, rules=[LinearRule(out_features=10)], dry_run=True)
    assert [entry.why_no_kernels for entry in report.replaced] == [why, why]
    ending = f"As the model is now, torch runs every block and no kernel does: {why}."
    assert (str(report).splitlines()[-1] == ending) == (why is not None)
    assert ("As the model is now" in str(report)) == (why is not None)


def test_a_rule_that_asks_for_splits_asks_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "describe", lambda where: A100)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 10))
    with torch.no_grad():
        report = fl.replace(model, rules=[LinearRule(names="0", split_k=3), LinearRule(names="1")], dry_run=True)
    assert [entry.why_no_kernels is None for entry in report.replaced] == [True, False]
    assert "As the model is now" not in str(report), "one of them runs in kernels"


def test_an_attention_is_no_ffn() -> None:
    model = nn.ModuleDict({"ffn": mlp(), "attention": Named(q=(6, 10), k=(6, 10), v=(6, 10), o=(10, 6))})
    assert not fl.replace(model).skipped


def test_scales_of_heads_are_no_experts() -> None:
    attention = nn.Module()
    attention.q_scale, attention.k_scale = nn.Parameter(torch.ones(4, 1, 16)), nn.Parameter(torch.ones(4, 1, 16))
    assert fl.replace(nn.Sequential(*mlp(), attention), dry_run=True, strict=True).skipped == ()


@pytest.mark.parametrize("shapes", [[(4, 16, 8)] * 3 + [(4, 8, 16)], [(4, 16, 24), (4, 8, 16)]], ids=str)
def test_weights_of_heads_are_no_experts(shapes: list[tuple[int, ...]]) -> None:
    """Queries, keys, values and output; or the first three in one."""
    attention = nn.Module()
    for place, shape in enumerate(shapes):
        attention.register_parameter(f"w_{place}", nn.Parameter(torch.ones(shape)))
    assert fl.replace(nn.Sequential(*mlp(), attention), dry_run=True, strict=True).skipped == ()


def test_nothing_to_replace() -> None:
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = fl.replace(nn.Linear(6, 6))
    assert str(report) == "fusedlayers.replace: 0 replaced, 0 skipped"
    model = mlp(nn.Softplus())
    with pytest.raises(ValueError, match=r"nothing in it can be replaced[\s\S]*Softplus"):
        fl.replace(model, strict=True)
    assert type(model) is nn.Sequential
    fl.replace(mlp(), strict=True)


def test_explain_speaks_of_the_ffn() -> None:
    x = torch.randn(3, 6)
    for build in (mlp, GatedBlock, lambda: encoder("relu", False, False)):
        model = build()
        fl.replace(model, rules=[RULE])
        assert "M=3 (tokens) K=6 (d_model) N=10 (d_ff) O=6" in fl.explain(model, x, details=True)
    model = long_sequence()
    fl.replace(model)
    assert [block.path for block in fl.explain(model, x).blocks] == ["up..down", "head..last"]
    assert "tanh" in fl.explain(model[1:5], x, details=True)
    model[1].register_forward_hook(lambda *_: None)
    assert "norm" not in fl.explain(model[6:9], torch.randn(3, 4), details=True)
    assert "up..down: the up linear has a forward hook" in fl.explain(model[1:5], x, details=True)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: fl.replace(mlp), TypeError, "model must be an nn.Module"),
        (lambda: fl.restore(None), TypeError, "model must be an nn.Module, got None"),
        (lambda: fl.replace(mlp(), rules=RULE), TypeError, "rules must be a tuple or list of FFNRule and LinearRule"),
        (lambda: fl.replace(mlp(), rules=[GatedBlock]), TypeError, "rules must hold FFNRule and LinearRule objects"),
        (lambda: fl.replace(mlp(), rules=[RULE, RULE]), ValueError, "GatedBlock needs no rule, or has one already"),
        (lambda: fl.replace(mlp(), rules=LIGER_RULES[:1]), ValueError, "LigerSwiGLUMLP needs no rule"),
        (lambda: fl.replace(mlp(), rules=[rule_for(nn.Sequential)]), ValueError, "Sequential needs no rule"),
        (lambda: fl.replace(mlp(), rules=[rule_for(fl.FusedFFN)]), ValueError, "FusedFFN needs no rule"),
        (
            lambda: FFNRule(GatedBlock(), up="fc", down="proj"),
            TypeError,
            "module_class must be a subclass of nn.Module",
        ),
        (lambda: FFNRule(GatedBlock, up=None, down="proj"), TypeError, r"up must be the name of an attribute \(str\)"),
        (lambda: FFNRule(GatedBlock, up="fc", down="proj", dropout=0.1), TypeError, "dropout must be the name"),
    ],
)
def test_bad_arguments(build: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()


def _kept(block: nn.Module, tokens: int, width: int) -> int:
    """Bytes a token that a block keeps for its backward pass beside its parameters, its input included."""
    x = torch.randn(1, tokens, width, requires_grad=True)
    known = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Scalars and views of no more than one number are no activations.
        kept[storage.data_ptr()] = storage.nbytes() if tensor.numel() >= tokens else 0
        held.append(tensor)
        return tensor

    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        getattr(block, "_ff_block", block)(x)
    found, rest = divmod(sum(size for place, size in kept.items() if place not in known), tokens)
    assert not rest
    return found


class NewGELU(nn.Module):
    """GPT-2's, as transformers writes it."""

    def forward(self, z: Tensor) -> Tensor:
        return 0.5 * z * (1.0 + torch.tanh(0.7978845608028654 * (z + 0.044715 * torch.pow(z, 3.0))))


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["tanh", "relu", "gelu", "new gelu"])
@pytest.mark.parametrize("make", ["gated", "encoder", "decoder", "sequence"])
def test_the_bytes_of_a_report_are_what_is_kept(
    make: str, kind: str, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted before and after, with the masks of both dropouts."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    act = {"tanh": nn.Tanh(), "relu": nn.ReLU(), "gelu": nn.GELU(), "new gelu": NewGELU()}[kind]
    layer = {"encoder": nn.TransformerEncoderLayer, "decoder": nn.TransformerDecoderLayer}.get(make)
    if make == "gated":
        block = GatedBlock(act, p)
    elif layer is None:
        block = nn.Sequential(nn.Linear(6, 10), act, nn.Dropout(p), nn.Linear(10, 6))
    else:
        block = layer(6, 2, 10, p, act, batch_first=True)
    theirs = _kept(block, 64, 6)
    [entry] = fl.replace(block, rules=[RULE] if make == "gated" else []).replaced
    assert entry.saved_bytes == (theirs, _kept(block, 64, 6))
