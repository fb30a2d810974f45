"""What both processes of a distributed test do in 8 bits: layers under DDP, FSDP2, tensor and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fusedlayers
from fusedlayers import FusedFFN, FusedMoE, SplitKLinear
from fusedlayers.closeness.noise import sqnr
from fusedlayers.functional.dispatch import decisions
from fusedlayers.functional.switches import switched
from fusedlayers.parallel import ExpertParallel, FusedFFNParallel
from tests.support.expert_parallel_checks import Found, found
from tests.support.float8_twins import in_8_bits
from tests.support.operands import ON_GPU
from tests.support.parallel_checks import device, gathered, mesh, mine

TOKENS, WIDTH, HIDDEN = (2048, 512, 1024) if ON_GPU else (64, 64, 256)
BFLOAT16 = torch.bfloat16
# In dB: of results and gradients of x, and of parameters.
LEAST, OF_PARAMETER = 18.0, 17.0


@contextmanager
def running() -> Iterator[None]:
    """Inside, products run in 8 bits: in kernels on a GPU, and else by the model of the recipe."""
    with switched({"FUSEDLAYERS_BACKEND": "triton"}) if ON_GPU else in_8_bits():
        yield


class Block(nn.Module):
    """A projection and an FFN, as they lie in a Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ffn(self.projection(x))
        return y


def batch() -> tuple[Tensor, Tensor]:
    """The input and the gradient of the result, equal in all processes."""
    torch.manual_seed(4)
    x, dy = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    return x.to(device(), BFLOAT16), dy.to(device(), BFLOAT16)


def exact(model: nn.Module, x: Tensor, dy: Tensor) -> Found:
    """The same in float64, by torch."""
    with switched({"FUSEDLAYERS_BACKEND": "torch"}):
        return found(deepcopy(model).double(), x.double(), dy.double())


def of_all(ours: Found) -> Found:
    """The result and the gradient of the input of all processes, one after the other."""
    return {name: gathered(value) for name, value in ours.items() if name in ("y", "dx") and value is not None}


def check_close(ours: Found, truth: Found) -> None:
    for name, value in ours.items():
        least, exactly = LEAST if name in ("y", "dx") else OF_PARAMETER, truth[name]
        assert value is not None
        assert exactly is not None
        assert sqnr(value, exactly) >= least, name


def check_data_parallel(engine: str, mixed: bool) -> None:
    """Rows have the bits of one process, as each has its own scale; gradients of parameters are the mean."""
    torch.manual_seed(3)
    with running():
        plain = Block().to(device(), torch.float32 if mixed else BFLOAT16)
        x, dy = batch()
        truth = exact(plain, x, dy)
        model: nn.Module = deepcopy(plain)
        report = fusedlayers.replace(model, precision="fp8", norm=False, loss=False)
        assert {entry.path for entry in report.replaced} == {"projection", "ffn"}, str(report)
        alone = found(deepcopy(model).to(BFLOAT16), x, dy)
        if engine == "ddp":
            model = DistributedDataParallel(model)
        else:
            policy = MixedPrecisionPolicy(BFLOAT16, torch.float32, BFLOAT16) if mixed else MixedPrecisionPolicy()
            fully_shard(model, mesh=mesh(), mp_policy=policy)
        for _ in range(2):
            model.zero_grad()
            with decisions() as taken:
                ours = found(model, mine(x), mine(dy))
            assert taken == {"linear float8": 1, "ffn float8": 1}
    # The engines divide the sum by the number of processes.
    whole = {
        name.removeprefix("module."): gathered(value) if name in ("y", "dx") else value * dist.get_world_size()
        for name, value in ours.items()
        if value is not None
    }
    for name in ("y", "dx"):
        assert torch.equal(whole[name].to(BFLOAT16), alone[name]), name
    assert whole.keys() == truth.keys()
    check_close(whole, truth)


