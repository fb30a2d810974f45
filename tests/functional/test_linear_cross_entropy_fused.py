"""The loss head without gradients: tiles of logits are reduced as they are computed, and none is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.devices import assumed
from fusedlayers.functional.dispatch import decisions
from fusedlayers.kernels import cross_entropy as kernels
from fusedlayers.kernels.cross_entropy import statistics
from fusedlayers.kernels.launching import ceil_div, launch
from fusedlayers.kernels.tuning.cross_entropy import LogitPipeline, sm90_shares
from tests.support.allocations import AllocatedBytes
from tests.support.loss_operands import (
    FLOATING,
    IGNORED,
    assert_loss_close,
    loss_inputs,
    on_path,
    results,
)
from tests.support.operands import DEVICE, DTYPES, ON_GPU, Tensors, infinities, needs_kernels

pytestmark = [
    infinities,
    needs_kernels,
    # The interpreter's maximum of a row of NaN.
    pytest.mark.filterwarnings("ignore:All-NaN (slice|axis) encountered:RuntimeWarning"),
]


def assert_close(*given: Tensors, **options: Any) -> None:
    assert_loss_close(*given, path="fused", frozen=FLOATING, rows=None, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("V", [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_edges_of_tiles(V: int, tokens: int) -> None:
    """Targets in the first and in the last column of tiles, and in a last tile of one column."""
    inputs = loss_inputs((tokens,), 16, V, bias=True, ignored=0)
    target = inputs["target"]
    edges = [edge for edge in (0, 63, 64, 127, 128, V - 1) if edge < V]
    target[: len(edges)] = torch.tensor(edges, device=DEVICE)[:tokens]
    assert_close(inputs, reduction="none", label_smoothing=0.1)


@pytest.mark.sampled
@pytest.mark.parametrize("sms", [1, 3, 132])
@pytest.mark.parametrize("K", [1, 15, 32, 33, 100])
def test_ranges_of_columns_and_steps_of_the_inner_axis(sms: int, K: int) -> None:
    """As many programs share a row as there are SMs for."""
    with assumed(sms=sms):
        assert_close(loss_inputs((70,), K, 600, peak=3.0), reduction="none")
        assert_close(loss_inputs((70,), K, 600), name="linear_log_probs", return_entropy=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_integers(dtype: torch.dtype) -> None:
    """The largest logit, how often it occurs, and the target's logit are exact."""
    for seed in range(5):
        torch.manual_seed(seed)
        input = torch.randint(-2, 3, (70, 40), device=DEVICE).to(dtype)
        weight = torch.randint(-2, 3, (300, 40), device=DEVICE).to(dtype)
        target = torch.randint(300, (70,), device=DEVICE)
        logits = 1024 * (input.double() @ weight.double().T)
        top = logits.amax(1)
        count = (logits == top[:, None]).sum(1)
        with on_path("fused"):
            found = functional.linear_log_probs(input, weight, target, logit_scale=1024.0)
        expected = logits.gather(1, target[:, None])[:, 0] - top - count.log()
        assert torch.equal(found, expected.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "V", "sms"), [(70, 600, 132), (130, 257, 3), (5, 1, 1)])
def test_the_likeliest_class(dtype: torch.dtype, M: int, V: int, sms: int) -> None:
    """The first of equal logits, of tokens that are ignored, too; all other results have the same bits without it."""
    input = torch.randint(-2, 3, (M, 24), device=DEVICE).to(dtype)
    weight = torch.randint(-2, 3, (V, 24), device=DEVICE).to(dtype)
    target = torch.randint(V, (M,), device=DEVICE)
    target[1] = IGNORED
    with on_path("fused"), assumed(sms=sms):
        *both, found = functional.linear_log_probs(input, weight, target, return_entropy=True, return_argmax=True)
        alone, again = functional.linear_log_probs(input, weight, target, return_argmax=True)
        expected = functional.linear_log_probs(input, weight, target, return_entropy=True)
    # Of equal values torch.argmax gives any on a GPU.
    truth = (input.double() @ weight.double().T).cpu().argmax(1)
    assert torch.equal(found.cpu(), truth)
    assert torch.equal(found, again)
    assert all(torch.equal(*pair) for pair in zip((*both, alone), (*expected, expected[0]), strict=True))


