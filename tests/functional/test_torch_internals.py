"""Names of torch that are not public: another release that lacks one, or changes its meaning, fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.flop_counter import FlopCounterMode

from fusedlayers.kernels import torch_internals as internals

ROOT = Path(__file__).resolve().parents[2]
# Where private names of torch may stand besides ``torch_internals``: imports of classes, and what is no call path.
ELSEWHERE = {
    "call": "FakeTensor and FunctionalTensor, which stand for plain tensors in a trace",
    "traced": "a setting that the docstring names",
    "dropping": "the settings of a trace",
    "float8": "the stream of a quantising kernel",
}


def test_no_other_file_of_the_call_path_has_private_names() -> None:
    folders = [ROOT / "fusedlayers" / "functional", ROOT / "fusedlayers" / "modules"]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    files += [ROOT / "kernels" / f"{name}.py" for name in ("launching", "relaunching", "capturing", "device")]
    private = re.compile(r"torch\.(nn\.modules\.module\.)?_(C|dynamo|inductor|functorch|subclasses)\b")
    assert {path.stem for path in files if private.search(path.read_text())} <= ELSEWHERE.keys()


def test_the_state_of_a_thread() -> None:
    assert internals.count_dispatch_modes() == 0
    with FlopCounterMode(display=False):
        assert internals.count_dispatch_modes() == 1
    assert not internals.any_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert internals.any_autocast()
    seen: list[bool] = []
    torch.func.vmap(lambda x: seen.append(internals.in_functorch()) or x)(torch.ones(2))  # type: ignore[func-returns-value]
    assert seen == [True]
    assert not internals.in_functorch()
    assert not internals.has_global_hook()
    with nn.modules.module.register_module_forward_hook(lambda *given: None):
        assert internals.has_global_hook()
    if torch.cuda.is_available():
        assert not internals.is_capturing()
        assert internals.current_device() == torch.cuda.current_device()


def test_a_trace_of_torch_jit() -> None:
    seen: list[bool] = []

    def run(x: Tensor) -> Tensor:
        seen.append(internals.jit_trace() is not None)
        return x + 1

    run(torch.ones(2))
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.trace"):
        torch.jit.trace(run, torch.ones(2), check_trace=False)  # type: ignore[no-untyped-call]
    assert seen == [False, True]


def test_a_backward_pass() -> None:
    seen: list[tuple[bool, bool]] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, dy: Tensor) -> Tensor:  # type: ignore[override]
            seen.append((internals.keeps_graph(), internals.is_batch_of_gradients(dy)))
            return dy

    y = Watched.apply(torch.ones(2, requires_grad=True))
    for retained in (True, False):
        torch.autograd.backward(y, torch.ones(2), retain_graph=retained)
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Watched.apply(x), x, torch.ones(3, 2), is_grads_batched=True)
    assert [batched for _, batched in seen] == [False, False, True]
    assert [kept for kept, _ in seen[:2]] == [True, False]
    assert internals.saved_tensor_hooks(True) is None
    with save_on_cpu():
        assert internals.saved_tensor_hooks(True) is not None


def test_counts_of_references() -> None:
    x = torch.ones(2)
    before = internals.references(x)
    view = x.view(2)
    after = internals.references(x)
    assert after[1] > before[1], "a view holds the storage"
    assert view.shape == x.shape


def test_the_guard_on_tensors() -> None:
    x, weight = torch.ones(2, 3), nn.Parameter(torch.ones(4, 3))
    check = internals.tensor_guard((x, weight))
    assert check is not None
    assert check(x + 1, weight)
    for other in (x.double(), x[:1], x.T.contiguous().T, x.clone().requires_grad_(), nn.Parameter(x)):
        assert not check(other, weight)
