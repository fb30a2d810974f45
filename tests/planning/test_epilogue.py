"""When the planner takes the epilogue path, what it costs, and what ``explain`` says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fusedlayers as fl
from fusedlayers import functional, planning
from fusedlayers.kernels.tuning import EPILOGUE_PIPELINES, epilogue_tiles
from fusedlayers.planning import Device, Problem, plan
from fusedlayers.planning.lora_ffn import LoRAProblem
from tests.support.records import where

H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True)
SM90 = replace(H200, backend="sm90")
INFERENCE = Problem("ffn", batch=1, M=16_384, K=1024, N=4096, O=1024, dtype="bfloat16", activation="gelu_tanh")
TRAINING = replace(INFERENCE, needs_data_gradient=True, needs_weight_gradient=True, needs_bias_gradient=True)


def faster(problem: Problem) -> Device:
    """A device on which the path was measured, and is faster."""
    return where(SM90, problem, {"epilogue": 0.5})


@pytest.mark.parametrize(
    "change",
    [{}, {"gated": True}, {"dropout": True}, {"dtype": "float16"}, {"K": 1032, "O": 40}, {"M": 77}, {"captured": True}],
    ids=str,
)
def test_it_is_taken_where_it_was_measured_faster(change: dict[str, object]) -> None:
    for problem in (replace(INFERENCE, **change), replace(TRAINING, **change)):
        made = plan(problem, faster(problem))
        assert made.path == "epilogue"
        assert dict(made.rejected)["torch"].startswith("epilogue is expected to be ")
        assert plan(problem, where(SM90, problem, {"epilogue": 1.2})).path == "torch"
        # It keeps less than torch: a little more than as fast as torch is not needed.
        assert plan(problem, where(SM90, problem, {"epilogue": 0.97})).path == "epilogue"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"K": 516}, "only the warp-specialised kernels were measured; their widths are multiples of 8"),
        ({"N": 4097}, "only the warp-specialised kernels were measured; their widths are multiples of 8"),
        ({"generic": "w_up"}, "only the warp-specialised kernels were measured; they cannot copy w_up as it lies"),
        ({"recompute": True}, "recompute=True forbids keeping the hidden"),
    ],
    ids=str,
)
def test_who_is_left_to_others(change: dict[str, object], reason: str) -> None:
    """However fast it is."""
    made = plan(replace(TRAINING, **change), faster(TRAINING))
    assert made.path == ("chunked" if "recompute" in change else "torch")
    assert dict(made.rejected)["epilogue"].startswith(reason)
    # Chunks are computed by the same kernels.
    assert (made.epilogue is not None) == ("recompute" in change)


def multiplied_by_torch(problem: Problem) -> tuple[bool, bool]:
    """Whether torch computes the product of the hidden, and that of its gradient, on the epilogue path."""
    made = plan(problem, SM90, "triton")
    assert made.path == "epilogue", made.rejected
    epilogue = made.epilogue
    found = []
    for tiles, pipeline in (
        (epilogue.hidden_tiles, epilogue.hidden_pipeline), (epilogue.gradient.tiles, epilogue.gradient.pipeline),
    ):  # fmt: skip
        assert (tiles.block_inner == 0) == (pipeline is None)
        found.append(pipeline is None)
    return found[0], found[1]


@pytest.mark.parametrize("gated", [False, True])
def test_torch_multiplies_rows_that_start_anywhere(gated: bool) -> None:
    problem = replace(TRAINING, gated=gated, K=592, O=2032)
    assert multiplied_by_torch(replace(problem, O=1192)) == (False, False)
    assert multiplied_by_torch(replace(problem, O=1208)) == (False, True)
    assert multiplied_by_torch(problem) == (False, False)
    assert multiplied_by_torch(replace(problem, K=584)) == (False, False)
    assert multiplied_by_torch(replace(problem, K=600)) == (True, False)
    # Wide rows start within a line of the cache, too.
    assert multiplied_by_torch(replace(problem, K=1584, O=1808)) == (False, False)
    assert multiplied_by_torch(replace(problem, K=1616, O=1808)) == (True, False)
    assert multiplied_by_torch(replace(problem, K=1856, O=1808)) == (False, False)


def test_torch_multiplies_for_few_tiles() -> None:
    # Of 132 SMs two in five have one of 128 × 128: six rows of eight tiles, and half of one.
    problem = replace(TRAINING, N=1024, captured=True)
    assert multiplied_by_torch(replace(problem, M=6 * 128)) == (False, True)
    assert multiplied_by_torch(replace(problem, M=6 * 128 + 1)) == (False, False)
    # All have three: 49 rows, and half of one.
    problem = replace(TRAINING, N=1024, O=1536, captured=True)
    assert multiplied_by_torch(replace(problem, M=49 * 128)) == (False, True)
    assert multiplied_by_torch(replace(problem, M=49 * 128 + 1)) == (False, False)
    assert multiplied_by_torch(replace(problem, M=49 * 128, O=1520)) == (False, False)


def test_torch_multiplies_for_few_hidden_units_over_wide_rows() -> None:
    few = replace(TRAINING, M=65_536, K=1024, O=1024, N=512)
    assert multiplied_by_torch(few) == (True, False)
    for change in ({"N": 520}, {"gated": True}, {"K": 880, "N": 440}):
        assert multiplied_by_torch(replace(few, **change)) == (False, False), change


def test_adapters_have_their_products_within_one_kernel() -> None:
    wanted = {"needs_data_gradient": True, "needs_adapter_gradient": True}
    problem = LoRAProblem("lora_ffn", 1, 16_384, 1024, 4096, 1024, "bfloat16", rank_up=8, **wanted)
    for width in (1024, 1592, 1608):
        made = planning.plan(replace(problem, K=width), SM90, "triton")
        assert made.path == "epilogue"
        assert made.epilogue.hidden_pipeline is not None, width
    assert planning.plan(problem, where(SM90, problem, {"epilogue": 0.5})).path == "epilogue"
    assert planning.plan(problem, where(SM90, problem, {"epilogue": 1.5})).path == "torch"


def test_the_fused_kernels_come_first_where_both_can() -> None:
    narrow = replace(TRAINING, K=128, O=128)
    made = plan(narrow, SM90, "triton")
    assert made.path == "fused"
    assert dict(made.rejected)["epilogue"] == "the fused path comes first"
    # Of paths that take about as long the one that keeps less, of others the faster one.
    for ratio, path in ((0.49, "fused"), (0.4, "epilogue")):
        assert plan(narrow, where(SM90, narrow, {"fused": 0.5, "epilogue": ratio})).path == path


def test_what_cannot_run_is_named_for_the_error() -> None:
    assert plan(TRAINING, SM90).unsupported is None
    for change in ({"dropout": True}, {"recompute": True}, {"dropout": True, "recompute": True}):
        assert plan(replace(TRAINING, **change), SM90).unsupported is None
    # What is not measured still runs for whoever must have kernels.
    assert plan(replace(TRAINING, generic="w_up"), SM90, "triton").path == "epilogue"
    assert plan(TRAINING, replace(SM90, triton=False)).unsupported == "Triton is not installed"


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("change", [{}, {"K": 264, "O": 264}, {"K": 516}, {"O": 273}, {"generic": "w_up"}], ids=str)
def test_kernels_compute_chunks_of_every_width(change: dict[str, object], gated: bool) -> None:
    """Generic ones, too, which take a third of the time of torch's operations in chunks or less."""
    problem = replace(TRAINING, recompute=True, gated=gated, **change)
    made = plan(problem, SM90)
    assert made.path == "chunked"
    assert made.epilogue is not None
    assert plan(replace(problem, dtype="float32"), SM90).epilogue is None


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("recompute", ["auto", True])
def test_dropout_changes_the_generic_tiles_alone(recompute: bool | str, dtype: str, gated: bool) -> None:
    """Where the kernels compute chunks, too."""
    problem = replace(TRAINING, dtype=dtype, gated=gated, recompute=recompute)
    made, dropped = (plan(replace(problem, dropout=dropout), SM90, "triton") for dropout in (False, True))
    assert made.path == dropped.path == ("chunked" if recompute is True else "epilogue")
    bits = 16 if dtype == "bfloat16" else 32
    assert made.epilogue.hidden_tiles == epilogue_tiles("sm_90", bits, gated)
    assert dropped.epilogue.hidden_tiles == epilogue_tiles("sm_90", bits, gated, dropout=True)
    assert dropped.epilogue.gradient.tiles == dropped.epilogue.hidden_tiles
    assert dropped.epilogue.hidden_pipeline == made.epilogue.hidden_pipeline
    assert (dropped.saved_bytes, dropped.backward_units) == (made.saved_bytes, made.backward_units)
    assert dropped.chunks == made.chunks


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_tiles_and_costs(gated: bool) -> None:
    parts, hidden = (2 if gated else 1), 2 * 16_384 * 4096
    made = plan(replace(TRAINING, gated=gated), replace(SM90, sms=99), "triton")
    epilogue = made.epilogue
    assert epilogue.hidden_tiles == epilogue.gradient.tiles == epilogue_tiles("sm_90", 16, gated)
    # The cache holds the weights of K × N = 2^22, but not those of two projections.
    assert epilogue.hidden_pipeline == replace(
        EPILOGUE_PIPELINES["hidden", gated], programs=99, group=8 if gated else 2
    )
    pipeline = replace(EPILOGUE_PIPELINES["hidden_gradient", gated], programs=99, stays=not gated)
    assert epilogue.gradient.pipeline == pipeline
    assert made.accuracy == "coarse"
    assert made.saved_bytes == parts * hidden + 2 * 16_384 * 1024
    # The hidden, and float32 sums: of every 64 rows with a gate, without one of both consumers of the three programs in
    # a column. Gradients of the pre-activations have places of their own side by side, or in a graph that is compiled.
    sums = 4 * (256 if gated else 2 * 3) * parts * 4096
    assert made.workspace_bytes == hidden * (3 if gated else 1) + sums
    shorter = replace(TRAINING, gated=gated, M=8192)
    wide = plan(shorter, replace(SM90, sms=99), "triton")
    compiled = plan(replace(shorter, compiled=True), replace(SM90, sms=99), "triton")
    assert compiled.workspace_bytes - wide.workspace_bytes == parts * hidden // 2
    assert (made.forward_units, made.backward_units) == ((3, 6) if gated else (2, 4))
    assert (made.splits, made.chunks, made.forward_tiles, made.stored) == (1, None, None, None)
    alone = plan(replace(INFERENCE, gated=gated), SM90, "triton")
    assert (alone.path, alone.saved_bytes, alone.workspace_bytes) == ("epilogue", 0, hidden)
    assert alone.epilogue.gradient is None


