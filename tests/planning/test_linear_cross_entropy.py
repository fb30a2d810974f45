"""How the loss head is planned: chunks, sums, bytes, and why a path is taken, all in integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import functional, planning
from fusedlayers.functional.linear_cross_entropy.arguments import loss_problem
from fusedlayers.kernels.tuning.cross_entropy import generic_shares, sm90_shares
from fusedlayers.planning import Device, plan
from fusedlayers.planning.linear_cross_entropy import LossPlan, LossProblem
from fusedlayers.planning.linear_cross_entropy_chunks import (
    COLUMN_STEP,
    SIZES,
    TOKEN_STEP,
    even_rows,
    rounds_first_chunk,
)
from tests.support.records import H200, where

MIB = 2**20
BOTH = {"needs_data_gradient": True, "needs_weight_gradient": True}


def training(M: int, K: int, V: int, dtype: str = "bfloat16", **facts: Any) -> LossProblem:
    return LossProblem(M, K, V, dtype, **{"reduction": "mean", **BOTH, **facts})


def peak(made: LossPlan) -> int:
    """The bytes that a training step takes at once beyond its operands: those of dx and dW, and temporary ones."""
    p = made.problem
    dx, dw = p.element_bytes * p.M * p.K, p.element_bytes * p.V * p.K
    kept = dx * (1 + made.wide_data_gradient) + dw * (1 + made.wide_sum)
    # While the last chunk is there; where the backward pass rounds what was added up in float32.
    return max(made.workspace_bytes + kept, kept + dx * made.wide_data_gradient + dw * made.wide_sum)


@pytest.mark.parametrize(
    ("sizes", "chunks", "wide_sum", "most"),
    [
        ((8192, 4096, 128256), 2, False, 2300),
        ((16384, 2048, 32000), 4, True, 570),
        ((16384, 768, 50257), 4, True, 670),
        ((65536, 2048, 128256), 16, True, 2600),
    ],
)
def test_chunks_of_published_sizes(sizes: tuple[int, int, int], chunks: int, wide_sum: bool, most: int) -> None:
    """A language model's last step stays within so many MiB."""
    made = plan(training(*sizes), H200, "triton")
    assert (made.path, made.chunks, made.wide_sum) == ("chunked", chunks, wide_sum)
    assert peak(made) <= most * MIB
    assert made.tiles.block == 2048


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("V", [100, 32_000, 50_257, 262_144])
@pytest.mark.parametrize("K", [64, 768, 8192])
@pytest.mark.parametrize("M", [1, 127, 129, 4096, 10_000, 2**20])
def test_chunks_are_even_and_within_their_bytes(M: int, K: int, V: int, dtype: str) -> None:
    for facts in ({}, {"needs_weight_gradient": False}, {"reduction": "none", "parted": True}):
        problem = training(M, K, V, dtype, **facts)
        made = plan(problem, H200, "triton")
        assert 1 <= made.rows <= M
        assert made.rows == M or made.rows % TOKEN_STEP == 0
        # No chunk is empty, and none is much smaller than the others, but for what is rounded twice.
        assert (made.chunks - 1) * made.rows < M
        assert (made.chunks - 1) * (made.rows - TOKEN_STEP) < M
        if not (made.chunks == 2 and rounds_first_chunk(problem)):
            assert made.chunks * (made.rows - TOKEN_STEP) < M
        row_bytes = problem.element_bytes * problem.padded_columns
        limit = SIZES.largest_chunk if problem.needs_weight_gradient else SIZES.chunk_without_weight_gradient
        assert made.rows * row_bytes <= max(limit, TOKEN_STEP * row_bytes)
        if problem.needs_weight_gradient and made.chunks > 1:
            # Many short chunks would add to the sum of dW again and again.
            assert (made.rows + TOKEN_STEP) * row_bytes * 2 > SIZES.smallest_chunk
        rounded = dtype == "float32" or made.chunks == 1 or (made.chunks == 2 and V * K >= 2**29)
        wide = problem.needs_weight_gradient and (problem.deferred or not rounded)
        assert made.wide_sum == wide


def test_even_rows() -> None:
    assert even_rows(100, 10**6) == 100
    assert even_rows(1000, 512) == 512
    assert even_rows(1100, 1023) == 640, "two chunks, not one of 896 and a rest"
    assert even_rows(1100, 1) == TOKEN_STEP, "never less than one step"


