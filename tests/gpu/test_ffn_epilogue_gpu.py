"""The epilogue path of the FFN on a GPU: both kinds of kernels, ragged sizes, several tiles per program, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, planning, reference
from fusedlayers.devices import describe
from fusedlayers.functional import dispatch, operation
from fusedlayers.functional.recalling import Recalled
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.kernels.dropout import draw_seed, keep_mask
from tests.functional.test_ffn_chunked import cut
from tests.gpu.exact import DENSITIES, exact, exact_ffn
from tests.gpu.graphs import assert_replays_like_launched
from tests.gpu.launches import note_launches
from tests.support.operands import (
    DEVICE,
    Tensors,
    assert_equal,
    assert_ffn_close,
    ffn_inputs,
    leaves,
    like_result,
    on_path,
    results,
)

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
# Tokens, d_model, d_ff: no multiple of a tile, fewer hidden units than a tile has, a common one with a ragged end.
SIZES = [(1000, 576, 1032), (129, 512, 8), (4097, 768, 3072), (3001, 192, 768)]
# Those of sm90 kernels, and facts of the device: programs with a tile or two, with many, with part of one.
TILED: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((9000, 512, 256), {}),
    ((1061, 520, 1032), {"sms": 3}),
    ((129, 512, 8), {}),
]
BOTH = ["sm90_hidden", "sm90_epilogue_gradient"]
NAN = float("nan")

on_hopper = pytest.mark.skipif(describe(DEVICE).backend != "sm90", reason="no Hopper GPU with Gluon")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the sm90 kernels run; where they do not, the generic ones do."""
    return note_launches(monkeypatch, dict(zip(BOTH, BOTH, strict=True)))


@on_hopper
@GATED
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_close_to_torch(size: tuple[int, int, int], dtype: torch.dtype, gated: bool, launched: list[str]) -> None:
    tokens, d_model, d_ff = size
    inputs = ffn_inputs(tokens, d_model, d_ff, d_model, dtype, gated=gated, residual=True)
    activation = "silu" if gated else "gelu_tanh"
    with on_path("epilogue") as options:
        assert_ffn_close(functional.ffn, inputs, options=options, activation=activation)
        assert launched == BOTH
        assert_ffn_close(functional.ffn, inputs, options=options, manual_seed=7, activation=activation, dropout_p=0.1)
    assert launched == BOTH * 2


@GATED
@pytest.mark.parametrize("facts", [{}, {"backend": "generic"}], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, facts: dict[str, Any], gated: bool) -> None:
    for dtype in (BFLOAT16, FLOAT16):
        inputs = ffn_inputs(700, 136, 328, 72, dtype, gated=gated)
        with on_path("epilogue", **facts) as options:
            assert_ffn_close(functional.ffn, inputs, options=options, activation=activation)


