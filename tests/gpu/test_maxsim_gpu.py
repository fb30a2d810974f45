"""Late interaction on a GPU at real sizes: float64, exact integers, the same bits every time, CUDA graphs, 2^31."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_all_close
from fusedlayers.devices import describe
from tests.gpu.exact import assert_says_something, exact
from tests.gpu.graphs import assert_replays_like_launched
from tests.gpu.reductions import watch_reductions
from tests.support.maxsim_operands import LAYOUTS, double, laid_out, results, sequences, upstream_for
from tests.support.operands import DEVICE, INTEGERS, Tensors, assert_equal, in_float64, on_path

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# (queries, documents, query tokens, document tokens, width)
Size = tuple[int, int, int, int, int]
SIZES: list[Size] = [(64, 128, 32, 300, 128), (1, 1000, 32, 300, 128), (4, 8, 1024, 1024, 128), (7, 13, 31, 257, 96)]
LENGTHS = ([32, 7, 0, 100, 31, 33, 1, 64], [300, 0, 17, 129, 64, 1, 0, 511, 128, 65, 2])


def drawn(
    size: Size, dtype: torch.dtype, draw: Callable[..., Tensor] = torch.randn
) -> tuple[dict[str, Tensor], Tensor]:
    """Queries and documents by name, and an upstream gradient."""
    queries, documents, query_length, document_length, width = size
    shapes = [(queries, query_length, width), (documents, document_length, width), (queries, documents)]
    q, e, upstream = (draw(*shape, dtype=torch.float64).to(DEVICE, dtype) for shape in shapes)
    return {"queries": q, "documents": e}, upstream


def assert_close(arguments: Tensors, upstream: Tensor) -> None:
    with on_path("kernels"):
        ours = results(functional.maxsim, arguments, upstream)
    theirs = results(reference.maxsim, arguments, upstream)
    truth = results(reference.maxsim, double(arguments), upstream.double())
    assert_all_close(ours, theirs, truth)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size: Size, dtype: torch.dtype) -> None:
    assert_close(*drawn(size, dtype))


@pytest.mark.parametrize("width", [1, 16, 33, 64, 128, 200, 256])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
def test_widths(dtype: torch.dtype, width: int) -> None:
    assert_close(*drawn((5, 9, 33, 70, width), dtype))


@pytest.mark.parametrize(("queries", "documents"), LAYOUTS)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_ragged_lengths(dtype: torch.dtype, queries: str, documents: str) -> None:
    lengths = [length + (length == 0) for length in LENGTHS[1]]
    arguments = laid_out(sequences(LENGTHS[0], lengths, 128, dtype), queries, documents)
    assert_close(arguments, upstream_for(arguments))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("size", [(16, 24, 32, 300, 128), (3, 5, 70, 130, 64), (1, 200, 32, 77, 128)], ids=str)
def test_exact_integers(size: Size, dtype: torch.dtype, poisoned_memory: None) -> None:
    def draw_inputs(draw: Callable[..., Tensor]) -> tuple[Tensors, Tensor]:
        inputs, upstream = drawn(size, dtype, draw)
        # Few scores have a gradient where inputs are sparse, and where there are few scores perhaps none: all have one.
        return inputs, torch.where(upstream == 0, 1, upstream)

    inputs, upstream, expected = exact(reference.maxsim, draw_inputs, dtype)
    assert_says_something(expected)
    with on_path("kernels"):
        for _ in range(20):
            scores, dq, de = results(functional.maxsim, inputs, upstream).values()
            assert_equal({"y": scores, "dqueries": dq, "ddocuments": de}, expected)


@pytest.mark.parametrize("width", [64, 72, 128, 100])
@pytest.mark.parametrize(("queries", "documents"), LAYOUTS)
def test_exact_integers_in_every_layout(
    queries: str, documents: str, width: int, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    """In the warp-specialised kernel where there is one, but for rows that are no multiple of 16 bytes."""
    launched = watch_reductions(monkeypatch)
    draw = INTEGERS[BFLOAT16]
    arguments = laid_out(sequences(*LENGTHS, width, FLOAT16, draw), queries, documents)
    upstream = draw(len(LENGTHS[0]), len(LENGTHS[1]), dtype=torch.float64).to(DEVICE, FLOAT16)
    truth = results(reference.maxsim, double(arguments), upstream.double())
    # Of 64 bits in the last runs.
    wide = {name: t.long() if name.startswith("cu_seqlens") else t for name, t in arguments.items()}
    with on_path("kernels"):
        for turn in range(20):
            found = results(functional.maxsim, arguments if turn < 15 else wide, upstream)
            assert_equal(in_float64(found), truth)
    assert len(launched) == (20 if describe(DEVICE).backend == "sm90" and width % 8 == 0 else 0)


@pytest.mark.parametrize("tokens", [3, 4, 30])
@pytest.mark.parametrize("document_tokens", [16, 40, 128, 300])
def test_exact_scores_for_every_number_of_consumers(
    tokens: int, document_tokens: int, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    """Without gradients, so that no indices are found: one, two and four consumers."""
    launched = watch_reductions(monkeypatch)
    inputs, _ = drawn((20, 37, tokens, document_tokens, 96), FLOAT16, INTEGERS[BFLOAT16])
    truth = reference.maxsim(**{name: tensor.double() for name, tensor in inputs.items()})
    with on_path("kernels"):
        for _ in range(20):
            assert_equal({"y": functional.maxsim(**inputs).double()}, {"y": truth})
    consumers = {3: 1, 4: 2, 30: 4}[tokens]
    assert [each.config.consumers for each in launched] == (
        [consumers] * 20 if describe(DEVICE).backend == "sm90" else []
    )


@pytest.mark.parametrize(("queries", "documents"), LAYOUTS)
def test_the_same_bits_every_time(queries: str, documents: str, poisoned_memory: None) -> None:
    arguments = laid_out(sequences(*LENGTHS, 128, BFLOAT16), queries, documents)
    upstream = upstream_for(arguments)
    with on_path("kernels"):
        first = results(functional.maxsim, arguments, upstream)
        assert not any(tensor is None or bool(tensor.isnan().any()) for tensor in first.values())
        for _ in range(9):
            assert_equal(results(functional.maxsim, arguments, upstream), first)


def test_the_same_bits_with_splits(poisoned_memory: None) -> None:
    """Few documents, then few queries: each gradient is split once."""
    for size in ((200, 2, 32, 300, 128), (1, 3000, 32, 40, 128)):
        inputs, upstream = drawn(size, BFLOAT16)
        with on_path("kernels"):
            first = results(functional.maxsim, inputs, upstream)
            for _ in range(9):
                assert_equal(results(functional.maxsim, inputs, upstream), first)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_cuda_graph_replays_forward_and_backward(layout: str) -> None:
    """Offsets are not looked at while a graph is captured, so that nothing waits for the GPU."""
    arguments = laid_out(sequences([32, 7, 100], [300, 17, 0, 129], 128, BFLOAT16), layout, layout)
    arguments |= {name: arguments[name].nan_to_num(0.0).requires_grad_() for name in ("queries", "documents")}
    wanted = [arguments["queries"], arguments["documents"]]
    upstream = torch.randn(3, 4, device=DEVICE).to(BFLOAT16)

    def step() -> tuple[Tensor, ...]:
        scores = functional.maxsim(**arguments)
        return (scores.detach(), *torch.autograd.grad(scores, wanted, upstream))

    with on_path("kernels"):
        assert_replays_like_launched(step, [*wanted, upstream], 20)


def test_seventy_thousand_documents() -> None:
    """More than the second and third axis of a grid can count, packed too."""
    draw = INTEGERS[FLOAT16]
    inputs, upstream = drawn((3, 70_000, 4, 3, 8), FLOAT16, draw)
    upstream[:, 100:] = 0  # so that the gradient of the queries stays exact
    truth = results(reference.maxsim, double(inputs), upstream.double())
    with on_path("kernels"):
        assert_equal(in_float64(results(functional.maxsim, inputs, upstream)), truth)
        ends = torch.arange(70_001, device=DEVICE, dtype=torch.int32) * 3
        packed = {**inputs, "documents": inputs["documents"].flatten(0, 1), "cu_seqlens_documents": ends}
        found = results(functional.maxsim, packed, upstream)
    found["ddocuments"] = found["ddocuments"].view_as(inputs["documents"])
    assert_equal(in_float64(found), truth)


@pytest.mark.xdist_group("large")
def test_more_than_two_to_the_31_elements_in_the_documents() -> None:
    draw = INTEGERS[BFLOAT16]
    queries = draw(2, 32, 128, dtype=FLOAT32).to(DEVICE, BFLOAT16)
    few = draw(64, 300, 128, dtype=FLOAT32).to(DEVICE, BFLOAT16)
    documents = torch.zeros(57_000, 300, 128, dtype=BFLOAT16, device=DEVICE)
    assert documents.numel() > 2**31
    documents[-64:] = few
    upstream = torch.zeros(2, 57_000, dtype=BFLOAT16, device=DEVICE)
    upstream[:, -64:] = draw(2, 64, dtype=FLOAT32).to(DEVICE, BFLOAT16)
    with on_path("kernels"):
        ours = results(functional.maxsim, {"queries": queries, "documents": documents}, upstream)
        small = results(functional.maxsim, {"queries": queries, "documents": few}, upstream[:, -64:])
    scores, dq, de = ours.values()
    assert_equal({"scores": scores[:, -64:], "dqueries": dq, "ddocuments": de[-64:]}, small)
    assert not scores[:, :-64].any()
    assert not de[:-64].any()


@pytest.mark.xdist_group("large")
def test_more_than_two_to_the_31_choices() -> None:
    draw = INTEGERS[BFLOAT16]
    queries = draw(1250, 32, 16, dtype=FLOAT32).to(DEVICE, BFLOAT16)
    documents = draw(60_000, 16, 16, dtype=FLOAT32).to(DEVICE, BFLOAT16)
    assert 1250 * 32 * 60_000 > 2**31
    upstream = torch.zeros(1250, 60_000, dtype=BFLOAT16, device=DEVICE)
    upstream[:, -16:] = draw(1250, 16, dtype=FLOAT32).to(DEVICE, BFLOAT16)
    with on_path("kernels"):
        ours = results(functional.maxsim, {"queries": queries, "documents": documents}, upstream)
        small = results(functional.maxsim, {"queries": queries, "documents": documents[-16:]}, upstream[:, -16:])
    scores, dq, de = ours.values()
    assert_equal({"scores": scores[:, -16:], "dqueries": dq, "ddocuments": de[-16:]}, small)
    assert not de[:-16].any()