def test_the_likeliest_class_has_no_gradient() -> None:
    inputs = loss_inputs((2, 9), 24, 70, bias=True)

    def without_classes(**given: Any) -> Any:
        *both, found = functional.linear_log_probs(**given, return_entropy=True, return_argmax=True)
        assert found.dtype is torch.int64
        assert found.shape == (2, 9)
        assert not found.requires_grad
        return tuple(both)

    with on_path("fused"):
        ours = results(without_classes, inputs)
        expected = results(functional.linear_log_probs, inputs, return_entropy=True)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


ROWS = {
    "-inf": [0.5, -torch.inf, 2.0, -torch.inf],
    "all -inf": [-torch.inf] * 4,
    "+inf": [0.5, torch.inf, 2.0, 1.0],
    "both": [torch.inf, -torch.inf, torch.inf, 1.0],
    "NaN": [0.5, torch.nan, 2.0, 1.0],
    "large": [3e38, -3e38, 1.0, 3e38],
}


@pytest.mark.parametrize("row", [*ROWS.values(), [0.5, torch.inf, torch.nan, 2.0]], ids=[*ROWS, "NaN after inf"])
@pytest.mark.parametrize("around", [0.0, -torch.inf])
def test_the_likeliest_of_special_values(row: list[float], around: float) -> None:
    """NaN wins, and -inf where there is nothing else, wherever in a tile the four columns are."""
    for place in (0, 62, 254, 596):
        bias = torch.full((600,), around, device=DEVICE)
        bias[place : place + 4] = torch.tensor(row)
        input, weight = torch.zeros(3, 16, device=DEVICE), torch.zeros(600, 16, device=DEVICE)
        target = torch.zeros(3, dtype=torch.int64, device=DEVICE)
        with on_path("fused"), assumed(sms=132):
            _, found = functional.linear_log_probs(input, weight, target, linear_bias=bias, return_argmax=True)
        assert found.tolist() == [int(bias.cpu().argmax())] * 3, place


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.25}, {"weight": 1}, {"z_loss": 0.5}], ids=str)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("place", [0, 62, 254])
def test_special_values(row: list[float], options: dict[str, Any], place: int) -> None:
    """Losses and entropies are infinite or NaN where torch's are, wherever in a tile the four columns are."""
    V = 258
    target = torch.tensor([*range(place, place + 4), IGNORED, (place + 50) % V], device=DEVICE)
    bias = torch.zeros(V, device=DEVICE)
    bias[place : place + 4] = torch.tensor(row)
    inputs = {"input": torch.zeros(6, 16), "linear_weight": torch.zeros(V, 16)}
    inputs = {name: tensor.to(DEVICE) for name, tensor in inputs.items()} | {"linear_bias": bias, "target": target}
    if "weight" in options:
        options = {"weight": torch.rand(V).to(DEVICE) + 0.5}
    elif not options and max(row) != 3e38:  # products of a large logit overflow in torch's entropy
        with on_path("fused"):
            ours = results(functional.linear_log_probs, inputs, FLOATING, return_entropy=True)
        theirs = results(reference.linear_log_probs, inputs, FLOATING, return_entropy=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
    with on_path("fused"):
        ours = results(functional.linear_cross_entropy, inputs, FLOATING, reduction="none", **options)
    theirs = results(reference.linear_cross_entropy, inputs, FLOATING, reduction="none", **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.skipif(ON_GPU, reason="what the CPU's allocator hands out")
def test_no_tensor_is_as_large_as_a_few_rows_of_logits() -> None:
    # Rows of an odd number of classes: torch's products read a padded copy of the weight, this path does not.
    tokens, K, V = 64, 16, 4001
    inputs = {name: each for name, each in loss_inputs((tokens,), K, V).items() if each is not None}
    with on_path("fused"), AllocatedBytes() as allocated, decisions() as paths:
        functional.linear_cross_entropy(**inputs)
        functional.linear_log_probs(**inputs, return_entropy=True)
    assert dict(paths) == {"linear_cross_entropy fused": 1, "linear_log_probs fused": 1}
    # The interpreter copies the tiles that a kernel works on.
    assert max(allocated.blocks) <= 4 * V * 5


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probs"])
def test_compiled(name: str) -> None:
    function = getattr(functional, name)
    more = {"return_entropy": True, "return_argmax": True}
    options = more if name == "linear_log_probs" else {"reduction": "none"}
    with on_path("fused"), torch.no_grad():
        compiled = torch.compile(
            lambda **given: function(**given, **options), backend="aot_eager", fullgraph=True, dynamic=True
        )
        for tokens in (9, 17, 33):
            inputs = loss_inputs((tokens,), 24, 70, bias=True)
            with decisions() as paths:
                ours = compiled(**inputs)
            assert set(paths) <= {f"{name} fused"}
            torch.testing.assert_close(ours, function(**inputs, **options))


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize(("programs", "group"), [(7, 3), (12, 12), (132, 12), (5, 5)])
@pytest.mark.parametrize(("M", "V"), [(1, 300), (128, 2000), (700, 600), (1300, 3000)])
@pytest.mark.parametrize("entropy", [False, True])
def test_partial_results_of_groups_of_bands(M: int, V: int, programs: int, group: int, entropy: bool) -> None:
    """What the warp-specialised kernel leaves behind is combined: here torch makes it, in the kernel's order."""
    pipeline = LogitPipeline(programs=programs, group=group)
    shares = sm90_shares(pipeline, M, V)
    logits = torch.randn(M, V, device=DEVICE) * 4
    target = torch.randint(V, (M,), device=DEVICE)
    partials = torch.full((3, shares.partials), torch.nan, device=DEVICE)
    indices = torch.full((shares.partials,), -1, dtype=torch.int32, device=DEVICE)
    place = 0
    for first in range(0, shares.bands, shares.group):
        height = min(shares.group, shares.bands - first)
        ranges = min(shares.programs // height, shares.tile_columns)
        for band in range(first, first + height):
            rows = logits[band * shares.rows : (band + 1) * shares.rows]
            for own in range(ranges):
                tiles = range(own, shares.tile_columns, ranges)
                parts = torch.cat([rows[:, 256 * tile : 256 * tile + 256] for tile in tiles], 1)
                columns = torch.cat([torch.arange(256 * t, min(256 * t + 256, V), device=DEVICE) for t in tiles])
                top, index = parts.max(1)
                distance = parts - top[:, None]
                found = top, distance.exp().sum(1), (distance.exp() * distance).sum(1)
                partials[:, place : place + len(rows)] = torch.stack(found)
                indices[place : place + len(rows)] = columns[index].to(torch.int32)
                place += shares.rows
    assert place == shares.partials
    chosen = logits.gather(1, target[:, None])[:, 0].contiguous()
    loss, entropies = torch.empty(2, M, device=DEVICE)
    stats, argmax = torch.empty(2, M, device=DEVICE), torch.empty(M, dtype=torch.int64, device=DEVICE)
    launch(
        statistics._combined_losses_kernel,
        ceil_div(M, 32),
        (*partials[:2], partials[2] if entropy else None, None, indices, chosen, target, None, None, loss,
         entropies if entropy else None, stats, argmax),
        (V,),
        (M, *shares[1:], (IGNORED, 0.0, 0.0)),
        (shares.rows, "exact"),
    )  # fmt: skip
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, reduction="none"), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats[0] + stats[1].log(), logits.logsumexp(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(argmax, logits.argmax(1))
    if entropy:
        expected = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(entropies, expected, rtol=1e-4, atol=1e-5)


def test_what_a_backward_pass_needs_is_left_behind() -> None:
    """The largest value and the sum relative to it."""
    M, K, V = 40, 24, 200
    input, weight = torch.randn(M, K, device=DEVICE), torch.randn(V, K, device=DEVICE)
    target = torch.randint(V, (M,), device=DEVICE)
    tiles = statistics.LogitTiles(32, 32, 16, 4, 1)
    loss, found = torch.empty(M, device=DEVICE), torch.empty(2, M, device=DEVICE)
    arithmetic = kernels.LossArithmetic(IGNORED, "exact")
    kernels.losses_of_product(
        input, weight, None, target, None, None, arithmetic, "ieee", tiles, 3, loss=loss, statistics=found
    )
    logits = input @ weight.T
    torch.testing.assert_close(found[0], logits.amax(1))
    torch.testing.assert_close(found[1], (logits - logits.amax(1, keepdim=True)).exp().sum(1))


@pytest.mark.bits
def test_the_same_tensor_every_time() -> None:
    inputs = {name: each for name, each in loss_inputs((70,), 24, 600).items() if each is not None}
    with on_path("fused"), assumed(sms=132):
        first: Tensor = functional.linear_cross_entropy(**inputs)
        assert all(torch.equal(first, functional.linear_cross_entropy(**inputs)) for _ in range(3))