@GATED
@pytest.mark.parametrize("facts", [{}, {"backend": "generic"}], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_with_dropout(activation: str, facts: dict[str, Any], gated: bool) -> None:
    inputs = ffn_inputs(700, 136, 328, 72, BFLOAT16, gated=gated)
    with on_path("epilogue", **facts) as options:
        assert_ffn_close(functional.ffn, inputs, options=options, manual_seed=3, activation=activation, dropout_p=0.3)


@GATED
@pytest.mark.parametrize("biases", [(), ("b_up",), ("b_gate",), ("b_down", "b_gate")], ids="-".join)
def test_biases(biases: tuple[str, ...], gated: bool) -> None:
    inputs = ffn_inputs(700, 136, 328, 72, BFLOAT16, gated=gated, biases=biases)
    with on_path("epilogue") as options:
        assert_ffn_close(functional.ffn, inputs, options=options, activation="silu")


@GATED
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("size", [*SIZES, (1061, 616, 1032), (9000, 2312, 776), (777, 101, 333)], ids=str)
def test_close_to_torch_after_products_of_torch(
    size: tuple[int, int, int], dtype: torch.dtype, gated: bool, launched: list[str]
) -> None:
    tokens, d_model, d_ff = size
    inputs = ffn_inputs(tokens, d_model, d_ff, d_model, dtype, gated=gated, residual=True)
    arithmetic = {"activation": "silu" if gated else "gelu_tanh"}
    with on_path("epilogue", torch_multiplies=True) as options:
        for more in ({}, {"dropout_p": 0.1, "manual_seed": 7}):
            assert_ffn_close(functional.ffn, inputs, options=options, **arithmetic, **more)
    assert not launched


@on_hopper
@GATED
def test_the_planner_lets_torch_multiply(gated: bool, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that start at no multiple of 16 elements, and few tiles."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    inputs, dy, expected = exact_ffn(401, 616, 1032, 616, BFLOAT16, gated=gated, activation="relu")
    assert_equal(results(functional.ffn, inputs, dy, activation="relu"), expected)
    assert not launched


def long_exact_ffn(
    size: tuple[int, int, int], dtype: torch.dtype, gated: bool, **dropout: Any
) -> tuple[Tensors, Tensor, Tensors]:
    """As ``exact_ffn``, also where sums over tens of thousands of tokens ask for sparser integers."""
    tokens, d_model, d_ff = size

    def draw_inputs(draw: Callable[..., Tensor]) -> tuple[Tensors, Tensor]:
        inputs = ffn_inputs(tokens, d_model, d_ff, d_model, dtype, gated=gated, draw=draw)
        return inputs, like_result(inputs, draw)

    densities = (*DENSITIES, 0.014, 0.01, 0.007, 0.005, 0.003)
    return exact(reference.ffn, draw_inputs, dtype, densities, activation="relu", **dropout)


@pytest.mark.usefixtures("poisoned_memory")
@GATED
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(
    ("size", "facts"),
    [
        ((33_000, 512, 256), {}),
        ((1061, 520, 1032), {}),
        ((1061, 520, 1032), {"sms": 3}),
        ((2000, 64, 520), {"sms": 1}),
        ((129, 512, 8), {}),
        ((1061, 520, 1032), {"backend": "generic"}),
        ((777, 101, 333), {}),
        ((33_000, 512, 256), {"torch_multiplies": True}),
        ((1061, 616, 1032), {"torch_multiplies": True}),
        ((777, 101, 333), {"torch_multiplies": True}),
    ],
    ids=str,
)
def test_exact_integers_again_and_again(
    size: tuple[int, int, int], facts: dict[str, Any], dtype: torch.dtype, gated: bool
) -> None:
    """Programs with many tiles, an odd number of them, and one; rings that do not start anew with a tile."""
    inputs, dy, expected = long_exact_ffn(size, dtype, gated)
    assert all(value is None or bool(value.any()) for value in expected.values())
    with on_path("epilogue", **facts) as options:
        for _ in range(20):
            assert_equal(results(functional.ffn, inputs, dy, activation="relu", **options), expected)


def with_transposed_weights(inputs: Tensors) -> Tensors:
    """The same numbers, the weights laid out as those of a GPT-2 are."""
    return {
        name: tensor.T.contiguous().T if tensor is not None and name.startswith("w_") else tensor
        for name, tensor in inputs.items()
    }


@pytest.mark.usefixtures("poisoned_memory")
@on_hopper
@GATED
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(("size", "facts"), [*TILED, ((2000, 64, 520), {"sms": 1})], ids=str)
def test_exact_integers_of_transposed_weights(
    size: tuple[int, int, int], facts: dict[str, Any], dtype: torch.dtype, gated: bool, launched: list[str]
) -> None:
    inputs, dy, expected = long_exact_ffn(size, dtype, gated)
    transposed = with_transposed_weights(inputs)
    with on_path("epilogue", **facts) as options:
        for _ in range(20):
            assert_equal(results(functional.ffn, transposed, dy, activation="relu", **options), expected)
    assert launched == BOTH * 20


@on_hopper
@GATED
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_transposed_weights_are_close_to_torch(dropout_p: float, gated: bool, launched: list[str]) -> None:
    inputs = with_transposed_weights(ffn_inputs(4097, 768, 3072, 768, BFLOAT16, gated=gated, residual=True))
    seed = {"manual_seed": 7} if dropout_p else {}
    with on_path("epilogue") as options:
        assert_ffn_close(functional.ffn, inputs, options=options, activation="gelu", dropout_p=dropout_p, **seed)
    assert launched == BOTH


@pytest.mark.usefixtures("poisoned_memory")
@GATED
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(
    ("size", "facts"), [*TILED, ((1061, 520, 1032), {"backend": "generic"}), ((777, 101, 333), {})], ids=str
)
def test_exact_integers_with_dropout(
    size: tuple[int, int, int], facts: dict[str, Any], dtype: torch.dtype, gated: bool
) -> None:
    """Half of all hidden elements are dropped and the rest doubled, so that a wrong element of a mask is a difference.

    The integers are those of torch with the same seed: the mask is the same on all paths, and replayed.
    """
    seed = draw_seed(DEVICE)
    inputs, dy, expected = long_exact_ffn(size, dtype, gated, dropout_p=0.5, seed=seed)
    assert all(value is None or bool(value.any()) for value in expected.values())
    arithmetic = {"activation": "relu", "dropout_p": 0.5, "dropout_seed": seed}
    with on_path("epilogue", **facts) as options:
        for _ in range(10):
            assert_equal(results(functional.ffn, inputs, dy, **arithmetic, **options), expected)


@on_hopper
def test_each_element_is_kept_or_dropped_as_the_mask_says(launched: list[str]) -> None:
    """Rows and columns that fill no tile: y is the mask of the hidden itself, and so is dx."""
    rows, width = 1000, 520
    seed, identity = draw_seed(DEVICE), torch.eye(width, device=DEVICE, dtype=BFLOAT16)
    x = torch.ones(rows, width, device=DEVICE, dtype=BFLOAT16, requires_grad=True)
    with on_path("epilogue") as options:
        y = functional.ffn(x, identity, identity, activation="identity", dropout_p=0.5, dropout_seed=seed, **options)
        [dx] = torch.autograd.grad(y.sum(), x)
    mask = keep_mask(seed.cpu(), 0, rows, width, 0.5, BFLOAT16) * 2
    assert torch.equal(y.cpu(), mask)
    assert torch.equal(dx.cpu(), mask)
    assert launched == BOTH, "the gradient of a sum, expanded from one number, is copied"


@on_hopper
@pytest.mark.parametrize(("width", "columns", "sm90"), [(512, 256, 2), (512, 128, 4), (520, 264, 1)])
def test_chunks_have_the_mask_of_the_whole_hidden(
    launched: list[str], monkeypatch: pytest.MonkeyPatch, width: int, columns: int, sm90: int
) -> None:
    """The same of three chunks of rows forward, and groups of hidden units backward.

    A group that begins within a block of draws is left to the generic kernels.
    """
    rows = 1000
    seed, identity = draw_seed(DEVICE), torch.eye(width, device=DEVICE, dtype=BFLOAT16)
    x = torch.ones(rows, width, device=DEVICE, dtype=BFLOAT16, requires_grad=True)
    arithmetic = {"activation": "identity", "dropout_p": 0.5, "dropout_seed": seed}
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    monkeypatch.setattr(dispatch, "_cached_plan", planning.plan)
    monkeypatch.setattr(operation, "CALLS", Recalled())
    cut(monkeypatch, 384, columns)
    y = functional.ffn(x, identity, identity, recompute=True, **arithmetic)
    [dx] = torch.autograd.grad(y.sum(), x)
    mask = keep_mask(seed.cpu(), 0, rows, width, 0.5, BFLOAT16) * 2
    assert torch.equal(y.cpu(), mask)
    assert torch.equal(dx.cpu(), mask)
    assert launched == BOTH[:1] * 3 + BOTH[1:] * sm90


@pytest.mark.usefixtures("poisoned_memory")
@GATED
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("size", [(33_000, 512, 256), (4097, 768, 3072)], ids=str)
@pytest.mark.parametrize("torch_multiplies", [False, True], ids=["one kernel", "torch multiplies"])
def test_the_same_bits_every_time(
    torch_multiplies: bool, size: tuple[int, int, int], dropout_p: float, gated: bool
) -> None:
    tokens, d_model, d_ff = size
    inputs = ffn_inputs(tokens, d_model, d_ff, d_model, BFLOAT16, gated=gated, residual=True)
    dy = like_result(inputs)
    arithmetic = {"activation": "gelu", "dropout_p": dropout_p, "dropout_seed": draw_seed(DEVICE)}
    with on_path("epilogue", torch_multiplies=torch_multiplies) as options:
        runs = [results(functional.ffn, inputs, dy, **arithmetic, **options) for _ in range(10)]
    for found in runs:
        assert all(tensor is None or bool(tensor.isfinite().all()) for tensor in found.values())
        assert_equal(found, runs[0])


# Whether TMA takes them; the generic kernels take the rest.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "columns from the middle on": (lambda t: torch.nn.functional.pad(t, (8, 8), value=NAN)[..., 8:-8], True),
    "every other row": (lambda t: torch.stack((t, torch.full_like(t, NAN)), 1).flatten(0, 1)[::2], True),
    "one column further": (lambda t: torch.nn.functional.pad(t, (1, 7), value=NAN)[..., 1:-7], False),
    "odd rows": (lambda t: torch.nn.functional.pad(t, (0, 1), value=NAN)[..., :-1], False),
    "transposed": (lambda t: t.T.contiguous().T, False),
}
# The sm90 kernel that reads an operand as it is; dy is copied for it. Both weights of one may be transposed.
READER = {"x": BOTH[0], "w_up": BOTH[0], "w_gate": BOTH[0], "w_down": BOTH[1], "dy": None}


@on_hopper
@pytest.mark.parametrize("role", READER)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, role: str, launched: list[str]) -> None:
    """What one kernel cannot take runs in its generic twin, with the same result."""
    lay, taken = LAYOUTS[layout]
    taken = taken or (layout, role) == ("transposed", "w_down")
    inputs, dy, expected = exact_ffn(300, 136, 264, 136, BFLOAT16, gated=True, activation="relu")
    strided: Tensors = {**inputs, role: lay(inputs[role])} if role != "dy" else inputs
    with on_path("epilogue") as options:
        found = results(functional.ffn, strided, lay(dy) if role == "dy" else dy, activation="relu", **options)
    assert_equal(found, expected)
    assert launched == [name for name in BOTH if taken or name != READER[role]]