@pytest.mark.parametrize("limit", [64, 200, 700, 5000])
def test_the_users_bound_of_temporary_bytes(limit: int) -> None:
    """It holds as long as a step's logits and, for more than two chunks, the sum of dW fit."""
    for sizes in ((16384, 2048, 32000), (8192, 4096, 128256), (16384, 768, 50257)):
        for facts in ({}, {"needs_weight_gradient": False}):
            made = plan(training(*sizes, workspace_limit=limit * MIB, **facts), H200, "triton")
            p = made.problem
            sums = 4 * (p.V * p.K * made.wide_sum + p.M * p.K * made.wide_data_gradient)
            least = TOKEN_STEP * 2 * p.padded_columns + sums + p.pad_bytes
            assert made.workspace_bytes + sums <= max(limit * MIB, least)


@pytest.mark.parametrize(
    ("problem", "device", "words"),
    [
        (
            training(1024, 768, 50257),
            where(H200, training(1024, 768, 50257), {"chunked": 1.5}),
            "(measured: 1 ms), chunked",
        ),
        (training(8192, 768, 50257), where(H200, LossProblem(9, 8, 9, "bfloat16"), {"fused": 0.5}), "nothing like it"),
        (training(8192, 768, 50257, probabilities=True), H200, "takes classes as targets, not their probabilities"),
        (training(8192, 768, 50257), Device("cpu"), "the tensors are on device type cpu"),
    ],
)
def test_why_torch(problem: LossProblem, device: Device, words: str) -> None:
    made = plan(problem, device)
    assert made.path == "torch"
    assert words in made.why_torch(device)
    assert made.summary(device).startswith("Runs through torch: ")
    assert made.workspace_bytes == made.rows == made.chunks == 0


def test_costs() -> None:
    """Operations, and bytes that are kept: of tokens whose gradients wait, two or three numbers each."""
    product, given = 2 * 8192 * 768 * 50_000, (2 * 768 + 8) * 8192
    early, late = (plan(training(8192, 768, 50_000, reduction=kind), H200, "triton") for kind in ("sum", "none"))
    assert (early.flops, late.flops) == (3 * product, 4 * product)
    assert early.saved_bytes == given + 4 * (8192 * 768 + 50_000 * 768), "rounded in the backward pass"
    assert late.saved_bytes == given + 8 * 8192
    assert plan(replace(late.problem, entropy=True), H200, "triton").saved_bytes == given + 12 * 8192
    for made in (early, late):
        forward = plan(replace(made.problem, **dict.fromkeys(BOTH, False)), H200, "triton")
        assert (forward.path, forward.flops, forward.saved_bytes) == (made.path, product, 0)
    frozen = plan(replace(early.problem, needs_weight_gradient=False), H200, "triton")
    assert (frozen.flops, frozen.saved_bytes) == (2 * product, given + 4 * 8192 * 768)
    assert early.problem.kept_by_torch(H200) == given + 4 * 8192 * 50_000
    assert frozen.problem.kept_by_torch(H200) == 8 * 8192 + 4 * 8192 * 50_000


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("sizes", [(8192, 4096, 128_256), (16_384, 2048, 32_000), (16_384, 768, 50_257), (64, 64, 300)])
def test_recomputing(sizes: tuple[int, int, int], reduction: str, dtype: str) -> None:
    """The gradient of whole tiles of columns within 64 MiB, and a float32 sum of dx; two numbers kept of each token."""
    M, K, V = sizes
    made = plan(training(M, K, V, dtype, reduction=reduction, recompute=True), H200, "triton")
    p = made.problem
    assert (made.path, made.rows, made.chunks, made.tiles) == ("fused", 0, 0, None)
    assert made.logit_tiles is not None
    assert made.columns == p.padded_columns or made.columns % COLUMN_STEP == 0
    assert made.wide_sum == (dtype != "float32" and made.columns * K <= 2**21)
    # Of so many columns more these would be too many; and of a rest that is padded.
    part = made.columns * (p.element_bytes * M + 4 * K * made.wide_sum)
    assert (made.columns + COLUMN_STEP) * (p.element_bytes * M + 4 * K * made.wide_sum) > 64 * MIB or M == 64
    least = part + 4 * M * K * (dtype != "float32")
    assert least <= made.workspace_bytes <= 64 * MIB + 4 * M * K * (dtype != "float32")
    assert made.saved_bytes == p.element_bytes * M * K + (8 + 8) * M
    assert made.flops == 4 * 2 * M * K * V
    assert plan(replace(p, **dict.fromkeys(BOTH, False)), H200, "triton").columns == 0


