"""GEMM-GEMMs without an activation as A (B C): numbers, gradients, what torch does with the call, and float16."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fusedlayers import explain, functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.functional.dispatch import decisions
from tests.functional.test_compiled import Graphs, graphs  # noqa: F401
from tests.functional.test_gemm_gemm import BATCHES, gradient_for, inputs
from tests.support.compiled_cases import nothing_compiled  # noqa: F401
from tests.support.operands import (
    DEVICE,
    INTEGERS,
    assert_draws_close,
    assert_equal,
    in_float64,
    infinities,
    leaves,
    on_path,
    results,
)

DTYPES = [torch.float32, torch.bfloat16]
# Few enough inner and output columns that auto mode takes this order by itself.
SIZES = {"M": 150, "K": 9, "N": 130, "O": 11}


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "auto")


def reassociated(*arguments: Any, **options: Any) -> Tensor:
    """The public function, which takes the path in auto mode."""
    with decisions() as taken:
        found = functional.gemm_gemm(*arguments, **options)
    assert taken == {"gemm_gemm reassociated": 1}
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [SIZES, {"M": 300, "K": 64, "N": 257, "O": 32}, {"M": 64, "K": 1, "N": 64, "O": 1}])
def test_numbers_are_as_close_as_those_of_torch(sizes: dict[str, int], dtype: torch.dtype) -> None:
    found = []
    for _ in range(3):
        operands = inputs(**sizes, dtype=dtype)
        dy = gradient_for(operands)
        ours = results(reassociated, operands, dy)
        theirs = results(reference.gemm_gemm, operands, dy)
        found.append((ours, theirs, results(reference.gemm_gemm, in_float64(operands), dy.double())))
    assert_draws_close(found, independent=dy.shape[:-1].numel() * sizes["N"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_integers(dtype: torch.dtype) -> None:
    draw = INTEGERS[dtype]
    operands = inputs(49, 5, 37, 6, dtype, draw=draw)
    dy = gradient_for(operands, draw)
    truth = results(reference.gemm_gemm, in_float64(operands), dy.double())
    with on_path("reassociated"):
        assert_equal(in_float64(results(functional.gemm_gemm, operands, dy)), truth)


@pytest.mark.parametrize(("a", "b", "c"), BATCHES)
def test_leading_dimensions(a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...]) -> None:
    draw = INTEGERS[torch.float32]
    operands = inputs(17, 5, 19, 6, batches=(a, b, c), draw=draw)
    dy = gradient_for(operands, draw)
    with on_path("reassociated"):
        found = results(functional.gemm_gemm, operands, dy)
    assert_equal(found, results(reference.gemm_gemm, operands, dy))


class Products(TorchDispatchMode):
    """Counts the matrix products that run while it is entered."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen", "backward"),
    [("", 4), ("a", 3), ("b", 3), ("c", 3), ("ab", 2), ("ac", 2), ("bc", 1)],
)
def test_only_the_products_of_wanted_gradients_run(frozen: str, backward: int) -> None:
    operands = inputs(**SIZES)
    dy = gradient_for(operands)
    everything = results(reassociated, operands, dy)
    given = leaves(operands, tuple(frozen))
    with Products() as counter:
        y = functional.gemm_gemm(**given)
        assert counter.count == 2
        y.backward(dy)
    assert counter.count == 2 + backward
    for name, tensor in given.items():
        assert (tensor.grad is None) == (name in frozen)
        if tensor.grad is not None:
            assert_equal({name: tensor.grad}, {name: everything[f"d{name}"]})


def test_flop_counters_see_the_fewer_operations() -> None:
    a, b, c = leaves(inputs(**SIZES)).values()
    M, K, N, O = SIZES.values()
    with FlopCounterMode(display=False) as counter:
        functional.gemm_gemm(a, b, c).sum().backward()  # type: ignore[arg-type]
    assert counter.get_total_flops() == 2 * 2 * 3 * K * O * (M + N)


def test_explain_names_the_order() -> None:
    text = explain(functional.gemm_gemm, *inputs(**SIZES, batches=((), (), ())).values(), details=True)
    M, K, N, O = SIZES.values()
    assert text.splitlines()[:2] == [
        "Runs through torch, forward: without an activation (A B) C is A (B C), which is clearly cheaper.",
        "gemm_gemm: act(a @ b) @ c, act = identity: z",
    ]
    assert re.search(rf"\n  FLOPs +{2 * K * O * (M + N):,}\n", text)
    assert re.search(r"\n  not torch +A \(B C\) is cheaper: about 0\.\d\d of the time, by floating-point oper", text)


@infinities
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("role", ["a", "b", "c", "dy"])
def test_what_is_not_finite_reaches_the_same_elements(role: str, value: float) -> None:
    """A NaN stays one. Infinities of both signs add up to NaN in one order, and in the other not."""
    operands = inputs(**SIZES)
    dy = gradient_for(operands)
    tensor = dy if role == "dy" else operands[role]
    tensor[-1, -1, -2] = value
    ours, truth = results(reassociated, operands, dy), results(reference.gemm_gemm, operands, dy)
    for name, tensor in ours.items():
        other = truth[name]
        assert torch.equal(tensor.isfinite(), other.isfinite()), name
        if math.isnan(value):
            assert torch.equal(tensor.isnan(), other.isnan()), name


