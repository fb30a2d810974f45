"""Logits beside a loss that was computed without them are a tensor: to autograd, to torch, to frameworks."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import einops
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from fusedlayers.closeness import assert_all_close
from fusedlayers.replacing.loss.lazy_logits import LazyLogits
from tests.models.loss_heads import WORDS, build, in_kernels, losses, replaced, text
from tests.models.small import InFloat64
from tests.support.operands import Tensors, assert_close_or_again

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'fusedlayers[models]'")
pytestmark = pytest.mark.interpreter


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2


def in_place(logits: Tensor) -> Tensor:
    logits.mul_(torch.linspace(0.5, 1, WORDS))
    logits[..., 3] = -1
    logits.view(-1, WORDS)[0].zero_()
    return logits.sin().sum()


# What somebody computes from logits, whose gradients then are those of the model.
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "a function": lambda logits: logits.logsumexp(-1).square().sum(),
    "an autograd Function": lambda logits: Doubled.apply(logits).sin().sum(),
    "an autograd Function after another use": lambda logits: logits.sum() + Doubled.apply(logits).sin().sum(),
    "a checkpoint": lambda logits: checkpoint(lambda z: z.exp().sum(), logits, use_reentrant=False),
    "a reentrant checkpoint": lambda logits: checkpoint(lambda z: z.exp().sum(), logits, use_reentrant=True),
    "vmap": lambda logits: torch.vmap(lambda row: row.sin().sum())(logits).square().sum(),
    "in place": in_place,
    "einops": lambda logits: (
        einops.reduce(einops.rearrange(logits, "b t v -> (b t) v"), "n v -> v", "mean").sin().sum()
    ),
    "as_tensor": lambda logits: torch.as_tensor(logits).sin().sum(),
    "a cast that waits": lambda logits: logits.to(torch.float32).float().sin().sum(),
    "a tree of tensors": lambda logits: tree_map_only(Tensor, lambda each: each.sin(), {"logits": logits})[
        "logits"
    ].sum(),
    "compiled": lambda logits: torch.compile(lambda z: z.softmax(-1).square().sum(), backend="eager")(logits),
    "a hook on a copy": lambda logits: hooked(logits.clone()).sin().sum(),
}


def hooked(logits: Tensor) -> Tensor:
    logits.register_hook(lambda dy: dy.clamp(-0.1, 0.1))
    return logits


def gradients(model: Any, use: Callable[[Tensor], Tensor], draw: int = 0) -> dict[str, Tensor | None]:
    """Of a function of the logits and the loss."""
    model.zero_grad()
    outputs = model(**text(draw))
    (outputs.loss + use(outputs.logits)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# What Dynamo says, of the code of this library and of any tensor with a past.
@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["Phi", "Gemma 2"])
def test_gradients_of_what_is_computed_from_them(name: str, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi has a bias, Gemma 2 a softcap."""

    def compared(draw: int) -> tuple[Tensors, Tensors, Tensors]:
        model = build(name)
        with InFloat64():
            exact = gradients(copy.deepcopy(model).double(), USES[use], draw)
        expected = gradients(model, USES[use], draw)
        replaced(model)
        with in_kernels(monkeypatch) as paths:
            found = gradients(model, USES[use], draw)
        assert losses(paths) == 1
        return found, expected, exact

    assert_close_or_again(compared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("through", ["Python", "vmap"])
def test_gradients_under_autocast(dtype: torch.dtype, through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of torch autocast is not at work, and backward passes run outside of it."""
    model = build("Gemma 2")

    def use(logits: Tensor) -> Tensor:
        assert logits.dtype is dtype
        function = torch.vmap(lambda row: row.float().sin()) if through == "vmap" else lambda all: all.float().sin()
        return function(logits).sum()

    def run() -> dict[str, Tensor | None]:
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            use(model(**text()).logits).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    with InFloat64():
        twin = copy.deepcopy(model).double()
        twin(**text()).logits.sin().sum().backward()
        exact = {name: parameter.grad for name, parameter in twin.named_parameters()}
    expected = run()
    replaced(model)
    with in_kernels(monkeypatch):
        found = run()
    assert_all_close(found, expected, exact, computed_in=dtype)


def outputs_of(monkeypatch: pytest.MonkeyPatch, name: str = "Llama", grad: bool = True) -> Any:
    model = build(name)
    replaced(model)
    with in_kernels(monkeypatch), torch.set_grad_enabled(grad):
        return model(**text())


def test_second_derivatives_and_batches_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def second(model: Any) -> Tensor:
        logits = model(**text()).logits
        (first,) = torch.autograd.grad(logits.square().sum(), model.lm_head.weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), model.lm_head.weight)[0]

    def batched(model: Any) -> Tensor:
        logits = model(**text()).logits
        upstream = torch.linspace(-1, 1, 3 * logits.numel()).view(3, *logits.shape)
        return torch.autograd.grad(logits, model.lm_head.weight, upstream, is_grads_batched=True)[0]

    def both(model: Any) -> dict[str, Tensor | None]:
        return {"second": second(model), "batched": batched(model)}

    model = build("Gemma 2")
    with InFloat64():
        exact = both(copy.deepcopy(model).double())
    expected = both(model)
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        found = both(model)
    assert losses(paths) == 2
    assert_all_close(found, expected, exact)


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss, logits: logits.register_hook(lambda dy: dy),
        lambda loss, logits: Tensor.register_hook(logits, print),
        lambda loss, logits: torch.autograd.graph.register_multi_grad_hook([logits], print),
        lambda loss, logits: logits.retain_grad(),
        lambda loss, logits: torch.autograd.grad(loss, logits),
        lambda loss, logits: torch.autograd.grad(loss, [logits], allow_unused=True),
        lambda loss, logits: (logits.sum(), logits.retain_grad()),
    ],
)
def test_nobody_gets_a_gradient_that_lacks_the_loss(
    ask: Callable[[Tensor, Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = outputs_of(monkeypatch)
    with pytest.raises(RuntimeError, match=r"no gradient of the loss reaches outputs.logits: .*loss=False.*clone\(\)"):
        ask(outputs.loss, outputs.logits)


def test_a_gradient_of_logits_without_a_past_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients nothing reaches them from the loss in torch, either."""
    logits = outputs_of(monkeypatch, grad=False).logits.requires_grad_()
    logits.register_hook(lambda dy: dy * 2)
    logits.sum().backward()
    assert (logits.grad == 2).all()


def test_frameworks_may_watch_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP and Fabric hook every output of a model to learn when its backward pass begins."""
    outputs = outputs_of(monkeypatch)

    def began(dy: Tensor) -> Tensor:
        return dy

    for module in ("torch.distributed.fsdp", "lightning.fabric.wrappers"):
        monkeypatch.setattr(began, "__module__", module, raising=False)
        outputs.logits.register_hook(began)
    assert outputs.logits._logits._values is None


def test_what_only_passes_them_on_leaves_them_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DDP's Function at the end of its forward does."""

    class Passed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(each.clone() for each in tensors)

        @staticmethod
        def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, ...]:
            return dy

    outputs = outputs_of(monkeypatch)
    _, passed = Passed.apply(outputs.loss, outputs.logits)
    facts = (passed.shape, passed.dtype, passed.requires_grad, passed.grad_fn is not None, passed.is_floating_point())
    assert facts == (outputs.logits.shape, torch.float32, True, True, True)
    assert type(passed) is LazyLogits
    assert passed._logits._values is None
    assert outputs.logits._logits._values is None
    # A copy is one.
    passed.detach().zero_()
    assert not passed.any()
    assert outputs.logits.all()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed:UserWarning")
def test_a_hook_of_the_module_takes_them_for_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    replaced(model)
    seen: list[Any] = []
    model.register_full_backward_hook(lambda module, dx, dy: seen.append([each is None or each.any() for each in dy]))
    with in_kernels(monkeypatch):
        loss, logits = model(**text(), return_dict=False)
        loss.backward()
    assert len(seen) == 1
    assert type(logits) is LazyLogits


@pytest.mark.parametrize("read", ["numpy", "asarray", "dlpack", "data", "deepcopy", "detach", "share_memory_"])
def test_memory_of_their_own(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    with torch.no_grad():
        expected = model(**text()).logits
    readers: dict[str, Callable[[Tensor], Any]] = {
        "numpy": lambda logits: torch.from_numpy(logits.numpy()),
        "asarray": lambda logits: torch.from_numpy(np.asarray(logits)),
        "dlpack": torch.from_dlpack,
        "data": lambda logits: logits.data,
        "deepcopy": copy.deepcopy,
        "detach": lambda logits: logits.detach(),
        "share_memory_": lambda logits: logits.share_memory_(),
    }
    logits = outputs_of(monkeypatch, grad=False).logits
    found = readers[read](logits)
    assert torch.equal(found, expected)
    logits.add_(1)
    assert torch.equal(found, expected if read == "deepcopy" else expected + 1)
    assert logits.data_ptr() != 0
    assert logits.untyped_storage().nbytes() == 4 * expected.numel()


def test_modes_and_transforms_around_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed inside of them is no tensor of theirs."""
    first, second, third = (outputs_of(monkeypatch).logits for _ in range(3))
    expected = build("Llama")(**text()).logits
    with torch.inference_mode():
        words = first.argmax(-1)
    assert torch.equal(words, expected.argmax(-1))
    first.exp().sum().backward()
    slope = torch.func.grad(lambda scale: (scale * second).sum())(torch.ones(()))
    torch.testing.assert_close(slope, expected.sum())
    torch.testing.assert_close(torch.vmap(lambda scale: scale * third)(torch.ones(2))[1], expected)
    torch.testing.assert_close((first, second, third), (expected,) * 3)


@pytest.mark.parametrize("name", ["Phi", "Gemma 2", "Cohere", "Mamba"])
def test_the_likeliest_word_leaves_them_uncomputed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As evaluation asks for it: a bias, a softcap, a factor, a cast."""
    model = build(name)
    expected = model(**text()).logits.argmax(-1)
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        logits = model(**text()).logits
        for found in (logits.argmax(-1), torch.argmax(logits, dim=2), logits.float().argmax(dim=-1)):
            assert type(found) is Tensor
            assert torch.equal(found, expected)
        assert paths["linear_log_probs fused"] == 3
        assert logits._logits is not None, "nobody has computed them"
        assert torch.equal(logits.argmax(-1, keepdim=True), expected[..., None])
        assert logits._logits is None
        assert torch.equal(logits.argmax(-1), expected)
        assert torch.equal(model(**text()).logits.argmax(), logits.argmax())
        assert paths["linear_log_probs fused"] == 3
        late = model(**text()).logits
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(1)  # type: ignore[operator]
    with in_kernels(monkeypatch), pytest.raises(RuntimeError, match="now it is too late"):
        late.argmax(-1)


def test_a_use_too_late_is_an_error_in_print_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    replaced(model)
    with in_kernels(monkeypatch):
        logits, kept = (model(**text()).logits for _ in range(2))
    kept = kept.detach()
    with torch.no_grad():
        model.lm_head.weight.add_(1)  # type: ignore[operator, union-attr]
    for use in (torch.argmax, Tensor.clone, Tensor.detach, Tensor.numpy, torch.vmap(torch.sum)):
        with pytest.raises(RuntimeError, match="now it is too late"):
            use(logits)
    assert repr(logits).startswith(
        f"<logits [2, 9, {WORDS}], torch.float32: the logits were not computed with the loss"
    )
    assert logits.shape == kept.shape
    assert torch.equal(kept, build("Llama")(**text()).logits)


@pytest.mark.parametrize("used", [False, True])
def test_nothing_outlives_them(used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector: what they follow from goes with the outputs."""
    outputs = outputs_of(monkeypatch)
    hidden = weakref.ref(outputs.logits._logits._x)
    if used:
        outputs.logits.sum()
    outputs.loss.backward()
    gc.collect()
    gc.disable()
    try:
        del outputs
        assert hidden() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_fabric_returns_what_it_returns(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It casts outputs to float32, and hooks them."""
    fabric = pytest.importorskip("lightning.fabric", exc_type=ImportError).Fabric(
        accelerator="cpu", precision=precision
    )
    model = build("Llama")
    expected = fabric.setup(copy.deepcopy(model))(**text())
    replaced(model)
    wrapped = fabric.setup(model)
    with in_kernels(monkeypatch) as paths:
        outputs = wrapped(**text())
        fabric.backward(outputs["loss"])
    assert losses(paths) == 1
    assert type(outputs["logits"]) is LazyLogits
    assert outputs["logits"]._logits._values is None
    assert outputs["logits"].dtype is expected["logits"].dtype is torch.float32
    assert torch.equal(outputs["logits"] + 0, expected["logits"])


def test_accelerate_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = pytest.importorskip("accelerate.utils", exc_type=ImportError)
    expected = build("Llama")(**text()).logits
    for take in (
        lambda logits: operations.pad_across_processes(logits, dim=1),
        lambda logits: operations.concatenate([logits]),
        lambda logits: operations.recursively_apply(torch.neg, [logits])[0].neg(),
        lambda logits: operations.send_to_device({"logits": logits}, "cpu")["logits"],
        lambda logits: operations.convert_to_fp32([logits])[0],
    ):
        found = take(outputs_of(monkeypatch).logits)
        assert isinstance(found, Tensor)
        assert torch.equal(found + 0, expected)