def test_recomputing_within_the_users_bound() -> None:
    columns = {
        limit: plan(training(8192, 4096, 128_256, recompute=True, workspace_limit=limit * MIB), H200, "triton").columns
        for limit in (1, 128, 192, 256)
    }
    assert columns == {1: COLUMN_STEP, 128: COLUMN_STEP, 192: 4096, 256: 8192}
    frozen = training(8192, 4096, 128_256, recompute=True, workspace_limit=64 * MIB, needs_data_gradient=False)
    assert plan(frozen, H200, "triton").columns == 4096


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("limit", [0, 200])
def test_no_path_depends_on_whose_gradients_are_wanted(reduction: str, recompute: bool, dtype: str, limit: int) -> None:
    """Nor does a chunk, as torch may round a row otherwise among other rows; a frozen weight needs no large one."""
    needs = [dict(zip(BOTH, each, strict=True)) for each in itertools.product((False, True), repeat=2)]
    for M in (500, 1000, 2000, 4000, 10_000, 50_000):
        facts: dict[str, Any] = {"reduction": reduction, "recompute": recompute, "workspace_limit": limit * MIB}
        for trains in (False, True):
            chosen = [each for each in needs if trains or not each["needs_weight_gradient"]]
            plans = [
                plan(training(M, 768, 32_768, dtype, trains_weight=trains, **each, **facts), H200) for each in chosen
            ]
            assert len({(made.path, made.rows, made.logit_tiles, made.ranges) for made in plans}) == 1


def test_measured_times_of_training_decide_for_calls_without_gradients() -> None:
    problem = forward(4096, 768, 32_768, trains_weight=True)
    assert problem.decisive == replace(training(4096, 768, 32_768), trains_weight=True)
    for ratio, expected in ((1.5, "torch"), (0.5, "chunked")):
        device = where(H200, training(4096, 768, 32_768), {"chunked": ratio})
        found = [planning.plan(each, device, "auto").path for each in (problem, problem.decisive)]
        assert found == [expected, expected]


def forward(M: int, K: int, V: int, dtype: str = "bfloat16", **facts: Any) -> LossProblem:
    return LossProblem(M, K, V, dtype, **{"reduction": "mean", **facts})