def check_model_of_transformers() -> None:
    """Steps under FSDP2 have about the same losses, eager and compiled, and these fall."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=128,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).to(device(), BFLOAT16)
    words = torch.randint(128, (4, TOKENS // 4), device=device())
    losses = []
    with running():
        for compiled in (False, True):
            model: nn.Module = deepcopy(plain)
            fusedlayers.replace(model, precision="fp8")
            for layer in model.model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh())
            fully_shard(model, mesh=mesh())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if compiled:
                torch._dynamo.reset()
                model.compile(backend="aot_eager")
            with decisions() as taken:
                for _ in range(3):
                    loss = model(input_ids=words, labels=words).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
            assert taken["linear float8"] > 0
            assert taken["ffn float8"] > 0
    # What compilers make of torch's own operations rounds otherwise.
    assert losses[:3] == pytest.approx(losses[3:], rel=0.01)
    assert losses[2] < losses[1] < losses[0]


def check_tensor_parallel(tokens_split: bool) -> None:
    """Each process has half of the hidden, in 8 bits."""
    torch.manual_seed(3)
    ffn = FusedFFN(WIDTH, HIDDEN, "silu", True, False, device=device(), dtype=BFLOAT16, precision="fp8")
    x, dy = batch()
    with running():
        truth = exact(ffn, x, dy)
        layout = Shard(0) if tokens_split else Replicate()
        model = parallelize_module(ffn, mesh(), FusedFFNParallel(input_layouts=layout, output_layouts=layout))
        with decisions() as taken:
            ours = found(model, *((mine(x), mine(dy)) if tokens_split else (x, dy)))
    assert taken == {"ffn float8": 1}
    if tokens_split:
        ours |= of_all(ours)
    check_close(ours, truth)


class Projections(nn.Module):
    """Two linear layers as attention has them, the first one split by rows and the second one by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.sin(self.into(x)))
        return y


def check_linears_in_parts(tokens_split: bool, compiled: bool) -> None:
    """Layers that torch's styles have split run in 8 bits on the parts of each process."""
    torch.manual_seed(3)
    plain = Projections().to(device(), BFLOAT16)
    x, dy = batch()
    with running():
        truth = exact(plain, x, dy)
        model = deepcopy(plain)
        report = fusedlayers.replace(model, precision="fp8")
        assert {entry.path for entry in report.replaced} == {"into", "out"}, str(report)
        layout = Shard(0) if tokens_split else Replicate()
        styles = {"into": ColwiseParallel(input_layouts=layout), "out": RowwiseParallel(output_layouts=layout)}
        parallelize_module(model, mesh(), styles)
        if compiled:
            torch._dynamo.reset()
            model.compile(fullgraph=True, backend="aot_eager")
        with decisions() as taken:
            ours = found(model, *((mine(x), mine(dy)) if tokens_split else (x, dy)))
    assert set(taken) == {"linear float8"}, taken
    assert compiled or taken["linear float8"] == 2
    assert all(isinstance(each, DTensor) for each in model.parameters())
    if tokens_split:
        ours |= of_all(ours)
    check_close(ours, truth)


def check_uneven_parts() -> None:
    """Parts of different sizes are left to torch, and so is a layer that is whole."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(WIDTH, HIDDEN + 1, bias=False), nn.Linear(HIDDEN + 1, WIDTH, bias=False))
    model = deepcopy(plain).to(device(), BFLOAT16)
    x, dy = batch()
    with running():
        truth = exact(model, x, dy)
        for name in ("0", "1"):
            layer = model.get_submodule(name)
            split = SplitKLinear(layer.in_features, layer.out_features, False, device(), BFLOAT16, precision="fp8")  # type: ignore[arg-type]
            split.weight = layer.weight  # type: ignore[assignment]
            model.set_submodule(name, split)
        parallelize_module(model, mesh(), {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()})
        with decisions() as taken:
            ours = found(model, x, dy)
    assert taken == {"linear torch": 2}
    check_close(ours, truth)


def check_expert_parallel() -> None:
    """Each process has half of the experts, in 8 bits, and sends tokens in 16."""
    torch.manual_seed(3)
    mixture = FusedMoE(WIDTH, HIDDEN, 4, 2, device=device(), dtype=BFLOAT16, precision="fp8")
    x, dy = batch()
    with running():
        truth = exact(mixture, x, dy)
        model = parallelize_module(mixture, mesh(), ExpertParallel())
        with decisions() as taken:
            ours = found(model, mine(x), mine(dy))
    assert taken == {"moe_ffn float8": 1}
    ours |= of_all(ours)
    for name in ours.keys() - {"y", "dx"}:
        # The router is whole in every process, for its own tokens.
        if not name.startswith("experts."):
            dist.all_reduce(ours[name])
    check_close(ours, truth)