@infinities
def test_float16_keeps_the_order_whose_products_fit() -> None:
    """Elements of b c are beyond 65,504, those of a b are not."""
    operands = inputs(**SIZES, dtype=torch.float16, draw=torch.ones)
    a, b, c = operands.values()
    given = {"a": a / 2**10, "b": b * 2**5, "c": c * 2**5}
    assert reference.gemm_gemm_reassociated(**given).isinf().any()
    dy = gradient_for(given) / 2**10
    found = results(functional.gemm_gemm, given, dy)
    assert_equal(found, results(reference.gemm_gemm, given, dy))
    assert all(tensor is not None and bool(tensor.isfinite().all()) for tensor in found.values())


@pytest.mark.parametrize(
    ("dtype", "path"), [(torch.bfloat16, "reassociated"), (torch.float16, "torch")], ids=["bfloat16", "float16"]
)
def test_autocast_decides_the_dtype_and_with_it_the_order(dtype: torch.dtype, path: str) -> None:
    operands = inputs(**SIZES)
    given = leaves(operands)
    with decisions() as taken, torch.autocast(DEVICE.type, dtype):
        y = functional.gemm_gemm(**given)
    assert taken == {f"gemm_gemm {path}": 1}
    assert y.dtype == dtype
    dy = gradient_for(operands).to(dtype)
    y.backward(dy)
    ours = {"y": y.detach()} | {f"d{name}": None if t is None else t.grad for name, t in given.items()}
    assert all(ours[f"d{name}"].dtype == torch.float32 for name in "abc")  # type: ignore[union-attr]
    truth = results(reference.gemm_gemm, in_float64(operands), dy.double())
    with torch.autocast(DEVICE.type, dtype):
        theirs = results(reference.gemm_gemm, operands, dy)
    assert_all_close(ours, theirs, truth, computed_in=dtype, independent=2 * SIZES["M"] * SIZES["N"])


def test_products_of_one_hidden_keep_the_order() -> None:
    """One a b for eight entries of c is cheaper than eight products of b and c."""
    operands = inputs(**SIZES, batches=((), (), (8,)))
    with decisions() as taken:
        functional.gemm_gemm(**operands)
    assert taken == {"gemm_gemm torch": 1}
    reassociated(**inputs(**SIZES, batches=((8,), (), ())))


# What torch says of its own forward-mode rules, which are scripted.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_derivatives_of_every_order_and_direction() -> None:
    operands = [torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in ((8, 1), (1, 8), (8, 1))]
    assert torch.autograd.gradcheck(reassociated, operands)
    assert torch.autograd.gradgradcheck(reassociated, operands)

    def total(*tensors: Tensor) -> Tensor:
        return functional.gemm_gemm(*tensors).square().sum()

    leaf = [tensor.detach() for tensor in operands]
    tangents = [torch.randn_like(tensor) for tensor in leaf]
    _, forward_over_reverse = torch.func.jvp(torch.func.grad(total, (0, 1, 2)), tuple(leaf), tuple(tangents))
    first = torch.autograd.grad(total(*operands), operands, create_graph=True)
    second = torch.autograd.grad(first, operands, tangents)  # the Hessian is symmetric
    for one, other in zip(forward_over_reverse, second, strict=True):
        torch.testing.assert_close(one, other)
    # A graph that was built before its upstream gradient became dual.
    y = reassociated(*operands)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones_like(y), torch.full_like(y, 2.0))
        for gradient in torch.autograd.grad(y, operands, dual):
            primal, tangent = forward_ad.unpack_dual(gradient)
            torch.testing.assert_close(tangent, 2 * primal)


def test_transforms_give_what_torch_gives() -> None:
    a, b, c = inputs(**SIZES, dtype=torch.float64).values()
    expected = reference.gemm_gemm(a, b, c)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.func.vmap(functional.gemm_gemm)(a, b, c), expected)
    dy = torch.randn(4, *expected.shape, dtype=torch.float64, device=DEVICE)
    given = [tensor.requires_grad_() for tensor in (a, b, c)]  # type: ignore[union-attr]
    found = torch.autograd.grad(reassociated(*given), given, dy, is_grads_batched=True)
    truth = torch.autograd.grad(reference.gemm_gemm(*given), given, dy, is_grads_batched=True)
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_calls_are_plain_products(graphs: Graphs) -> None:  # noqa: F811
    compiled = graphs.compiled(functional.gemm_gemm)
    for rows in (150, 160, 170):
        operands = inputs(**SIZES | {"M": rows})
        dy = gradient_for(operands)
        assert_equal(results(compiled, operands, dy), results(reassociated, operands, dy))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "of the first length, and of any"
    assert graphs.operations() == set()
