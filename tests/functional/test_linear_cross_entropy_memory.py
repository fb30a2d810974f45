"""What the loss head allocates and keeps: a chunk of logits, or the gradient of some columns; two numbers a token."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional
from fusedlayers.functional.linear_cross_entropy import chunked
from fusedlayers.functional.linear_cross_entropy.parts import Part, losses_of_part
from tests.support.allocations import AllocatedBytes
from tests.support.compiled_cases import nothing_compiled  # noqa: F401
from tests.support.loss_operands import (
    CHUNK_ROWS,
    COLUMNS,
    FLOATING,
    REDUCTIONS,
    loss_inputs,
    on_path,
    results,
)
from tests.support.operands import DTYPES, ON_GPU, needs_kernels


@pytest.mark.sampled
@needs_kernels
@pytest.mark.skipif(ON_GPU, reason="what the CPU's allocator hands out")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [(), ("linear_weight",), ("input",), ("input", "linear_weight")], ids=str)
def test_no_tensor_is_larger_than_a_chunk(reduction: str, frozen: tuple[str, ...]) -> None:
    """Neither logits of all tokens, nor a gradient that nobody wants."""
    tokens, K, V = 64, 16, 4000
    inputs = loss_inputs((tokens,), K, V)
    with on_path("chunked", CHUNK_ROWS), AllocatedBytes() as allocated:
        found = results(functional.linear_cross_entropy, inputs, frozen, reduction=reduction)
    chunk, weight = 4 * CHUNK_ROWS * (V + V % 64), 4 * V * K
    largest = max(chunk, 0 if "linear_weight" in frozen else weight)
    # The interpreter copies what a kernel works on, a row at most.
    assert max(allocated.blocks) <= largest + 4096, (max(allocated.blocks), largest)
    assert (found["dlinear_weight"] is None) == ("linear_weight" in frozen)
    assert 4 * tokens * V > 2 * largest


@needs_kernels
@pytest.mark.skipif(ON_GPU, reason="what the CPU's allocator hands out")
@pytest.mark.sampled
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [(), ("linear_weight",), ("input",), ("input", "linear_weight")], ids=str)
def test_no_tensor_is_larger_than_the_gradient_of_some_columns(reduction: str, frozen: tuple[str, ...]) -> None:
    """What is computed again is never there for all columns, and the forward pass writes none of it."""
    tokens, K, V = 150, 8, 4001
    inputs = loss_inputs((tokens,), K, V)
    with on_path("recomputed"), AllocatedBytes() as allocated:
        found = results(functional.linear_cross_entropy, inputs, frozen, reduction=reduction)
    part, weight = 4 * tokens * COLUMNS, 4 * V * K
    # The interpreter copies the tiles that a kernel works on.
    assert max(allocated.blocks) <= max(part, weight) + 2**16, (max(allocated.blocks), part, weight)
    assert 4 * tokens * V > 2 * max(part, weight)
    assert (found["dlinear_weight"] is None) == ("linear_weight" in frozen)


@needs_kernels
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_recomputing_keeps_two_numbers_of_each_token(reduction: str) -> None:
    inputs = loss_inputs((17,), 24, 70)
    given = inputs | {name: inputs[name].requires_grad_() for name in ("input", "linear_weight")}  # type: ignore[union-attr]
    with on_path("recomputed"):
        loss = functional.linear_cross_entropy(**given, reduction=reduction)  # type: ignore[arg-type]
    operands = {tensor.data_ptr() for tensor in inputs.values() if tensor is not None}
    # Losses of tokens are shaped as the input is.
    node = loss.grad_fn.next_functions[0][0] if reduction == "none" else loss.grad_fn  # type: ignore[union-attr]
    saved = [t for t in node.saved_tensors if t is not None and t.data_ptr() not in operands]  # type: ignore[union-attr]
    assert [tensor.shape for tensor in saved] == [(2, 17), *([()] if reduction == "mean" else [])]


@needs_kernels
def test_the_logits_are_gone_when_the_sum_of_dw_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They, the sum and the rounded gradient together would be the most that a step takes."""
    inputs = loss_inputs((3 * CHUNK_ROWS,), 16, 4000)
    chunk = 4 * CHUNK_ROWS * 4032
    gradients, alive = chunked.Sums.gradients, []

    def as_large() -> dict[int, torch.Size]:
        tensors = [each for each in gc.get_objects() if type(each) is Tensor]
        return {id(each): each.shape for each in tensors if each.untyped_storage().nbytes() == chunk}

    def watch(sums: chunked.Sums) -> Any:
        # Of other tests some may be kept.
        alive.append([shape for number, shape in as_large().items() if number not in before])
        return gradients(sums)

    before = as_large()

    monkeypatch.setattr(chunked.Sums, "gradients", watch)
    input, weight = (inputs[name].requires_grad_() for name in ("input", "linear_weight"))  # type: ignore[union-attr]
    with on_path("chunked"):
        # A part that has all classes: its backward pass rounds what it has added up.
        part = Part(0, 4000, lambda found: found[None])
        losses_of_part(input, weight, inputs["target"], None, part).sum().backward()  # type: ignore[arg-type]
    assert alive == [[]]


