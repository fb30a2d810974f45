"""When the planner takes the warp-specialised kernels of Hopper, and how they are laid out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusedlayers.kernels import tuning
from fusedlayers.planning import Device, Problem, plan

H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True)
SM90 = replace(H200, backend="sm90")
TRAINING = Problem(
    "ffn", batch=1, M=1_048_576, K=64, N=256, O=64, dtype="bfloat16", activation="gelu_tanh",
    needs_data_gradient=True, needs_weight_gradient=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sm90"),
    [
        ({}, True),
        ({"K": 128}, True),
        ({"K": 256, "O": 256}, True),
        ({"K": 256}, False),
        ({"K": 96, "O": 96}, True),
        ({"K": 40, "O": 128}, True),
        ({"K": 100, "O": 100}, False),
        ({"K": 192, "O": 192}, False),
        ({"N": 264}, True),
        ({"N": 260}, False),
        ({"M": 1_048_577}, True),
        ({"dropout": True}, False),
        ({"dtype": "float16"}, True),
        ({"dtype": "float32"}, False),
        ({"gated": True}, True),
    ],
    ids=str,
)
def test_what_the_sm90_kernels_take(change: dict[str, object], sm90: bool) -> None:
    made = plan(replace(TRAINING, **change), SM90, "triton")
    for tiles in (made.forward_tiles, made.data_gradient_tiles, made.weight_gradient_tiles):
        assert (tiles.sm90 is not None) == sm90
        # What their copies cannot take runs in the generic kernel of the same row.
        assert replace(tiles, sm90=None).sm90 is None
    assert plan(replace(TRAINING, **change), H200, "triton").forward_tiles.sm90 is None


def test_copies_of_a_batch_stay_inside_an_entry() -> None:
    sizes = {"gated": False, "K": 64, "O": 64, "sms": 132}
    for kernel, M, N, taken in (
        ("forward", 1024, 256, True),
        ("forward", 1024 + 64, 256, False),
        ("forward", 1024, 256 + 8, False),
        ("weight_gradient", 1024, 256 + 8, True),
        ("weight_gradient", 1024 + 1, 256, False),
    ):
        assert (tuning.sm90_config(kernel, batch=64, M=M, N=N, **sizes) is not None) == taken
        assert tuning.sm90_config(kernel, batch=1, M=M, N=N, **sizes) is not None


def test_few_rows_are_shared_by_more_processors() -> None:
    consumers = [
        tuning.sm90_config("forward", False, 1, rows, 64, 256, 64, sms=132).consumers
        for rows in (64 * 132, 64 * 132 + 1)
    ]
    assert consumers == [1, 2]


@pytest.mark.parametrize("kernel", ["forward", "data_gradient", "weight_gradient"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("K", "O"), [(64, 64), (64, 128), (128, 64), (128, 128), (256, 256)])
def test_sm90_rings_have_two_stages_at_least(kernel: str, gated: bool, K: int, O: int) -> None:
    for M, N in ((65_536, 1024), (65_537, 1032), (100, 8)):
        config = tuning.sm90_config(kernel, gated, 1, M, K, N, O, sms=132)
        assert 2 <= config.stages <= 4
        assert config.passes <= 3


@pytest.mark.parametrize("gated", [False, True])
def test_a_backward_pass_that_stores_what_is_hidden(gated: bool) -> None:
    wide = replace(TRAINING, M=65_536, K=256, N=1024, O=256, gated=gated)
    made = plan(wide, SM90, "triton")
    # All tiles of all splits run at once, each with a tile of 128 units and 256 columns.
    tiles = (16 if gated else 8) + 2 * 4
    assert made.stored.weight_tiles(2 if gated else 1, 256, 1024, 256) == tiles
    assert made.stored_splits == 132 // tiles
    hidden_tensors = 3 if gated else 2
    assert made.workspace_bytes == made.stored_splits * wide.partial_bytes + hidden_tensors * wide.hidden_bytes
    assert (made.forward_units, made.backward_units) == ((3, 8) if gated else (2, 5))
    # Nothing hidden is kept for it.
    assert made.saved_bytes == 2 * 65_536 * 256


@pytest.mark.parametrize(
    "change",
    [
        {"recompute": True},
        {"needs_data_gradient": False},
        {"needs_weight_gradient": False},
        {"dropout": True},
        {"dtype": "float32", "K": 128, "O": 128},
        {"K": 128, "O": 128},
        {"N": 1020},
        {"operation": "gemm_gemm"},
    ],
    ids=str,
)
def test_a_backward_pass_that_recomputes(change: dict[str, object]) -> None:
    wide = replace(TRAINING, M=65_536, K=256, N=1024, O=256)
    assert plan(wide, SM90, "triton").stored is not None
    assert plan(wide, H200, "triton").stored is None
    assert plan(replace(wide, **change), SM90, "triton").stored is None


def test_triton_3_9_stores_nothing_gated() -> None:
    """Its assembler serialises the kernel."""
    wide = replace(TRAINING, M=65_536, K=256, N=1024, O=256, gated=True)
    newer = replace(SM90, triton_release=(3, 9))
    assert plan(wide, SM90, "triton").stored is not None
    recomputing = plan(wide, newer, "triton")
    assert recomputing.stored is None
    assert recomputing.weight_gradient_tiles.sm90 is not None
    for change in ({"gated": False}, {"K": 128, "O": 128}, {"recompute": True}, {"needs_data_gradient": False}):
        made = plan(replace(wide, **change), newer, "triton")
        assert made == plan(replace(wide, **change), SM90, "triton")
        assert made.path == "fused"


def test_splits_of_stored_weight_gradients_are_bounded() -> None:
    wide = replace(TRAINING, K=256, N=1024, O=256)
    for M, expected in ((1, 1), (64 * 4 + 1, 1), (64 * 8, 2), (2**20, 8)):
        assert plan(replace(wide, M=M), SM90, "triton").stored_splits == expected
    assert plan(replace(wide, M=2**20, N=2**16), SM90, "triton").stored_splits == 1


def test_splits_of_sm90_kernels_leave_one_program_to_a_processor() -> None:
    for N, expected in ((256, 66), (512, 33), (8, 132), (128 * 200, 1)):
        made = plan(replace(TRAINING, N=N), SM90, "triton")
        assert made.splits == expected


def test_splits_of_more_than_one_wave_leave_no_sms_idle() -> None:
    """68 tiles of hidden units on 132 SMs: in one wave half of them would wait, 340 programs fill three."""
    for tiles, expected in ((66, 2), (68, 5), (130, 1), (140, 3)):
        assert plan(replace(TRAINING, M=2**15, N=128 * tiles), SM90, "triton").splits == expected


@pytest.mark.parametrize("kernel", ["forward", "data_gradient"])
def test_blocks_are_large_where_they_compute_few_units_more(kernel: str) -> None:
    sizes = {"gated": False, "M": 4096, "K": 128, "O": 128, "sms": 132}
    few, many = {"forward": (64, 128), "data_gradient": (32, 64)}[kernel]
    # In eighths of a large block; 9 fill two large blocks, or three small ones.
    for eighths, block in ((3, few), (7, few), (8, many), (9, few), (13, many), (33, few), (41, many)):
        made = tuning.sm90_config(kernel, batch=1, N=eighths * many // 8, **sizes)
        assert (made.block, eighths) == (block, eighths)
    # Copies of a batch must end where its entries end.
    assert tuning.sm90_config(kernel, batch=2, N=11 * few, **sizes).block == few
    assert tuning.sm90_config(kernel, batch=2, N=12 * few, **sizes).block == many


def test_half_tiles_where_whole_ones_do_not_fit_into_a_batch() -> None:
    """Whole ones are one wave, but would reach into the next entry; the generic kernels take longer still."""
    sizes = {"gated": False, "K": 64, "N": 256, "O": 64, "sms": 132}
    consumers = {
        rows: tuning.sm90_config("forward", batch=2, M=rows, **sizes).consumers for rows in (64 * 65, 64 * 67, 128 * 34)
    }
    assert consumers == {64 * 65: 1, 64 * 67: 1, 128 * 34: 2}
    assert tuning.sm90_config("forward", batch=2, M=64 * 133, **sizes) is None
