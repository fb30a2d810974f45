"""What both processes do with a loss head: under DDP and FSDP2, and with its classes spread over them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fusedlayers import LinearCrossEntropyLoss, explain
from fusedlayers.closeness import assert_all_close
from fusedlayers.parallel import LinearCrossEntropyLossParallel, VocabularyParallelLoss
from tests.support import seeds
from tests.support.loss_operands import on_path
from tests.support.operands import ON_GPU
from tests.support.parallel_checks import device, full, gathered, mesh, mine
from tests.support.uninitialised import allocate_by

# Of the odd number of classes one process has one more; the even one leaves no column to spare.
TOKENS, K, CLASSES = 40, 12, (67, 128)
IGNORED = -100
Found = dict[str, Tensor | None]


def head(classes: int, dtype: torch.dtype, **options: Any) -> LinearCrossEntropyLoss:
    """A head that is the same in both processes."""
    torch.manual_seed(3)
    made = LinearCrossEntropyLoss(K, classes, device=device(), dtype=dtype, **options)
    with torch.no_grad():
        # Wide enough that the softcap bends, and some tokens are almost certain.
        made.linear.weight.mul_(8)
    return made


def batch(classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and targets, equal in both processes."""
    torch.manual_seed(4)
    target = torch.randint(classes, (2, TOKENS // 2), device=device())
    target[0, :5] = IGNORED
    return torch.randn(2, TOKENS // 2, K, dtype=dtype, device=device()), target


def found(loss: nn.Module, x: Tensor, target: Tensor) -> Found:
    """The loss, and the gradients of its input and its parameters, for the same upstream gradient every time."""
    x = x.detach().requires_grad_()
    y = loss(x, target)
    generator = seeds.generator(6)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) + 2)
    parameters = {name.removeprefix("module."): full(parameter.grad) for name, parameter in loss.named_parameters()}
    return {"y": y.detach(), "dx": x.grad} | parameters


def split(loss: LinearCrossEntropyLoss, **layouts: Any) -> VocabularyParallelLoss:
    made = parallelize_module(loss, mesh(), LinearCrossEntropyLossParallel(**layouts))
    assert isinstance(made, VocabularyParallelLoss)
    return made


def check_classes_in_parts(path: str, options: dict[str, Any], dtype: torch.dtype, tokens_split: bool) -> None:
    """The loss and all gradients are those of one process with all classes."""
    for classes in CLASSES:
        whole = head(classes, dtype, **options)
        x, target = batch(classes, dtype)
        target = target.masked_fill(target == IGNORED, options.get("ignore_index", IGNORED))
        with on_path("torch"):
            theirs = found(deepcopy(whole), x, target)
            truth = found(deepcopy(whole).double(), x.double(), target)
        keys = list(whole.state_dict())
        loss = split(whole, input_layouts=Shard(1) if tokens_split else Replicate())
        assert list(loss.state_dict()) == keys
        weight = loss.linear.weight
        assert isinstance(weight, DTensor)
        assert weight.to_local().shape[0] < classes
        with on_path(path):
            ours = found(loss, mine(x, 1) if tokens_split else x, target)
        for name, parameter in loss.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            assert parameter.grad.placements == parameter.placements
        y = ours["y"]
        assert torch.equal(*gathered(y.reshape(1, -1)).unbind(0)), "the same bits in both"
        if tokens_split:
            assert ours["dx"] is not None
            ours["dx"] = gathered(ours["dx"], 1)
        assert_all_close(ours, theirs, truth, computed_in=dtype)


def check_no_tokens(path: str) -> None:
    """The gradients of the parameters are zeros, whatever memory they get."""
    for reduction in ("mean", "sum", "none"):
        loss = split(head(CLASSES[0], torch.float32, bias=True, reduction=reduction))
        x, target = batch(CLASSES[0], torch.float32)
        with on_path(path), pytest.MonkeyPatch.context() as patch:
            allocate_by(patch, lambda shape, dtype, device: torch.full(shape, 7, dtype=dtype, device=device))
            ours = found(loss, x[:, :0], target[:, :0])
        for name, gradient in ours.items():
            if name != "y":
                assert gradient is not None, name
                assert not gradient.any(), name


def check_frozen_classes(path: str) -> None:
    """Nothing is computed for a weight that is frozen, and the input's gradient is the same."""
    whole = head(CLASSES[0], torch.float32, bias=True)
    whole.linear.requires_grad_(False)
    x, target = batch(CLASSES[0], torch.float32)
    with on_path("torch"):
        theirs = found(deepcopy(whole), x, target)
        truth = found(deepcopy(whole).double(), x.double(), target)
    loss = split(whole)
    with on_path(path):
        ours = found(loss, x, target)
    assert ours["linear.weight"] is None
    assert_all_close(ours, theirs, truth)


def check_autocast() -> None:
    """Products run in bfloat16, and parameters and their gradients stay float32."""
    whole = head(CLASSES[0], torch.float32, bias=True)
    x, target = batch(CLASSES[0], torch.float32)
    with on_path("torch"), torch.autocast(device().type, torch.bfloat16):
        theirs = found(deepcopy(whole), x, target)
        truth = found(deepcopy(whole).double(), x.double(), target)
        ours = found(split(whole), x, target)
    assert_all_close(ours, theirs, truth, computed_in=torch.bfloat16)


def check_compiled(tokens_split: bool) -> None:
    """Around a compiled loss the gradient of the input is still the sum over the processes."""
    whole = head(CLASSES[0], torch.float32, bias=True)
    x, target = batch(CLASSES[0], torch.float32)
    theirs, truth = found(deepcopy(whole), x, target), found(deepcopy(whole).double(), x.double(), target)
    loss = split(whole, input_layouts=Shard(1) if tokens_split else Replicate())
    loss.compile(backend="aot_eager")
    ours = found(loss, mine(x, 1) if tokens_split else x, target)
    if tokens_split:
        assert ours["dx"] is not None
        ours["dx"] = gathered(ours["dx"], 1)
    assert_all_close(ours, theirs, truth)


def check_targets_that_are_no_classes(path: str) -> None:
    """A target that no process knows makes its loss NaN; the others stay."""
    classes = CLASSES[0]
    loss = split(head(classes, torch.float32, reduction="none"))
    x, target = batch(classes, torch.float32)
    with on_path(path), torch.no_grad():
        before = loss(x, target)
        target[1, 0], target[1, 1] = classes, -1
        after = loss(x, target)
    assert after[1, :2].isnan().all()
    assert torch.equal(after[1, 2:], before[1, 2:])
    assert torch.equal(after[0], before[0])


def check_wrong_arguments() -> None:
    """What is no tensor gets the error that it gets in one process."""
    loss = split(head(CLASSES[0], torch.float32))
    x, target = batch(CLASSES[0], torch.float32)
    for given, message in (
        ((None, target), "input must be a torch.Tensor, got None"),
        ((x, None), "target must be a torch.Tensor, got None"),
        (([1.0], target), "input must be a torch.Tensor, got list"),
    ):
        for module in (head(CLASSES[0], torch.float32), loss):
            with pytest.raises(TypeError, match=message):
                module(*given)


def check_called_linears() -> None:
    """A hook on the linear layer is not passed by: it is called with DTensors, and its logits are gathered."""
    whole = head(CLASSES[0], torch.float32)
    x, target = batch(CLASSES[0], torch.float32)
    theirs, truth = found(deepcopy(whole), x, target), found(deepcopy(whole).double(), x.double(), target)
    loss = split(whole)
    assert f"V={loss.linear.weight.to_local().shape[0]} (vocabulary)" in explain(loss, x, target, details=True)  # type: ignore[operator]
    seen: list[type] = []
    loss.linear.register_forward_hook(lambda module, inputs, output: seen.append(type(output)))
    assert loss.why_called(x, target) == "linear has a forward hook"
    assert_all_close(found(loss, x, target), theirs, truth)
    assert seen == [DTensor]


def check_refusals() -> None:
    """What cannot be split is refused, and stays as it is."""
    cases: list[tuple[nn.Module, type[Exception], str]] = [
        (nn.Linear(K, 4), TypeError, "exactly a LinearCrossEntropyLoss, got a Linear"),
        (head(8, torch.float32, label_smoothing=0.1), ValueError, "label_smoothing take all classes at once"),
        (head(4, torch.float32, weight=torch.ones(4)), ValueError, "class weights"),
        (head(1, torch.float32), ValueError, "of 1 classes one of 2 processes would have none"),
    ]
    for module, error, message in cases:
        kind = type(module)
        with pytest.raises(error, match=message):
            parallelize_module(module, mesh(), LinearCrossEntropyLossParallel())
        assert type(module) is kind
    with pytest.raises(TypeError, match="input_layouts must be a placement"):
        LinearCrossEntropyLossParallel(input_layouts="whole")  # type: ignore[arg-type]
    assert repr(LinearCrossEntropyLossParallel()) in repr(split(head(4, torch.float32)))


def check_data_parallel(engine: str, path: str) -> None:
    """DDP or FSDP2 of a whole head: the gradients are the mean of the processes'."""
    whole = head(CLASSES[0], torch.float32, bias=True, reduction="sum")
    x, target = batch(CLASSES[0], torch.float32)
    with on_path("torch"):
        theirs = found(deepcopy(whole), x, target)
        truth = found(deepcopy(whole).double(), x.double(), target)
    loss: nn.Module = whole
    if engine == "ddp":
        loss = DistributedDataParallel(loss, device_ids=[device().index] if ON_GPU else None)
    else:
        fully_shard(loss, mesh=mesh())
    with on_path(path):
        ours = found(loss, mine(x), mine(target))
    assert ours["dx"] is not None
    both = {"y": gathered(ours["y"].reshape(1)).sum(), "dx": gathered(ours["dx"])}
    # The engines divide the sum by the number of processes.
    summed = {name: None if (t := ours[name]) is None else t * 2 for name in ("linear.weight", "linear.bias")}
    assert_all_close(both | summed, theirs, truth)
