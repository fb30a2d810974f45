"""What both processes of a distributed test do: blocks under DDP, FSDP2 and tensor parallelism against one process."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedlayers
from fusedlayers import FusedFFN, functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.parallel import FusedFFNParallel, TensorParallelFFN
from tests.support.operands import ON_GPU, in_float64, on_path, patch_ffn, results

# Enough work on a GPU that its kernels have several tiles in every direction; the interpreter takes its time.
BATCH, TOKENS, D_MODEL, D_FF = (4, 1000, 128, 512) if ON_GPU else (4, 9, 16, 40)
KERNELS_DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank()) if ON_GPU else torch.device("cpu")


def mesh() -> DeviceMesh:
    return init_device_mesh(device().type, (dist.get_world_size(),))


def mine(tensor: Tensor, dim: int = 0) -> Tensor:
    """This process's part of a tensor that all have."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].detach().clone()


def gathered(tensor: Tensor, dim: int = 0) -> Tensor:
    """The parts of all processes, one after the other."""
    parts = [torch.empty_like(tensor.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


def full(gradient: Tensor | None) -> Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@contextmanager
def counted(path: str, rows: int = BATCH * TOKENS) -> Iterator[list[int]]:
    """Every call of ``functional.ffn``, of so many rows, takes this path, or fails; yields the size of the hidden of
    each."""
    calls: list[int] = []

    def counting(**arguments: Any) -> Tensor:
        calls.append(arguments["w_up"].shape[0])
        # "chunked" is what recompute=True takes where no kernel is allowed.
        return functional.ffn(**arguments | ({"recompute": True} if path == "chunked" else {}))

    # A few chunks: the float32 sums of hundreds would be compared with that of a single product.
    with pytest.MonkeyPatch.context() as patch, on_path(path, rows // 5):
        patch_ffn(patch, counting)
        yield calls


def block(kind: str, gated: bool, dtype: torch.dtype, **options: Any) -> nn.Module:
    """A `FusedFFN`, or an ``nn.Sequential`` that was handed to ``replace``; equal in all processes."""
    torch.manual_seed(3)
    if kind == "replaced":
        made: nn.Module = nn.Sequential(nn.Linear(D_MODEL, D_FF), nn.SiLU(), nn.Linear(D_FF, D_MODEL))
        fusedlayers.replace(made)
    else:
        made = FusedFFN(D_MODEL, D_FF, "silu", gated, **options)
    return made.to(device(), dtype)


def weights(ffn: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by the names that ``functional.ffn`` gives them."""
    names = {"up_proj": "up", "gate_proj": "gate", "down_proj": "down", "0": "up", "2": "down"}
    found = {}
    for name, parameter in ffn.named_parameters():
        *_, child, kind = name.split(".")
        found[f"{'w' if kind == 'weight' else 'b'}_{names[child]}"] = parameter
    return found


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The input and the gradient of the result, equal in all processes."""
    torch.manual_seed(4)
    x, dy = torch.randn(2, BATCH, TOKENS, D_MODEL, dtype=torch.float64)
    return x.to(device(), dtype), dy.to(device(), dtype)


def expected(ffn: nn.Module, x: Tensor, dy: Tensor, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """y and every gradient in one process: torch's in ``dtype``, and in float64 from the same rounded numbers."""
    given = {"x": x} | weights(ffn)
    rounded = {name: tensor.detach().to(dtype) for name, tensor in given.items()}
    theirs = results(reference.ffn, rounded, dy.to(dtype), activation="silu")
    truth = results(reference.ffn, in_float64(rounded), dy.double(), activation="silu")
    return theirs, truth


class Checkpointed(nn.Module):
    """Keeps less of its forward pass, in one of the ways that torch has."""

    def __init__(self, inner: nn.Module, way: str) -> None:
        super().__init__()
        self.inner = inner
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "reentrant":
            return checkpoint(self.inner, x, use_reentrant=True)
        if self.way == "non-reentrant":
            return checkpoint(self.inner, x, use_reentrant=False)
        hooks = torch.autograd.graph.save_on_cpu() if self.way == "saved on the CPU" else nullcontext()
        with hooks:
            return self.inner(x)


# The interpreter is wrong for bfloat16.
compiled_kernels = pytest.mark.skipif(not ON_GPU, reason="bfloat16 kernels need a GPU")
WAYS = ("kept", "reentrant", "non-reentrant", "saved on the CPU")


def check_data_parallel(engine: str, kind: str, path: str, precision: str) -> None:
    """DDP or FSDP2, in every way to keep less: the gradients are the mean of the processes', and the block fused."""
    mixed = precision == "mixed"
    dtype = torch.float32 if mixed else KERNELS_DTYPE if path == "kernels" else torch.float32
    computed_in = torch.bfloat16 if mixed else dtype
    original = block(kind, kind == "gated", dtype)
    x, dy = batch(dtype)
    theirs, truth = expected(original, x, dy, computed_in)
    theirs = {name: tensor.to(dtype) for name, tensor in theirs.items()}
    for way in WAYS:
        ffn = deepcopy(original)
        model: nn.Module = Checkpointed(ffn, way)
        if engine == "ddp":
            model = DistributedDataParallel(model)
        else:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32) if mixed else None
            fully_shard(model, mesh=mesh(), mp_policy=policy or MixedPrecisionPolicy())
        part = mine(x).requires_grad_()
        with counted(path) as calls:
            y = model(part)
            y.backward(mine(dy))
        # Twice where the forward pass is computed again; always with the whole hidden.
        assert calls == [D_FF] * (2 if "reentrant" in way else 1), (way, calls)
        ours = {"y": gathered(y.detach()), "dx": gathered(part.grad)}
        for name, parameter in weights(ffn).items():
            assert isinstance(parameter, DTensor) == (engine == "fsdp")
            gradient = full(parameter.grad)
            # The engines divide the sum by the number of processes.
            ours[f"d{name}"] = gradient * dist.get_world_size()
        assert_all_close(ours, theirs, truth, computed_in=computed_in, independent=BATCH * TOKENS * D_FF)


def split(ffn: nn.Module, **layouts: Any) -> TensorParallelFFN:
    made = parallelize_module(ffn, mesh(), FusedFFNParallel(**layouts))
    assert isinstance(made, TensorParallelFFN)
    return made


def check_tensor_parallel(
    path: str, gated: bool, bias: bool, tokens_split: bool, d_ff: int, autocast: bool, way: str
) -> None:
    """Each process runs ``functional.ffn`` on its part of the hidden; y and all gradients are those of one process."""
    dtype = torch.float32 if autocast or path != "kernels" else KERNELS_DTYPE
    computed_in = torch.bfloat16 if autocast else dtype
    torch.manual_seed(3)
    ffn = FusedFFN(D_MODEL, d_ff, "silu", gated, bias, device=device(), dtype=dtype)
    # An even number of tokens, so that plain tensors can be split.
    tokens = TOKENS // 2 * 2
    x, dy = (tensor[:, :tokens] for tensor in batch(dtype))
    residual = torch.randn_like(x)
    theirs, truth = expected(ffn, x, dy, computed_in)
    layout = Shard(1) if tokens_split else Replicate()
    keys = list(ffn.state_dict())
    model = split(ffn, input_layouts=layout, output_layouts=layout)
    assert list(model.state_dict()) == keys
    part, part_of_residual = (mine(t, 1) if tokens_split else t.detach().clone() for t in (x, residual))
    part.requires_grad_()
    amp: AbstractContextManager[Any] = torch.autocast(device().type, torch.bfloat16) if autocast else nullcontext()
    with counted(path) as calls:
        with amp:
            y = Checkpointed(model, way)(part)
            assert torch.equal(model(part, part_of_residual), y + part_of_residual)
        y.backward((mine(dy, 1) if tokens_split else dy).to(y.dtype))
    share = weights(model)["w_up"].to_local().shape[0]
    assert calls == [share] * (3 if "reentrant" in way else 2)
    assert share < d_ff
    ours = {"y": y.detach(), "dx": part.grad}
    if tokens_split:
        ours = {name: gathered(tensor, 1) for name, tensor in ours.items()}
    for name, parameter in weights(model).items():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        assert gradient.placements == parameter.placements
        ours[f"d{name}"] = gradient.full_tensor()
    theirs = {name: tensor.to(ours[name].dtype) for name, tensor in theirs.items()}
    assert_all_close(ours, theirs, truth, computed_in=computed_in, independent=BATCH * tokens * d_ff)


def check_compiled(d_ff: int, tokens_split: bool) -> None:
    """One graph holds the block with its collectives, forward and backward."""
    ffn = FusedFFN(D_MODEL, d_ff, "silu", True, device=device())
    x, dy = (tensor[:, : TOKENS // 2 * 2] for tensor in batch(torch.float32))
    theirs, truth = expected(ffn, x, dy, torch.float32)
    layout = Shard(1) if tokens_split else Replicate()
    model = split(ffn, input_layouts=layout, output_layouts=layout)
    model.compile(fullgraph=True, backend="aot_eager")
    part = (mine(x, 1) if tokens_split else x.clone()).requires_grad_()
    y = model(part, torch.zeros_like(part))
    y.backward(mine(dy, 1) if tokens_split else dy)
    assert part.grad is not None
    ours = {"y": y.detach(), "dx": part.grad}
    if tokens_split:
        ours = {name: gathered(tensor, 1) for name, tensor in ours.items()}
    ours |= {f"d{name}": full(parameter.grad) for name, parameter in weights(model).items()}
    assert_all_close(ours, theirs, truth, independent=BATCH * TOKENS * d_ff)


def check_dropout(path: str, way: str) -> None:
    """Every process drops other columns of the hidden, and the same ones in the backward pass."""
    eye = torch.eye(D_MODEL, device=device(), dtype=KERNELS_DTYPE)
    ffn = FusedFFN(D_MODEL, D_MODEL, "identity", bias=False, dropout=0.5, device=device(), dtype=KERNELS_DTYPE)
    with torch.no_grad():
        for linear in (ffn.up_proj, ffn.down_proj):
            linear.weight.copy_(eye)
    model = Checkpointed(split(ffn), way)
    x = torch.ones(500, D_MODEL, device=device(), dtype=KERNELS_DTYPE, requires_grad=True)
    torch.manual_seed(5)
    with counted(path, len(x)):
        y = model(x)
        # Between the passes someone else draws.
        torch.rand(3, device=device())
        y.sum().backward()
        torch.manual_seed(5)
        with torch.no_grad():
            assert torch.equal(model(x), y), "torch.manual_seed rules"
            assert not torch.equal(model(x), y), "every call draws anew"
    # With weights of one, y is twice the mask of the forward pass and dx twice that of the backward pass.
    assert torch.equal(y, x.grad)
    assert bool(((y == 0) | (y == 2)).all())
    left, right = (y.detach() / 2).double().chunk(2, dim=1)
    for half in (left, right):
        assert 0.47 < float(half.mean()) < 0.53
    # Independent masks agree on half of their elements, whichever columns and rows are compared.
    for shift in range(4):
        assert 0.47 < float((left == right.roll(shift, 1)).double().mean()) < 0.53
    states = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(states, torch.cuda.get_rng_state() if ON_GPU else torch.get_rng_state())
    assert torch.equal(states[0], states[1]), "generators that were equal stay so"


def check_children_that_are_not_plain() -> None:
    """A hook on a child is not passed by: the children are called, with the same numbers."""
    ffn = block("gated", True, torch.float32)
    x, dy = batch(torch.float32)
    theirs, truth = expected(ffn, x, dy, torch.float32)
    model = split(ffn)
    seen: list[type] = []
    model.up_proj.register_forward_hook(lambda module, inputs, output: seen.append(type(output)))
    x.requires_grad_()
    with counted("torch") as calls:
        y = model(x)
        y.backward(dy)
    assert calls == []
    assert seen == [DTensor]
    assert model.why_called(x) == "a linear child has a forward hook"
    ours = {"y": y.detach(), "dx": x.grad} | {f"d{name}": full(p.grad) for name, p in weights(model).items()}
    assert_all_close(ours, theirs, truth, independent=BATCH * TOKENS * D_FF)


def check_two_dimensions() -> None:
    """FSDP2 over one dimension of a mesh, tensor parallelism over the other: still on local shards."""
    ffn = block("gated", True, torch.float32)
    x, dy = batch(torch.float32)
    theirs, truth = expected(ffn, x, dy, torch.float32)
    both = init_device_mesh(device().type, (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(ffn, both["tensor"], FusedFFNParallel())
    fully_shard(model, mesh=both["data"])
    x.requires_grad_()
    with counted("torch") as calls:
        y = model(x)
        y.backward(dy)
    assert calls == [D_FF // dist.get_world_size()]
    ours = {"y": y.detach(), "dx": x.grad} | {f"d{name}": full(p.grad) for name, p in weights(model).items()}
    assert_all_close(ours, theirs, truth, independent=BATCH * TOKENS * D_FF)


def check_distributed_inputs_and_results() -> None:
    """DTensors are taken as they lie, and given back on request."""
    ffn = block("gated", True, torch.float32)
    x, dy = batch(torch.float32)
    theirs, truth = expected(ffn, x, dy, torch.float32)
    model = split(ffn, use_local_output=False)
    part = mine(x).requires_grad_()
    sharded = DTensor.from_local(part, mesh(), [Shard(0)], run_check=False)
    with counted("torch") as calls:
        y = model(sharded, residual=torch.zeros_like(x))
        assert isinstance(y, DTensor)
        assert y.placements == (Replicate(),)
        y.to_local().backward(dy)
        assert torch.equal(model(sharded, residual=sharded).to_local(), y.to_local() + x)
    assert len(calls) == 2
    ours = {"y": y.detach().to_local(), "dx": gathered(part.grad)}
    ours |= {f"d{name}": full(parameter.grad) for name, parameter in weights(model).items()}
    assert_all_close(ours, theirs, truth, independent=BATCH * TOKENS * D_FF)


def check_checkpoint(folder: str) -> None:
    """Written in shards by two processes, read by two and by one that know nothing of each other's layout."""
    ffn = block("gated", True, torch.float32)
    before = {name: tensor.clone() for name, tensor in ffn.state_dict().items()}
    model = split(ffn)
    dcp.save(model.state_dict(), checkpoint_id=folder)

    other = block("gated", True, torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fully_shard(other, mesh=mesh())
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    for name, tensor in state.items():
        assert torch.equal(tensor.full_tensor(), before[name]), name

    # A copy and a saved module hold their shards and still run on them.
    x, _ = batch(torch.float32)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with counted("torch") as calls:
        y = model(x)
        assert torch.equal(deepcopy(model)(x), y)
        assert torch.equal(torch.load(file, weights_only=False)(x), y)
    assert len(calls) == 3


def check_explanation() -> None:
    """``explain`` speaks of what this process computes."""
    model = split(block("gated", True, torch.float32))
    x, _ = batch(torch.float32)
    share = D_FF // dist.get_world_size()
    assert f"N={share} (d_ff)" in str(fusedlayers.explain(model, x, details=True))
    assert "style=FusedFFNParallel(input_layouts=" in repr(model)


def check_wrong_arguments() -> None:
    """Each error names and expects what that of the same block in one process does."""
    whole = FusedFFN(D_MODEL, D_FF, device=device())
    model = split(deepcopy(whole))
    x = torch.randn(3, D_MODEL, device=device())
    calls: tuple[tuple[Any, ...], ...] = (
        (None,), ([1.0],), (x.long(),), (x, x[:, 1:]), (x, x[:1]), (x, x.expand(4, -1, -1)), (x, x.double()),
        (x, [1.0]),
    )  # fmt: skip
    for given in calls:
        with pytest.raises((TypeError, ValueError)) as theirs:
            whole(*given)
        expected, _, _ = str(theirs.value).partition(", as ")
        with pytest.raises(theirs.type, match=f"^{re.escape(expected)}(, as |$)"):
            model(*given)


def check_what_cannot_be_split() -> None:
    """Each error names what was wrong, and leaves the module as it was."""

    def refused(error: type[Exception], words: str, call: Callable[[], object]) -> None:
        with pytest.raises(error, match=words):
            call()

    one = mesh()
    refused(TypeError, "input_layouts must be a placement", lambda: FusedFFNParallel(input_layouts="replicate"))
    refused(TypeError, "output_layouts must be a placement", lambda: FusedFFNParallel(output_layouts=1))
    linear = nn.Linear(4, 4)
    refused(TypeError, "exactly a FusedFFN, got a Linear", lambda: parallelize_module(linear, one, FusedFFNParallel()))
    ffn = FusedFFN(4, 8)
    two = init_device_mesh(device().type, (1, 2))
    refused(ValueError, "one dimension, got 2", lambda: FusedFFNParallel()._apply(ffn, two))
    ffn.down_proj.register_forward_hook(lambda *_: None)
    refused(ValueError, "down linear has a forward hook", lambda: parallelize_module(ffn, one, FusedFFNParallel()))
    assert type(ffn) is FusedFFN
    assert not any(isinstance(parameter, DTensor) for parameter in ffn.parameters())
