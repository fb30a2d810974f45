"""``explain`` of a model: one line for each block, with as many tokens as the model's input has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.functional.dispatch import decisions
from tests.support.operands import Allocations

pytestmark = pytest.mark.usefixtures("without_kernels_here")
HALF = torch.bfloat16
NO_GPU = "the kernels need a CUDA or ROCm GPU, and the tensors are on device type meta"


class RealAllocations(Allocations):
    """Those that take memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        before = len(self.elements)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result.is_meta or func.is_view:
            del self.elements[before:]
        return result


class Stack(nn.Module):
    """An embedding, blocks of several kinds, and no forward that may run."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        given: dict[str, Any] = {"device": device, "dtype": HALF}
        self.embedding = nn.Embedding(50, 1024, **given)
        self.blocks = nn.ModuleList([fl.FusedFFN(1024, 4096, **given) for _ in range(2)])
        self.pair = nn.Sequential(
            nn.Linear(64, 256, **given), nn.ReLU(), nn.Linear(256, 64, **given), nn.Tanh(),
            nn.Linear(64, 32, **given), nn.GELU(), nn.Linear(32, 16, **given),
        )  # fmt: skip
        self.mixture = fl.FusedMoE(256, 512, 8, 2, **given)
        self.split = fl.SplitKLinear(4096, 64, **given)
        self.head = fl.LinearCrossEntropyLoss(1024, 50, **given)
        self.unfused = nn.Linear(3, 3, **given)

    def forward(self, ids: Tensor) -> Tensor:
        raise AssertionError("explain runs nothing")


@pytest.fixture
def stack() -> Stack:
    model = Stack("meta")
    fl.replace(model.pair)
    return model


def test_a_model_is_explained_block_by_block(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    ids = torch.zeros(4, 4096, dtype=torch.int64)
    found = fl.explain(stack, ids, on="H200")
    assert [(block.path, block.module, block.explanation.path) for block in found.blocks] == [
        ("blocks.0", "FusedFFN", "epilogue"),
        ("blocks.1", "FusedFFN", "epilogue"),
        ("pair 0..2", "FusedSequentialFFN", "fused"),
        ("pair 4..6", "FusedSequentialFFN", "fused"),
        ("mixture", "FusedMoE", "epilogue"),
        ("split", "SplitKLinear", "fused"),
        ("head", "LinearCrossEntropyLoss", "chunked"),
    ]
    title, *lines = str(found).splitlines()
    assert len(lines) == len(found.blocks)
    assert title.startswith("Stack: 7 blocks, 16,384 tokens; keeps ")
    assert lines[0] == (
        "  blocks.0   FusedFFN                Runs in the epilogue kernels, forward and backward; keeps 160 MiB, "
        "torch 288 MiB"
    )
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "auto")
    torchs = str(fl.explain(stack, ids)).splitlines()[1]
    assert torchs.endswith(f"Runs through torch: {NO_GPU}; keeps 288 MiB, torch 288 MiB")
    assert repr(found) == str(found)
    assert found.tokens == 4 * 4096


def test_a_line_is_that_of_the_block_with_so_many_tokens(stack: Stack) -> None:
    """Of every block: what it is told with an input of its own width."""
    ids = torch.zeros(4, 4096, dtype=torch.int64)
    found = {block.path: block.explanation for block in fl.explain(stack, ids, on="H200").blocks}

    def x(width: int) -> Tensor:
        return torch.empty(4 * 4096, width, device="meta", dtype=HALF, requires_grad=True)

    target = torch.empty(4 * 4096, device="meta", dtype=torch.int64)
    assert found["blocks.0"] == fl.explain(stack.blocks[0], x(1024), on="H200")
    assert found["mixture"] == fl.explain(stack.mixture, x(256), on="H200")
    assert found["split"] == fl.explain(stack.split, x(4096), on="H200")
    assert found["head"] == fl.explain(stack.head, x(1024), target, on="H200")
    first, second = stack.pair[:3], stack.pair[4:]
    fl.replace(nn.ModuleList([first, second]))
    assert found["pair 0..2"] == fl.explain(first, x(64), on="H200")
    assert found["pair 4..6"] == fl.explain(second, x(64), on="H200")


def test_the_sums_of_a_model(stack: Stack) -> None:
    found = fl.explain(stack, torch.zeros(4, 4096, dtype=torch.int64), on="H200")
    for name in ("seconds", "saved_bytes", "saved_by_torch"):
        assert getattr(found, name) == sum(getattr(block.explanation, name) for block in found.blocks) > 0
    assert fl.explain(stack, torch.zeros(4, dtype=torch.int64)).seconds is None, "nobody knows the CPU's peak rates"
    with stack.split.register_forward_hook(lambda *_: None), stack.blocks[1].up_proj.register_forward_hook(print):
        hooked = fl.explain(stack, torch.zeros(4, 4096, dtype=torch.int64), on="H200")
    assert hooked.saved_bytes is None
    assert str(hooked).splitlines()[0] == "Stack: 7 blocks, 16,384 tokens"
    assert str(hooked).splitlines()[2].endswith("children instead of fusing them: the up linear has a forward hook")


@pytest.mark.parametrize(
    ("x", "tokens"),
    [
        (torch.zeros(3, 7, dtype=torch.int64), 21),
        (torch.zeros(3, 7, dtype=torch.bool), 21),
        (torch.zeros(3, 7, 1024), 21),
        (torch.zeros(7, 5), 7),
        (torch.zeros(()), 1),
        (torch.zeros(0, 9, dtype=torch.int32), 0),
    ],
)
def test_the_tokens_of_an_input(stack: Stack, x: Tensor, tokens: int) -> None:
    assert fl.explain(stack, x, on="H200").tokens == tokens
    assert fl.explain(stack, input_ids=x, mask=torch.zeros(99)).tokens == tokens


def test_a_model_is_given_a_tensor(stack: Stack) -> None:
    with pytest.raises(TypeError, match="a Stack is explained by its number of tokens: expected a tensor, got none"):
        fl.explain(stack, on="H200")


def test_whether_a_model_is_trained_counts(stack: Stack) -> None:
    ids = torch.zeros(4, 4096, dtype=torch.int64)
    with torch.no_grad():
        inference = fl.explain(stack, ids, on="H200")
    assert inference.saved_bytes == 0
    assert str(inference).splitlines()[0] == "Stack: 7 blocks, 16,384 tokens"
    assert "bfloat16, forward, on" in inference.blocks[0].explanation.lines[1]
    stack.requires_grad_(False)
    assert fl.explain(stack, ids, on="H200") == inference
    # A frozen block passes the gradient on to what is trained below it.
    stack.embedding.requires_grad_()
    assert "forward and backward" in fl.explain(stack, ids, on="H200").blocks[0].explanation.lines[1]


def test_a_model_under_autocast() -> None:
    model = nn.ModuleList([fl.FusedFFN(64, 256)])
    ids = torch.zeros(2**17, dtype=torch.int64)
    assert "float32" in fl.explain(model, ids, on="H200").blocks[0].explanation.lines[1]
    with torch.autocast("cpu", HALF):
        [block] = fl.explain(model, ids, on="H200").blocks
    assert "bfloat16" in block.explanation.lines[1]
    assert block.explanation.path == "fused"


def test_the_details_of_a_model(stack: Stack) -> None:
    ids = torch.zeros(4, 4096, dtype=torch.int64)
    text = fl.explain(stack, ids, on="H200", details=True)
    parts = text.split("\n\n")
    blocks = fl.explain(stack, ids, on="H200").blocks
    assert [part.splitlines()[0] for part in parts] == [block.path for block in blocks]
    assert [part.partition("\n")[2] for part in parts] == [block.explanation.details for block in blocks]


def test_a_sequence_whose_input_is_not_that_of_its_ffn_is_a_model() -> None:
    ffn = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
    behind = nn.Sequential(nn.Embedding(9, 16), *ffn)
    before = nn.Sequential(*ffn, fl.FusedFFN(16, 24))
    for model, paths in ((behind, ["(model)"]), (before, ["(model)", "3"])):
        fl.replace(model)
        found = fl.explain(model, torch.zeros(2, 5, dtype=torch.int64))
        assert [line.split()[0] for line in str(found).splitlines()[1:]] == paths
    alone = nn.Sequential(*ffn)
    fl.replace(alone)
    assert fl.explain(alone, torch.zeros(2, 5, 16)).path == "torch"


def test_nothing_runs_and_nothing_is_allocated(stack: Stack) -> None:
    model = Stack()
    fl.replace(model.pair)
    before = torch.random.get_rng_state()
    ids = torch.zeros(1, 4096, dtype=torch.int64)
    with RealAllocations() as allocations, decisions() as counted:
        fl.explain(model, ids, on="H200")
        fl.explain(model, ids)
    assert not allocations.elements
    assert not counted
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(TypeError, match="or a model that holds such modules, got Sequential"):
        fl.explain(nn.Sequential(nn.Linear(3, 3)), torch.zeros(2, 3))


def test_experts_and_the_loss_of_a_language_model() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[models]'")
    config = transformers.MixtralConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).to(HALF)
    there = fl.replace(model, dry_run=True, on="H200")
    fl.replace(model)
    ids = torch.zeros(16, 4096, dtype=torch.int64)
    found = fl.explain(model, ids, on="H200")
    assert [(block.path, block.module) for block in found.blocks] == [
        ("", "FusedLossHead"),
        ("model.layers.0.mlp.experts", "FusedMixtralExperts"),
        ("model.layers.1.mlp.experts", "FusedMixtralExperts"),
    ]
    # The report of replace speaks of as many tokens, and counts bytes for each of them.
    expected = {entry.path: (entry.plan, entry.saved_bytes) for entry in there.replaced}
    for block in found.blocks:
        explained = block.explanation
        kept = explained.saved_by_torch // found.tokens, explained.saved_bytes // found.tokens
        assert (explained.path, kept) == expected[block.path]
    model.lm_head.register_forward_hook(lambda *_: None)
    hooked = fl.explain(model, input_ids=ids, on="H200").blocks[0].explanation
    assert str(hooked) == "MixtralForCausalLM computes its logits: lm_head has a forward hook"


class Classifier(nn.Module):
    """An FFN in its own forward, behind an embedding and other blocks."""

    def __init__(self, embedding: nn.Module, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks = embedding, nn.ModuleList(blocks)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.down(torch.tanh(self.up(x.mean(1))))


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("kind", ["ids", "narrow", "wide"])
def test_a_model_with_an_ffn_in_its_own_forward(kind: str, count: int) -> None:
    embedding = nn.Embedding(50, 16) if kind == "ids" else nn.Linear(16 if kind == "wide" else 3, 16)
    model = Classifier(embedding, *(fl.FusedFFN(16, 32) for _ in range(count)))
    assert len(fl.replace(model).replaced) == 1
    x = torch.zeros(2, 5, dtype=torch.int64) if kind == "ids" else torch.zeros(2, 5, 16 if kind == "wide" else 3)
    found = fl.explain(model, x)
    if kind == "wide" and not count:
        # Like a layer whose input has the width of its FFN.
        assert not hasattr(found, "blocks")
    else:
        assert [block.path for block in found.blocks] == ["", *(f"blocks.{i}" for i in range(count))]
        assert found.tokens == 10