@pytest.mark.bits
@needs_kernels
def test_gradients_stay_as_they_are_while_the_graph_does() -> None:
    """The last backward pass may scale in place what the forward pass left; those before it may not."""
    inputs = loss_inputs((17,), 24, 70, bias=True)
    leaves = {name: tensor.requires_grad_() for name in FLOATING if (tensor := inputs[name]) is not None}
    with on_path("chunked"):
        loss = functional.linear_cross_entropy(**inputs)  # type: ignore[arg-type]
    found = [
        torch.autograd.grad(loss, list(leaves.values()), torch.tensor(factor), retain_graph=keeps)
        for factor, keeps in ((1.0, True), (-0.5, True), (1.0, True), (4.0, False))
    ]
    for one, half, again, four in zip(*found, strict=True):
        assert torch.equal(one, again)
        assert torch.equal(half, -0.5 * one)
        assert torch.equal(four, 4 * one)


@needs_kernels
def test_nothing_is_saved_that_is_not_needed() -> None:
    """Without gradients nothing; with frozen operands no gradient of theirs."""
    inputs = loss_inputs((17,), 24, 70)
    with on_path("chunked"):
        with torch.no_grad():
            assert functional.linear_cross_entropy(**inputs).grad_fn is None  # type: ignore[arg-type]
        given = inputs | {"input": inputs["input"].requires_grad_()}  # type: ignore[union-attr]
        loss = functional.linear_cross_entropy(**given)  # type: ignore[arg-type]
    operands = {tensor.data_ptr() for tensor in inputs.values() if tensor is not None}
    saved = [t for t in loss.grad_fn.saved_tensors if t is not None and t.data_ptr() not in operands]  # type: ignore[union-attr]
    assert [tensor.shape for tensor in saved] == [(17, 24)]


@pytest.mark.sampled(together=2)
@needs_kernels
@pytest.mark.parametrize("path", ["chunked", "recomputed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("V", [3, 64, 65, 70, 72, 129])
@pytest.mark.parametrize("rows", [CHUNK_ROWS, 40])
def test_vocabularies_that_are_padded(rows: int, V: int, reduction: str, dtype: torch.dtype, path: str) -> None:
    """Products read copies of the weight that have more rows; in one chunk of tokens and in several."""
    inputs = loss_inputs((29,), 16, V, dtype, bias=True)
    with on_path(path, rows):
        found = results(functional.linear_cross_entropy, inputs, reduction=reduction)
    for name, tensor in found.items():
        assert tensor is not None
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
        assert tensor.is_contiguous(), name