@on_hopper
def test_a_bias_with_gaps_and_hidden_units_that_fill_no_16_bytes(launched: list[str]) -> None:
    inputs, dy, expected = exact_ffn(300, 136, 264, 136, BFLOAT16, activation="relu")
    gaps = {**inputs, "b_up": torch.stack((inputs["b_up"], torch.full_like(inputs["b_up"], NAN)), 1)[:, 0]}
    with on_path("epilogue") as options:
        assert_equal(results(functional.ffn, gaps, dy, activation="relu", **options), expected)
        assert launched == [BOTH[1]]
        inputs, dy, expected = exact_ffn(300, 136, 260, 136, BFLOAT16, activation="relu")
        assert_equal(results(functional.ffn, inputs, dy, activation="relu", **options), expected)
    assert launched == [BOTH[1]]


@GATED
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("torch_multiplies", [False, True], ids=["one kernel", "torch multiplies"])
def test_a_cuda_graph_replays(torch_multiplies: bool, dropout_p: float, gated: bool) -> None:
    inputs = leaves(ffn_inputs(1000, 576, 1032, 576, BFLOAT16, gated=gated, residual=True))
    dy = like_result(inputs)
    wanted = [tensor for tensor in inputs.values() if tensor is not None]
    arithmetic = {"activation": "silu", "dropout_p": dropout_p, "dropout_seed": draw_seed(DEVICE)}

    with on_path("epilogue", torch_multiplies=torch_multiplies) as options:

        def step() -> tuple[Tensor, ...]:
            y = functional.ffn(**inputs, **arithmetic, **options)
            return (y.detach(), *torch.autograd.grad(y, wanted, dy))

        assert_replays_like_launched(step, [*wanted, dy], 20)


@GATED
def test_at_most_half_of_what_eager_keeps(gated: bool) -> None:
    """Memory in use between forward and backward pass, beside inputs and result: hidden-sized tensors alone."""
    inputs = leaves(ffn_inputs(8192, 512, 2048, 512, BFLOAT16, gated=gated))

    def kept(call: Callable[..., Tensor], **options: Any) -> int:
        before = torch.cuda.memory_allocated()
        y = call(**inputs, activation="silu" if gated else "gelu_tanh", **options)
        return torch.cuda.memory_allocated() - before - y.nbytes

    with on_path("epilogue") as options:
        kept(functional.ffn, **options)
        ours = kept(functional.ffn, **options)
    assert ours == (2 if gated else 1) * 8192 * 2048 * 2
    kept(reference.ffn)
    assert ours <= kept(reference.ffn) / 2
