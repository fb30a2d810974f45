"""The batched GEMM-GEMM on a GPU: against float64, layouts, special values, CUDA graphs, the same bits every time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from tests.gpu.exact import exact
from tests.gpu.graphs import assert_replays_like_launched
from tests.support.operands import DEVICE, Tensors, assert_equal, in_float64, leaves, on_path, results

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# (batch, M, K, N, O)
SIZES = [(8, 1024, 64, 512, 64), (3, 431, 128, 767, 128), (2, 520, 256, 333, 256), (5, 127, 33, 129, 65)]


def drawn(
    size: tuple[int, int, int, int, int], dtype: torch.dtype, draw: Callable[..., Tensor] = torch.randn
) -> tuple[Tensors, Tensor]:
    """a, b, c by name, and an upstream gradient; b and c over √fan_in, unless integers are drawn."""
    batch, M, K, N, O = size
    shapes = {"a": (batch, M, K), "b": (batch, K, N), "c": (batch, N, O), "de": (batch, M, O)}
    tensors = {name: draw(*shape, dtype=torch.float64).to(DEVICE) for name, shape in shapes.items()}
    if draw is torch.randn:
        tensors |= {"b": tensors["b"] / K**0.5, "c": tensors["c"] / N**0.5}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    de = tensors.pop("de")
    return tensors, de


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: tuple[int, int, int, int, int], dtype: torch.dtype, activation: str | None) -> None:
    path = "torch" if dtype == FLOAT32 and size[2] > 128 else "kernels"
    inputs, de = drawn(size, dtype)
    with on_path(path):
        ours = results(functional.gemm_gemm, inputs, de, activation=activation)
    theirs = results(reference.gemm_gemm, inputs, de, activation=activation)
    truth = results(reference.gemm_gemm, in_float64(inputs), de.double(), activation=activation)
    assert_all_close(ours, theirs, truth, independent=size[0] * size[1] * size[3])


def test_the_same_bits_every_time(poisoned_memory: None) -> None:
    inputs, de = drawn((4, 5000, 128, 400, 128), BFLOAT16)
    with on_path("kernels"):
        runs = [results(functional.gemm_gemm, inputs, de, activation="gelu") for _ in range(10)]
    for run in runs:
        assert all(tensor is not None and bool(tensor.isfinite().all()) for tensor in run.values())
        assert_equal(run, runs[0])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "batch innermost": lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "sliced": lambda t: torch.nn.functional.pad(t, (8, 8), value=float("nan"))[..., 8:-8],
    "odd rows": lambda t: torch.nn.functional.pad(t, (0, 1), value=float("nan"))[..., :-1],
    "every second matrix": lambda t: torch.stack([t, torch.full_like(t, float("nan"))], 1).flatten(0, 1)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["a", "b", "c", "de"])
def test_layouts(layout: str, name: str, poisoned_memory: None) -> None:
    size = (3, 150, 64, 88, 64)
    inputs, de, expected = exact(reference.gemm_gemm, lambda draw: drawn(size, BFLOAT16, draw), BFLOAT16)
    inputs = {key: LAYOUTS[layout](tensor) if key == name else tensor for key, tensor in inputs.items()}
    de = LAYOUTS[layout](de) if name == "de" else de
    with on_path("kernels"):
        assert_equal(results(functional.gemm_gemm, inputs, de), expected)


@pytest.mark.parametrize("shared", [("a",), ("b", "c"), ("a", "b", "c")], ids="".join)
def test_matrices_that_serve_every_batch_entry(shared: tuple[str, ...]) -> None:
    """Expanded operands, whose gradients are sums over the batch."""
    inputs, de = drawn((6, 200, 64, 96, 64), BFLOAT16)
    inputs = {name: t[:1] if name in shared else t for name, t in inputs.items()}
    if len(shared) == 3:
        de = de[:1]
    with on_path("kernels"):
        ours = results(functional.gemm_gemm, inputs, de)
    theirs = results(reference.gemm_gemm, inputs, de)
    truth = results(reference.gemm_gemm, in_float64(inputs), de.double())
    assert_all_close(ours, theirs, truth, independent=200 * 96)


@pytest.mark.parametrize("where", ["a", "b", "c", "de"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_come_out_where_torch_has_them(value: float, where: str) -> None:
    inputs, de = drawn((2, 70, 32, 40, 32), BFLOAT16)
    planted = {**inputs, "de": de}[where]
    planted.view(-1)[planted.numel() // 3] = value
    with on_path("kernels"):
        ours = results(functional.gemm_gemm, inputs, de)
    theirs = results(reference.gemm_gemm, inputs, de)
    for name, tensor in theirs.items():
        for what in (torch.isnan, torch.isposinf, torch.isneginf):
            differ = int((what(ours[name]) != what(tensor)).sum())
            assert not differ, f"{name}: {what.__name__} differs at {differ} of {tensor.numel()} elements"


def test_a_cuda_graph_replays_forward_and_backward() -> None:
    drawn_inputs, de = drawn((4, 600, 64, 256, 64), BFLOAT16)
    inputs = leaves(drawn_inputs)
    wanted = list(inputs.values())

    def step() -> tuple[Tensor, ...]:
        e = functional.gemm_gemm(**inputs, activation="gelu_tanh")
        return (e.detach(), *torch.autograd.grad(e, wanted, de))

    with on_path("kernels"):
        assert_replays_like_launched(step, [*wanted, de], 20)
