"""Tensors of more than 2^31 elements, one role after the other, against torch on chunks that are small.

Operands are integers whose sums stay exact in float32, so the results must be equal, bit for bit. A buffer lies behind
a guard of its own size full of NaN: an offset that wraps around in 32 bits reads NaN there, or is seen to write there.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedlayers import functional, planning, reference
from fusedlayers.kernels.dropout import draw_seed, keep_mask
from tests.support.operands import DEVICE, on_path, results
from tests.support.uninitialised import allocate_by

BFLOAT16 = torch.bfloat16
BORDER = 2**31
ENOUGH_MEMORY = 60 * 2**30
NAN = float("nan")

pytestmark = [
    # One worker runs all of these, so that they do not need their memory at the same time.
    pytest.mark.xdist_group("large"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < ENOUGH_MEMORY,
        reason="needs a GPU with 60 GB of memory",
    ),
]


class Guards:
    """Large tensors behind guards: those that a test asks for, and those that the code under test allocates."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.memory: list[tuple[Tensor, int]] = []
        self.allocate = torch.empty
        allocate_by(patch, self.guarded)

    def guarded(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor; where it is large it is full of NaN and lies behind a guard."""
        count = shape.numel()
        if count <= BORDER:
            return self.allocate(shape, dtype=dtype, device=device)
        memory = self.allocate(2 * count, dtype=dtype, device=device).fill_(NAN)
        self.memory.append((memory, count))
        return memory[count:].view(shape)

    def assert_untouched(self, expected: int) -> None:
        """No guard was written, and there were as many as expected."""
        assert len(self.memory) == expected
        for memory, count in self.memory:
            for piece in memory[:count].split(2**28):
                assert bool(piece.isnan().all())


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Guards:
    return Guards(monkeypatch)


def integers(*shape: int, density: float = 1.0) -> Tensor:
    """From -2 to 2 in bfloat16."""
    values = torch.randint(-2, 3, shape, dtype=torch.int8, device=DEVICE).to(BFLOAT16)
    return values if density == 1 else values * (torch.rand(shape, device=DEVICE) < density)


def fill_with_integers(large: Tensor) -> Tensor:
    for piece in large.view(-1).split(2**28):
        piece.copy_(torch.randint(-2, 3, piece.shape, dtype=torch.int8, device=DEVICE))
    return large


def weights(K: int, N: int, O: int) -> dict[str, Tensor]:
    return {
        "w_up": integers(N, K, density=0.5),
        "w_down": integers(O, N, density=0.5),
        "b_up": integers(N),
        "b_down": integers(O),
    }


def expected_rows(
    first: int, seed: Tensor | None, x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor, b_down: Tensor
) -> Tensor:
    """The rows of y that begin with row ``first``, with the dropout of a seed."""
    hidden = reference.hidden(F.linear(x, w_up, b_up), activation="relu")
    dropped = hidden if seed is None else reference.dropped(hidden, 0.5, seed, (first, 0))
    return F.linear(dropped, w_down, b_down)


def compare_in_chunks(
    inputs: dict[str, Tensor],
    dy: Tensor,
    found: dict[str, Tensor],
    chunk: int,
    seed: Tensor | None = None,
    frozen: tuple[str, ...] = (),
) -> None:
    """y and dx chunk by chunk, and weight gradients summed over the chunks, against torch in exact float32."""
    without = [f"d{name}" for name in frozen]
    assert [name for name, tensor in found.items() if tensor is None] == without
    sums: dict[str, Tensor] = {}
    for first in range(0, len(dy), chunk):
        rows = slice(first, first + chunk)
        part = {name: (t[rows] if name == "x" else t).detach().float() for name, t in inputs.items()}
        expected = results(partial(expected_rows, first, seed), part, dy[rows].float(), frozen)
        for name, tensor in expected.items():
            if name in without:
                continue
            if name in ("y", "dx"):
                assert torch.equal(found[name][rows], tensor.to(BFLOAT16)), f"{name}, rows from {first} on"
            else:
                sums[name] = sums.get(name, torch.zeros(())).to(DEVICE) + tensor.double()
    for name, tensor in sums.items():
        # Exact in float32 is what the partial sums of the kernels must be, and one rounding is theirs, too.
        assert float(tensor.abs().max()) < 2**24
        assert torch.equal(found[name], tensor.float().to(BFLOAT16)), name


@pytest.mark.parametrize(("frozen", "large"), [((), 3), (("w_down",), 4)], ids=["dx by cuBLAS", "dx by the kernel"])
def test_x_y_and_their_gradients(guards: Guards, frozen: tuple[str, ...], large: int) -> None:
    """x, dy and y lie behind guards; so does dx, unless it is a product of the stored hidden's gradient."""
    tokens, K, N = 2**23 + 5, 256, 32
    assert tokens * K > BORDER
    inputs = {"x": fill_with_integers(torch.empty(tokens, K, dtype=BFLOAT16, device=DEVICE)), **weights(K, N, K)}
    dy = fill_with_integers(torch.empty(tokens, K, dtype=BFLOAT16, device=DEVICE))
    with on_path("kernels") as options:
        found = results(functional.ffn, inputs, dy, frozen, activation="relu", **options)
    guards.assert_untouched(expected=large)
    compare_in_chunks(inputs, dy, found, chunk=2**20, frozen=frozen)


def test_the_hidden_which_is_stored_in_the_backward_pass(guards: Guards) -> None:
    tokens, K, N = 2**21 + 5, 256, 512
    assert tokens * 2 * N > BORDER
    inputs = {"x": integers(tokens, K), **weights(K, N, K)}
    dy = integers(tokens, K)
    with on_path("kernels") as options:
        found = results(functional.ffn, inputs, dy, activation="relu", **options)
    guards.assert_untouched(expected=1)
    compare_in_chunks(inputs, dy, found, chunk=2**19)


def test_the_hidden_which_is_never_there() -> None:
    """Tokens times hidden columns, in the dropout's counters too; and no such tensor is allocated."""
    tokens, K, N = 2**20 + 7, 32, 2064
    assert tokens * N > BORDER
    inputs = {"x": integers(tokens, K), **weights(K, N, K)}
    dy = integers(tokens, K, density=0.2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(4)
    with on_path("kernels") as options:
        found = results(functional.ffn, inputs, dy, activation="relu", dropout_p=0.5, **options)
    assert torch.cuda.max_memory_allocated() - before < tokens * N
    torch.manual_seed(4)
    compare_in_chunks(inputs, dy, found, chunk=2**16, seed=draw_seed(DEVICE))


def test_partial_sums_of_the_weight_gradients(guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    splits, K, N = 130, 64, 2**17
    # One tile of rows for each split, so that every partial sum holds something.
    tokens = splits * 64 - 1
    assert splits * 2 * K * N > BORDER
    monkeypatch.setattr(planning.gemm_gemm, "choose_splits", lambda *arguments: splits)
    inputs = {"x": integers(tokens, K), **weights(K, N, K)}
    dy = integers(tokens, K, density=0.5)
    with on_path("kernels") as options:
        found = results(functional.ffn, inputs, dy, activation="relu", **options)
    guards.assert_untouched(expected=1)
    compare_in_chunks(inputs, dy, found, chunk=1024)


def test_rows_far_apart() -> None:
    """Few elements, but strides with which the last rows lie past 2^31, in x, dy and the residual."""
    tokens, K, N = 70, 64, 96
    stride = BORDER // 64 + 8
    assert (tokens - 1) * stride > BORDER
    dense = {"x": integers(tokens, K), **weights(K, N, K), "residual": integers(tokens, K)}
    dy = integers(tokens, K)
    memory = torch.full((tokens * stride,), NAN, dtype=BFLOAT16, device=DEVICE)
    spread = [memory.as_strided((tokens, K), (stride, 1), 64 * index) for index in range(3)]
    for view, tensor in zip(spread, (dense["x"], dense["residual"], dy), strict=True):
        view.copy_(tensor)
    inputs = {**dense, "x": spread[0], "residual": spread[1]}
    with on_path("kernels") as options:
        expected = results(functional.ffn, dense, dy, activation="relu", **options)
        found = results(functional.ffn, inputs, spread[2], activation="relu", **options)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("size", "large"),
    # (batch, M, K, N, O): a, the result and their gradients; then b and c and their gradients.
    [((2**15 + 3, 256, 256, 16, 256), ("a", "de")), ((2**15 + 3, 16, 128, 512, 128), ("b", "c"))],
    ids=["rows", "weights"],
)
def test_batches(size: tuple[int, int, int, int, int], large: tuple[str, ...], guards: Guards) -> None:
    batch, M, K, N, O = size
    shapes = {"a": (batch, M, K), "b": (batch, K, N), "c": (batch, N, O), "de": (batch, M, O)}
    tensors = {}
    for name, shape in shapes.items():
        assert (torch.Size(shape).numel() > BORDER) == (name in large)
        tensors[name] = fill_with_integers(torch.empty(*shape, dtype=BFLOAT16, device=DEVICE))
    # Half of the terms of each hidden element, so that it stays exact in bfloat16.
    tensors["a"][..., ::2] = 0
    tensors["de"][..., ::2] = 0
    de = tensors.pop("de")
    with on_path("kernels"):
        found = results(functional.gemm_gemm, tensors, de, activation="relu")
    guards.assert_untouched(expected=4)
    chunk = 2**10
    for first in range(0, batch, chunk):
        entries = slice(first, first + chunk)
        part = {name: tensor[entries].float() for name, tensor in tensors.items()}
        expected = results(reference.gemm_gemm, part, de[entries].float(), activation="relu")
        for name, tensor in expected.items():
            assert torch.equal(found[name][entries], tensor.to(BFLOAT16)), f"{name}, entries from {first} on"


def test_a_dropout_mask(poisoned_memory: None) -> None:
    rows, columns, dtype = 2**16 + 3, 2**15, torch.float16
    assert rows * columns > BORDER
    seed = draw_seed(DEVICE)
    mask = keep_mask(seed, 0, rows, columns, 0.25, dtype)
    for first in range(0, rows, 2**13):
        expected = keep_mask(seed, first, min(2**13, rows - first), columns, 0.25, dtype)
        assert torch.equal(mask[first : first + 2**13], expected), f"rows from {first} on"
        assert 0.74 < float(expected.float().mean()) < 0.76