@pytest.mark.parametrize("operation", ["linear_cross_entropy", "linear_log_probs"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_without_gradients_no_logits_are_written(dtype: str, operation: str) -> None:
    facts = {"recompute": True} if operation == "linear_cross_entropy" else {"reduction": "none"}
    problem = forward(8192, 768, 50257, dtype, operation=operation, **facts)
    made = plan(problem, H200, "triton")
    assert (made.path, made.rows, made.tiles) == ("fused", 0, None)
    assert (made.logit_tiles.sm90 is None) == (dtype == "float32")
    assert made.accuracy == ("exact" if dtype == "float32" else "half")
    assert plan(problem, replace(H200, backend="generic"), "triton").logit_tiles.sm90 is None
    # What was measured of 16 bits says nothing of others.
    faster = where(H200, replace(problem, dtype="bfloat16"), {"fused": 0.5})
    assert plan(problem, faster).path == ("torch" if dtype == "float32" else "fused")


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("sm90", [False, True])
@pytest.mark.parametrize("V", [1, 100, 32_000, 50_257, 262_144])
@pytest.mark.parametrize("M", [1, 128, 129, 8192, 10_000, 65_537, 2**20])
def test_partial_results_are_few(M: int, V: int, sm90: bool, entropy: bool) -> None:
    """Those of every row at least once; at most those of each program for each group of bands, and never 100 MiB."""
    device = replace(H200, backend="sm90" if sm90 else "generic")
    made = plan(forward(M, 768, V, entropy=entropy, reduction="none"), device, "triton")
    tiles = made.logit_tiles
    shares = generic_shares(tiles, M, V, made.ranges)
    if tiles.sm90 is not None:
        shares = sm90_shares(tiles.sm90, M, V)
        groups = -(-shares.bands // shares.group)
        assert shares.partials <= 128 * 132 * groups
    assert shares.partials >= M
    assert made.workspace_bytes == (12 if entropy else 8) * shares.partials + 4 * M
    if M <= 65_537:
        assert made.workspace_bytes <= 32 * MIB


def test_every_program_of_the_warp_specialised_kernel_has_work() -> None:
    """The published sizes: bands of tokens and their columns are shared out to 132 programs almost evenly."""
    for M, V in ((8192, 128_256), (16_384, 32_000), (16_384, 50_257)):
        tiles = plan(forward(M, 4096, V, reduction="none"), H200, "triton").logit_tiles
        assert tiles.sm90 is not None
        shares = sm90_shares(tiles.sm90, M, V)
        work = [0] * shares.programs
        for first in range(0, shares.bands, shares.group):
            height = min(shares.group, shares.bands - first)
            ranges = min(shares.programs // height, shares.tile_columns)
            for program in range(height * ranges):
                turned = program // height + first // shares.group * (ranges - shares.tile_columns % ranges)
                work[program] += len(range(turned % ranges, shares.tile_columns, ranges))
        assert sum(work) == shares.bands * shares.tile_columns
        assert max(work) <= 1.02 * sum(work) / 132, (M, V, max(work) * 132 / sum(work))


def given(M: int, K: int, V: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    leaf = {"device": "meta", "dtype": dtype, "requires_grad": True}
    target = torch.empty(M, dtype=torch.int64, device="meta")
    return {"input": torch.empty(M, K, **leaf), "linear_weight": torch.empty(V, K, **leaf), "target": target}


def explained(call: Callable[..., Any], sizes: tuple[int, int, int], **options: Any) -> tuple[str, dict[str, str]]:
    """The title and the rows of what ``explain`` says of a call on an H200."""
    text = fl.explain(call, **given(*sizes), on="H200", **options, details=True)
    _, title, *rows = text.split("\n")
    return title, {name: fact.strip() for name, fact in (row.strip().split("  ", 1) for row in rows)}


def test_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula with its options; how many logits, or columns of their gradient, are in memory at once."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    head = functional.linear_cross_entropy
    title, facts = explained(head, (16384, 2048, 32000), softcap=30.0, z_loss=1e-4)
    assert title == (
        "linear_cross_entropy: mean of cross_entropy(logits) + 0.0001 · logsumexp(logits)², "
        "logits = 30 tanh((input linear_weightᵀ) / 30)"
    )
    assert facts["chunks"] == "4 × 4,096 tokens, 262,144,000 bytes of logits at once"
    assert facts["sum of dW"] == "over chunks, inside the products, in float32, rounded once"
    assert facts["gradients"] == "in the forward pass"
    _, facts = explained(head, (8192, 4096, 128256), recompute=True)
    assert facts["logits"] == "none in memory"
    columns = "in the backward pass, 32 × 4,096 columns, 67,108,864 bytes of their gradient at once"
    assert facts["gradients"] == columns
    title, facts = explained(functional.linear_log_probs, (8192, 768, 50257), return_entropy=True, logit_scale=0.5)
    assert title == "linear_log_probs: log_softmax(logits)[target] and entropies, logits = 0.5 input linear_weightᵀ"
    with torch.no_grad():
        _, facts = explained(functional.linear_log_probs, (8192, 768, 50257))
    assert facts["tiles"] == "sm90: 128 tokens × 256 columns × 64 inner, consumers 2, stages 4"
    assert "sum of dW" not in facts


def test_a_problem_of_a_call() -> None:
    tensors = {"linear_bias": None, "weight": None} | given(6, 3, 5, torch.float32)
    tensors["input"] = tensors["input"].view(2, 3, 3)
    tensors["target"] = tensors["target"].view(2, 3)
    problem = loss_problem(**tensors, reduction="sum")
    assert (problem.M, problem.K, problem.V, problem.dtype, problem.reduction) == (6, 3, 5, "float32", "sum")
    assert (problem.needs_data_gradient, problem.needs_weight_gradient, problem.needs_bias_gradient) == (
        True,
        True,
        False,
    )
    assert problem.padded_columns == 64
