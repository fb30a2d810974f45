"""GEMM-reduce on a GPU: against float64, exact integers, layouts, special values, CUDA graphs, the same bits again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, planning, reference
from fusedlayers.closeness import assert_all_close
from tests.gpu.exact import exact, exact_reduction
from tests.gpu.graphs import assert_replays_like_launched
from tests.support.operands import DEVICE, Tensors, assert_equal, in_float64, leaves, on_path, results
from tests.support.reduce_operands import DIFFERENTIABLE, INDEXED, assert_reduce_close, reduce_inputs, reduce_results

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# (batch, M, N, K): whole tiles, ragged ones, and an inner dimension of several steps.
SIZES = [(8, 1024, 512, 64), (3, 431, 767, 128), (2, 520, 333, 256), (2, 260, 300, 1000), (5, 127, 129, 33)]
DIMS = [-2, -1]
SPLITS = (1, 2, 3, 5, 8)
EXACT = ["sum", "max", "min", "absmax", "sumsq"]


def drawn(size: tuple[int, int, int, int], dtype: torch.dtype, **options: object) -> Tensors:
    batch, M, N, K = size
    return reduce_inputs(M, N, K, dtype, batches=((batch,), (batch,)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_sizes(op: str, dim: int, size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    assert_reduce_close(drawn(size, dtype, bias=True), op=op, dim=dim)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_activations(op: str, dtype: torch.dtype, activation: str) -> None:
    for dim in DIMS:
        assert_reduce_close(drawn(SIZES[1], dtype, bias=True), op=op, dim=dim, activation=activation)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
@pytest.mark.parametrize("dim", DIMS)
def test_masks_and_lengths(op: str, dim: int) -> None:
    batch, M, N, _ = SIZES[1]
    rows = M if dim == -2 else N
    mask = torch.rand(batch, rows, device=DEVICE) < 0.5
    mask[0] = False
    lengths = torch.tensor([rows, 0, 200], device=DEVICE)
    for given in ({"mask": mask}, {"lengths": lengths}, {"mask": mask, "lengths": lengths}):
        assert_reduce_close(drawn(SIZES[1], BFLOAT16), op=op, dim=dim, **given)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("size", [*SIZES, (1, 2061, 96, 64), (1, 4096, 64, 128)], ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("op", EXACT)
def test_exact_integers_again_and_again(
    op: str, dim: int, size: tuple[int, int, int, int], dtype: torch.dtype, poisoned_memory: None
) -> None:
    activation = None if op == "min" else "relu"  # the minimum of a relu is 0, and has no gradient
    inputs, dy, expected = exact_reduction(op, dim, size, dtype, activation)
    for splits in SPLITS:
        with pytest.MonkeyPatch.context() as patch, on_path("kernels"):
            patch.setattr(planning.gemm_reduce, "choose_reduced_splits", lambda *arguments, splits=splits: splits)
            for _ in range(20):
                assert_equal(
                    results(functional.gemm_reduce, inputs, dy, op=op, dim=dim, activation=activation), expected
                )


@pytest.mark.parametrize("op", INDEXED)
@pytest.mark.parametrize("dim", DIMS)
def test_indices_of_many_ties(op: str, dim: int) -> None:
    for size in SIZES:
        inputs = drawn(size, BFLOAT16, draw=lambda *shape, dtype: torch.randint(-1, 2, shape).to(dtype))
        with on_path("kernels"):
            d, index = functional.gemm_reduce(**inputs, op=op, dim=dim, return_indices=True)
        a, b = (tensor.double() for tensor in inputs.values() if tensor is not None)
        values, first = reference.gemm_reduce(a, b, op=op, dim=dim, return_indices=True)
        # torch's own maximum on a GPU promises no first index: look for it.
        product = (a @ b).abs() if op == "absmax" else a @ b
        first = (product == values.unsqueeze(dim)).int().argmax(dim)
        assert torch.equal(d.double(), values)
        assert torch.equal(index, first)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_the_same_bits_every_time(op: str, poisoned_memory: None) -> None:
    inputs = drawn((2, 5000, 130, 96), BFLOAT16, bias=True)
    with on_path("kernels"):
        runs = [reduce_results(functional.gemm_reduce, inputs, op=op, activation="gelu") for _ in range(10)]
    for run in runs:
        assert all(tensor is not None and bool(tensor.isfinite().all()) for tensor in run.values())
        assert_equal(run, runs[0])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "batch innermost": lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "sliced": lambda t: torch.nn.functional.pad(t, (8, 8), value=float("nan"))[..., 8:-8],
    "odd rows": lambda t: torch.nn.functional.pad(t, (0, 1), value=float("nan"))[..., :-1],
    "one element off": lambda t: torch.cat((t.new_full((1,), float("nan")), t.flatten()))[1:].view(t.shape),
    "every second matrix": lambda t: torch.stack([t, torch.full_like(t, float("nan"))], 1).flatten(0, 1)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("op", ["max", "sumsq"])
def test_layouts(op: str, name: str, layout: str, poisoned_memory: None) -> None:
    def draw_inputs(draw: Callable[..., Tensor]) -> tuple[Tensors, Tensor]:
        return drawn((3, 150, 88, 64), BFLOAT16, draw=draw), draw(3, 88, dtype=torch.float64).to(DEVICE, BFLOAT16)

    inputs, dy, expected = exact(reference.gemm_reduce, draw_inputs, BFLOAT16, op=op)
    strided = {key: LAYOUTS[layout](t) if key == name and t is not None else t for key, t in inputs.items()}
    with on_path("kernels"):
        assert_equal(results(functional.gemm_reduce, strided, dy, op=op), expected)


@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_nan_and_infinity_come_out_where_torch_has_them(op: str, value: float, where: str) -> None:
    for dim in DIMS:
        inputs = drawn((2, 70, 40, 32), BFLOAT16)
        planted = inputs[where]
        planted.view(-1)[planted.numel() // 3] = value
        with on_path("kernels"):
            ours = functional.gemm_reduce(**inputs, op=op, dim=dim)
        theirs = reference.gemm_reduce(**inputs, op=op, dim=dim)
        for what in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(what(ours), what(theirs)), f"{what.__name__} over {dim}"


@pytest.mark.parametrize("op", ["max", "logsumexp"])
def test_a_cuda_graph_replays_forward_and_backward(op: str) -> None:
    inputs = leaves(drawn((4, 600, 256, 64), BFLOAT16))
    dd = torch.randn(4, 256, device=DEVICE, dtype=BFLOAT16)
    wanted = list(inputs.values())

    def step() -> tuple[Tensor, ...]:
        d = functional.gemm_reduce(**inputs, op=op)
        return (d.detach(), *torch.autograd.grad(d, wanted, dd))

    with on_path("kernels"):
        assert_replays_like_launched(step, [*wanted, dd], 20)


@pytest.mark.parametrize("op", ["sum", "mean", "sumsq"])
def test_atomic_sums_are_close(op: str) -> None:
    inputs = drawn((1, 20000, 64, 96), BFLOAT16)
    with on_path("kernels"):
        ours = reduce_results(functional.gemm_reduce, inputs, op=op, atomic=True)
    theirs = reduce_results(reference.gemm_reduce, inputs, op=op)
    truth = reduce_results(reference.gemm_reduce, in_float64(inputs), op=op)
    assert_all_close(ours, theirs, truth, independent=64)


def test_the_product_is_written_too() -> None:
    inputs = drawn(SIZES[1], BFLOAT16)
    for dim in DIMS:
        with on_path("kernels"):
            d, product = functional.gemm_reduce(**inputs, op="max", dim=dim, return_product=True)
        assert torch.equal(d, product.amax(dim))
        expected = reference.gemm_reduce(**inputs, op="max", dim=dim, return_product=True)[1]
        torch.testing.assert_close(product, expected)


def test_seventy_thousand_tiny_products() -> None:
    """More batch entries than the second and third axis of a grid can count."""
    assert_reduce_close(drawn((70_000, 3, 2, 4), FLOAT16), op="max")


@pytest.mark.xdist_group("large")
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 60 * 2**30,
    reason="needs a GPU with 60 GB of memory",
)
@pytest.mark.parametrize("op", ["max", "sumsq"])
def test_more_elements_than_32_bits_count(op: str) -> None:
    """Both a and its gradient, against torch on chunks of the batch; integers that are exact in float32."""
    batch, M, N, K = 65_540, 256, 8, 128
    a = torch.empty(batch, M, K, dtype=BFLOAT16, device=DEVICE)
    assert a.numel() > 2**31
    for piece in a.view(-1).split(2**28):
        piece.copy_(torch.randint(-2, 3, piece.shape, dtype=torch.int8, device=DEVICE))
    b = torch.randint(-1, 2, (batch, K, N), dtype=torch.int8, device=DEVICE).to(BFLOAT16)
    dy = torch.randint(-2, 3, (batch, N), dtype=torch.int8, device=DEVICE).to(BFLOAT16)
    with on_path("kernels"):
        ours = results(functional.gemm_reduce, {"a": a, "b": b}, dy, op=op)
    for rows in (slice(0, 64), slice(32_700, 32_800), slice(batch - 64, batch)):
        part = {"a": a[rows].double(), "b": b[rows].double()}
        truth = results(reference.gemm_reduce, part, dy[rows].double(), op=op)
        for name, tensor in ours.items():
            expected = truth[name]
            if op == "max":
                assert torch.equal(tensor[rows], expected.to(BFLOAT16)), name
            else:
                torch.testing.assert_close(tensor[rows], expected.to(BFLOAT16), rtol=0.02, atol=8.0)