def explained(w_down: str = "", gradient: bool = True, **options: object) -> dict[str, str]:
    """The rows of what ``explain`` says of a wide FFN, by their names."""
    shapes = ((16_384, 1024), (4096, 1024), (1024, 4096))
    tensors = [torch.empty(s, device="meta", dtype=torch.bfloat16, requires_grad=gradient) for s in shapes]
    if w_down == "tied":
        tensors[2] = tensors[1].T
    if w_down == "with gaps":
        tensors[2] = torch.empty(1024, 8192, device="meta", dtype=torch.bfloat16)[:, ::2]
    text = fl.explain(functional.ffn, *tensors, activation="gelu_tanh", on="H200", **options, details=True)
    return {line[2:].split("  ")[0]: line[2:].split("  ", 1)[1].strip() for line in text.splitlines()[2:]}


def test_explained_lines() -> None:
    found = explained()
    tiles = "sm90: 128 × 128 of the product, 64 inner, consumers 2 in turn, stages 5"
    assert found["path"].startswith("epilogue: activations and bias gradients are computed with the products")
    assert found["hidden tiles"] == tiles
    assert found["hidden-gradient tiles"] == f"{tiles}, each program in one column of them"
    assert found["saved bytes"] == f"{2 * 16_384 * (1024 + 4096):,} for the backward pass"
    assert {name for name in found if name.startswith("not ")} == {"not fused", "not torch"}
    assert explained(dropout_p=0.1)["path"].startswith("epilogue: ")
    assert explained(w_down="tied")["path"].startswith("epilogue: ")
    assert explained(w_down="with gaps")["not epilogue"].endswith("they cannot copy w_down as it lies")
    assert explained(recompute=True)["not epilogue"] == "recompute=True forbids keeping the hidden"
    assert "hidden-gradient tiles" not in explained(gradient=False)
    generic = plan(TRAINING, H200, "triton").epilogue
    tiles = "128 × 128 of the product, 64 inner, 8 warps, 3 stages"
    assert list(generic.facts())[:2] == [("hidden tiles", tiles), ("hidden-gradient tiles", tiles)]
