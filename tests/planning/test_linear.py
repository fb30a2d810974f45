"""Which path the products of a linear layer take, with which tiles and how many splits: integers in, integers out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusedlayers.kernels.tuning import SHARED_MEMORY, SplitTiles, reduce_blocks, split_tiles, starts_early
from fusedlayers.kernels.tuning.split_k import TABLE
from fusedlayers.planning import Device, LinearPlan, LinearProblem, plan
from fusedlayers.planning.devices import PARTIALS_LIMIT
from fusedlayers.planning.linear import DATA_GRADIENT, FORWARD, Product, choose_splits, filled_splits
from fusedlayers.planning.record import Record
from tests.support import records
from tests.support.records import A100, CPU, H200, where

FASTER = {"fused": 0.5}
SKINNY = LinearProblem(M=64, N=64, K=65_536, dtype="bfloat16", captured=True)


def problem(M: int, N: int, K: int, **facts: object) -> LinearProblem:
    return replace(SKINNY, M=M, N=N, K=K, **facts)


def why(made: LinearPlan) -> str:
    assert made.path == "torch"
    assert (made.forward.tiles, made.workspace_bytes) == (None, 0)
    return dict(made.rejected)["fused"]


PUBLISHED = [
    (64, 64, 65_536), (16, 16, 1_048_576), (128, 128, 262_144), (16, 1024, 4096), (16, 4096, 14_336), (64, 4096, 4096),
    (64, 1024, 8192), (11, 303, 190_696), (11, 303, 190_699), (5, 41, 44_392), (33, 2304, 7168), (33, 2304, 7104),
]  # fmt: skip


@pytest.mark.parametrize("sizes", PUBLISHED, ids=str)
def test_published_sizes_fill_the_device(sizes: tuple[int, int, int]) -> None:
    """Tiles and splits are about one wave of programs, or two where rows are not aligned or one would be half empty."""
    M, N, _ = sizes
    made = plan(problem(*sizes), H200, "triton")
    tiles, splits = made.forward.tiles, made.forward.splits
    programs = math.ceil(M / tiles.block_m) * math.ceil(N / tiles.block_n) * splits
    waves = math.ceil(programs / H200.sms)
    assert programs / (waves * H200.sms) > 0.8
    assert waves <= 2
    assert made.workspace_bytes == (4 * splits * M * N if splits > 1 else 0)
    assert made.dependent


@pytest.mark.parametrize("asked", [{"split_k": 3}, {"atomic": True}], ids=str)
def test_a_wish_for_kernels_is_no_question_of_speed(asked: dict[str, object]) -> None:
    large = problem(4096, 4096, 4096, captured=False, **asked)
    for device in (H200, A100):
        made = plan(large, device)
        assert made.path == "fused"
        assert made.dependent == (device is H200)
    assert why(plan(large, H200, "torch")) == "the backend is set to torch"


def test_each_product_has_its_own_plan() -> None:
    training = problem(8, 2400, 2048, needs_data_gradient=True, needs_weight_gradient=True, needs_bias_gradient=True)
    device = where(H200, training, {"fused": 0.5})
    made = plan(training, device)
    assert made.path == "fused"
    assert made.forward.tiles is not None
    assert made.saved_bytes == 2 * (8 * 2048 + 2400 * 2048)
    # What was measured of the whole layer says nothing of its gradients.
    assert made.data_gradient.tiles is None
    assert made.weight_gradient.path == "torch"
    rejected = dict(made.rejected)
    assert rejected["kernels for the data gradient"] == "torch reads W across its rows as fast"
    assert "nothing like it was measured" in rejected["kernels for the weight gradient"]
    both = replace(
        device, override=Record([*records.rows(training, FASTER), *records.rows(training.weight_gradient, FASTER)])
    )
    assert plan(training, both).weight_gradient.path == "fused"  # type: ignore[union-attr]
    only = plan(training, where(H200, training.weight_gradient, FASTER))
    assert (only.path, only.forward.tiles) == ("fused", None)
    assert only.reason.endswith(": weight gradient")
    forced = plan(replace(training, split_k=3), H200)
    assert forced.forward.splits == forced.data_gradient.splits == 3  # type: ignore[union-attr]
    # The data gradient sums over N, for K columns.
    kernels = plan(training, H200, "triton").data_gradient
    assert kernels.tiles is not None
    assert kernels.splits == choose_splits(Product(DATA_GRADIENT, 8, 2048, 2400), kernels.tiles, 132)
    assert (forced.weight_gradient.path, forced.weight_gradient.splits) == ("fused", 1)
    frozen = plan(replace(training, needs_weight_gradient=False, needs_data_gradient=False), device)
    assert (frozen.data_gradient, frozen.weight_gradient) == (None, None)
    one = plan(replace(training, M=1), H200, "triton")
    assert one.data_gradient.tiles.block_m == 16


def test_torchs_gradients_are_padded_to_whole_vectors() -> None:
    training = problem(64, 19, 2**18, needs_data_gradient=True, needs_weight_gradient=True, needs_bias_gradient=True)

    def padded(**change: object) -> LinearPlan:
        call = replace(training, **change)
        return plan(call, where(H200, call, FASTER))

    made = padded()
    assert made.padded_columns == 24
    assert ("gradients", "torch, with dz and W padded to N = 24") in made.kernel_facts()
    assert made.workspace_bytes == max(2 * 24 * (64 + 2**18), 4 * 64 * 19 * made.forward.splits)
    # Without dx, W is not needed.
    assert padded(needs_data_gradient=False).padded_columns == 24
    for change in (
        {"N": 16}, {"K": 2**17}, {"captured": False}, {"split_k": 2},
        {"needs_data_gradient": False, "needs_weight_gradient": False},
    ):  # fmt: skip
        assert padded(**change).padded_columns == 0, change


def test_many_tokens_split_the_weight_gradient() -> None:
    training = problem(65_536, 512, 512, needs_weight_gradient=True, needs_bias_gradient=True)
    made = plan(training, where(H200, training.weight_gradient, FASTER))
    assert made.weight_gradient.path == "fused"
    assert made.weight_gradient.splits > 1
    assert made.forward.tiles is None


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8, 100, 10**9])
@pytest.mark.parametrize("blocks", [1, 2, 7, 8, 9, 512])
def test_no_split_is_empty(blocks: int, splits: int) -> None:
    found = filled_splits(blocks, splits)
    size = math.ceil(blocks / found)
    assert 1 <= found <= min(splits, blocks)
    assert (found - 1) * size < blocks <= found * size
    # As long as asked for.
    assert size == math.ceil(blocks / min(splits, blocks))


@pytest.mark.parametrize("wanted", [0, 1, 3, 10**6])
@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.architecture)
def test_splits_and_partials_are_bounded(device: Device, wanted: int) -> None:
    for bits in (16, 32):
        for sizes in ((1, 1, 10**7), (512, 512, 262_144), (4096, 8192, 65_536), (1, 128_000, 4096), (7, 9, 11)):
            product = Product(FORWARD, *sizes)
            tiles = split_tiles(device.architecture, bits, *sizes[:2])
            splits = choose_splits(product, tiles, device.sms, wanted)
            assert splits == 1 or 4 * splits * sizes[0] * sizes[1] <= PARTIALS_LIMIT == 128 * 2**20
            blocks = math.ceil(sizes[2] / tiles.block_inner)
            assert splits == filled_splits(blocks, splits)
            if wanted:
                assert splits <= wanted
    huge = Product(FORWARD, 20_000, 20_000, 8192)
    assert choose_splits(huge, split_tiles("sm_90", 16, 20_000, 20_000), 132, 8) == 1
    assert choose_splits(huge, split_tiles("sm_90", 16, 20_000, 20_000), 132, 8, atomic=True) == 8


def test_every_tile_fits_shared_memory() -> None:
    for _, _, tiles in TABLE["sm_90", 16]:
        if tiles.block_m > 1:
            assert 2 * tiles.num_stages * (tiles.block_m + tiles.block_n) * tiles.block_inner <= SHARED_MEMORY
            assert (tiles.block_n >= 64) or not tiles.swapped


def test_the_table_has_a_row_for_every_size() -> None:
    for architecture, bits in (("sm_90", 16), ("sm_90", 32), ("sm_80", 16), ("gfx942", 32)):
        for rows in (1, 2, 16, 17, 512, 10**6):
            for columns in (1, 16, 17, 64, 4096, 10**6):
                tiles = split_tiles(architecture, bits, rows, columns)
                assert isinstance(tiles, SplitTiles)
                assert (tiles.block_m == 1) == (rows == 1)


@pytest.mark.parametrize("outputs", [1, 256, 4096, 16_384, 65_536, 10**6])
@pytest.mark.parametrize("splits", [1, 2, 8, 33, 128, 1000])
def test_sums_fit_the_registers_of_a_program(outputs: int, splits: int) -> None:
    block, at_once, warps = reduce_blocks(outputs, splits)
    assert block * at_once <= 64 * 32 * warps
    assert block & (block - 1) == at_once & (at_once - 1) == 0


def test_costs() -> None:
    made = plan(SKINNY, H200, "triton")
    assert made.flops == 2 * 64 * 64 * 65_536
    assert made.bytes == 2 * (2 * 64 * 65_536 + 64 * 64)
    assert made.saved_bytes == 0
    assert made.floor_seconds == pytest.approx(made.bytes / 4.3e12)
    assert starts_early("sm_100")
    assert not starts_early("gfx942")


def test_torch_computes_the_data_gradient_first_in_a_graph_of_few_rows() -> None:
    """That torch's own products take another order is worth a Function of our own nowhere else."""
    training = problem(128, 2048, 4352, needs_data_gradient=True, needs_weight_gradient=True)
    slower = where(H200, training, {"fused": 2.0})
    made = plan(training, slower)
    assert (made.path, made.data_gradient_first) == ("torch", True)
    for change in (
        {"captured": False}, {"M": 513}, {"needs_data_gradient": False}, {"needs_weight_gradient": False},
        {"subclass": "DTensor"}, {"dtype": "float64"},
    ):  # fmt: skip
        made = plan(replace(training, **change), slower)
        assert (made.path, made.data_gradient_first) == ("torch", False), change
    for device, backend in ((CPU, "auto"), (A100, "auto"), (H200, "torch")):
        assert not plan(training, device, backend).data_gradient_first
