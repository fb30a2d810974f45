"""What both processes do with ``fl.parallel.check``: models that would train otherwise, and right ones."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fusedlayers import FusedFFN, FusedMoE, LinearCrossEntropyLoss
from fusedlayers.parallel import (
    ExpertParallel,
    Findings,
    FusedFFNParallel,
    LinearCrossEntropyLossParallel,
    check,
)
from tests.support.parallel_checks import device, gathered, mesh, mine

WIDTH, CLASSES = 8, 20


class Model(nn.Module):
    """Embedding, norm, a feed-forward block or experts, and a loss whose weight may be that of the embedding."""

    def __init__(self, *, tied: bool = False, experts: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.feed_forward = FusedMoE(WIDTH, 16, 4, 2) if experts else FusedFFN(WIDTH, 16, dropout=dropout)
        self.loss = LinearCrossEntropyLoss(WIDTH, CLASSES)
        if tied:
            self.loss.linear.weight = self.embedding.weight
        self.to(device())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.feed_forward(self.dropout(self.norm(self.embedding(tokens)))), tokens)


def kinds(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[str]:
    return [finding.kind for finding in check(model, *optimizers)]


def split(model: nn.Module, **styles: Any) -> nn.Module:
    return parallelize_module(model, mesh(), styles)


def in_ddp(model: nn.Module, *ignored: str) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(ignored))
    return DistributedDataParallel(model, device_ids=[device().index] if device().type == "cuda" else None)


def check_tied_losses() -> None:
    model = split(Model(tied=True), loss=LinearCrossEntropyLossParallel())
    [finding] = check(model)
    assert (finding.kind, finding.paths) == ("untied", ("loss.linear.weight", "embedding.weight"))
    # Also where it was trained since, and in a copy, which does not know what was tied.
    assert kinds(deepcopy(model)) == ["untied"]
    with torch.no_grad():
        model.embedding.weight.add_(1)
    assert kinds(model) == ["untied"]
    assert kinds(deepcopy(model)) == []
    assert kinds(split(Model(), loss=LinearCrossEntropyLossParallel())) == []


def check_tied_blocks() -> None:
    """Blocks that share weights are trained apart; clones of one block are not taken for such."""
    shared = nn.Sequential(FusedFFN(WIDTH, 16), FusedFFN(WIDTH, 16)).to(device())
    shared[1].up_proj.weight = shared[0].up_proj.weight
    clones = nn.Sequential(block := FusedFFN(WIDTH, 16), deepcopy(block)).to(device())
    for model, expected in ((shared, ["untied", "untied"]), (clones, [])):
        split(model, **{"0": FusedFFNParallel(), "1": FusedFFNParallel()})
        assert kinds(model) == expected
    # One module at two places is one block.
    block = FusedFFN(WIDTH, 16).to(device())
    assert kinds(split(nn.Sequential(block, block), **{"0": FusedFFNParallel()})) == []


def check_experts() -> None:
    model = split(Model(experts=True), feed_forward=ExpertParallel())
    experts = [name for name, each in model.named_parameters() if isinstance(each, DTensor)]
    [finding] = check(model)
    assert finding.kind == "expert gradients"
    assert "neither in DDP nor in FSDP" in str(finding)
    wrapped = in_ddp(model, *experts)
    [finding] = check(wrapped)
    assert finding.paths == ("module.feed_forward",)
    assert "Divide them by 2" in finding.how
    # What it says, and then it is silent.
    tokens = torch.randint(CLASSES, (6,), generator=torch.Generator().manual_seed(1)).to(device())
    wrapped(mine(tokens)).backward()
    sums = [model.get_parameter(name).grad.to_local().clone() for name in experts]
    for name in experts:
        model.get_parameter(name).register_hook(lambda gradient: gradient / 2)
    assert kinds(wrapped) == []
    wrapped.zero_grad()
    wrapped(mine(tokens)).backward()
    whole = Model(experts=True)
    whole(tokens).backward()
    for name, twice in zip(experts, sums, strict=True):
        half = model.get_parameter(name).grad.to_local()
        torch.testing.assert_close(2 * half, twice)
        torch.testing.assert_close(gathered(half), whole.get_parameter(name).grad)


def check_experts_in_fsdp() -> None:
    model = split(Model(experts=True), feed_forward=ExpertParallel())
    fully_shard(model, ignored_params=set(model.feed_forward.experts.parameters()))
    [finding] = check(model)
    assert "FSDP averages gradients" in finding.what
    for each in model.feed_forward.experts.parameters():
        each.requires_grad_(False)
    assert kinds(model) == []


def check_tokens_in_parts() -> None:
    style = FusedFFNParallel(input_layouts=Shard(1), output_layouts=Shard(1))
    model = split(Model(), feed_forward=style)
    [finding] = check(model)
    assert finding.kind == "partial gradients"
    assert set(finding.paths) == {"embedding.weight", "norm.weight", "norm.bias", "loss.linear.weight"}
    for each in (model.embedding.weight, model.loss.linear.weight):
        each.register_post_accumulate_grad_hook(lambda parameter: None)
    assert check(model)[0].paths == ("norm.weight", "norm.bias")
    split(model, norm=SequenceParallel())
    assert kinds(model) == []
    loss = split(Model(), loss=LinearCrossEntropyLossParallel(input_layouts=Shard(0)))
    assert "outside of loss," in check(loss)[0].what
    assert "and 4 more are" in check(loss)[0].what


def check_dropout() -> None:
    model = split(Model(dropout=0.1), feed_forward=FusedFFNParallel())
    [finding] = check(model)
    assert (finding.kind, finding.paths) == ("dropout", ("dropout",))
    model.dropout.p = 0.0
    # The block draws its own masks.
    assert kinds(model) == []


def check_what_ddp_leaves_out() -> None:
    model = split(Model(experts=True), feed_forward=ExpertParallel())
    experts = [name for name, each in model.named_parameters() if isinstance(each, DTensor)]
    for name in experts:
        model.get_parameter(name).register_hook(lambda gradient: gradient / 2)
    assert kinds(in_ddp(model, *experts)) == []
    [finding] = check(in_ddp(model, *experts, "feed_forward.gate.weight"))
    assert (finding.kind, finding.paths) == ("left out of DDP", ("module.feed_forward.gate.weight",))


def check_optimizers() -> None:
    model = Model()
    before = torch.optim.AdamW(model.parameters())
    split(model, feed_forward=FusedFFNParallel())
    [finding] = check(model, before)
    assert (finding.kind, finding.paths[0]) == ("optimizer", "feed_forward.up_proj.weight")
    assert kinds(model, torch.optim.AdamW(model.parameters())) == []
    halves = [list(model.feed_forward.parameters()), list(model.norm.parameters())]
    assert kinds(model, *(torch.optim.AdamW(half) for half in halves)) == []
    assert kinds(model, before, torch.optim.AdamW(halves[1])) == ["optimizer"]


def check_printing() -> None:
    model = split(Model(tied=True, experts=True), loss=LinearCrossEntropyLossParallel(), feed_forward=ExpertParallel())
    found = check(model)
    assert isinstance(found, Findings)
    title, *lines = str(found).splitlines()
    assert title == "fusedlayers.parallel.check: 2 findings"
    assert [line.split(":")[0].strip() for line in lines] == ["untied", "expert gradients"]
    assert all(each.what.endswith(".") and each.how.endswith(".") for each in found)
    assert str(check(split(Model(), loss=LinearCrossEntropyLossParallel()))).endswith("nothing was found")


def check_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="model must be a module, got a list"):
        check([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizers must be optimizers of torch, got a Model"):
        check(Model(), Model())  # type: ignore[arg-type]


def check_one_process_alone() -> None:
    """Over a mesh of one process nothing is split, whatever it is made of."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    alone = DeviceMesh(device().type, [dist.get_rank()])
    model = parallelize_module(Model(tied=True), alone, {"loss": LinearCrossEntropyLossParallel()})
    assert kinds(model) == []
    assert kinds(Model(tied=True, experts=True, dropout=0.5)) == []
