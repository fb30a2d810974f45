"""Dropout that is replayed: one mask, whoever draws it, in whatever tiles; the right one, and right in number."""

import math

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.closeness import assert_close
from fusedlayers.kernels import dropout, gemm_epilogue, gemm_gemm
from fusedlayers.kernels.device import triton
from fusedlayers.kernels.dropout import Dropout, draw_seed, keep_mask, limit_and_scale
from fusedlayers.kernels.gemm_gemm import Arithmetic, Operands, WeightGradients
from fusedlayers.kernels.tuning import EpilogueTiles, TileConfig, epilogue_tiles
from tests.support.operands import (
    DEVICE,
    DTYPES,
    EPILOGUE,
    INTEGERS,
    PATHS,
    assert_equal,
    assert_ffn_close,
    ffn_inputs,
    in_float64,
    like_result,
    needs_kernels,
    on_path,
    results,
    seed_after,
)

TILES = [TileConfig(16, 16, 4, 1), TileConfig(16, 32, 4, 1), TileConfig(32, 16, 4, 1), TileConfig(64, 32, 4, 1)]
SEEDS = [0, 1, 2**32, 2**63 - 2, 0x299F31D0A4093822]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32 with 7 rounds in plain integers, as the paper writes it."""
    for _ in range(7):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            first >> 32 ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_the_generator_is_philox_with_seven_rounds() -> None:
    # Three known answers that the authors publish with their Random123 library.
    assert philox([0] * 4, [0] * 2) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert philox([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox(pi, [0xA4093822, 0x299F31D0]) == [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]


def drawn_word(seed: int, row: int, column: int) -> int:
    """The 32 bits that decide on an element, in plain integers: a word of the draw of its row and lane, its own half
    of it first."""
    block, inside = divmod(column, 64)
    half, lane = divmod(inside, 8)
    counter = [8 * block + lane, row & 0xFFFFFFFF, row >> 32, 0]
    word = philox(counter, [seed & 0xFFFFFFFF, seed >> 32])[half // 2]
    return word if half % 2 else (word & 0xFFFF) << 16 | word >> 16


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first_row", [0, 2**31 - 2, 2**32 - 1, 5 * 2**32 + 3])
@pytest.mark.parametrize(("first_column", "columns"), [(0, 5), (3, 130), (192, 64)])
def test_the_torch_twin_draws_from_philox(seed: int, first_row: int, first_column: int, columns: int) -> None:
    mask = keep_mask(torch.tensor([seed]), first_row, 2, columns, 0.4, torch.float32, first_column)
    expected = [
        [drawn_word(seed, first_row + row, first_column + column) >= round(0.4 * 2**32) for column in range(columns)]
        for row in range(2)
    ]
    assert torch.equal(mask, torch.tensor(expected, dtype=torch.float32))


def kernel_mask(seed: int, first_row: int, rows: int, columns: int, dropout_p: float) -> Tensor:
    """The mask as kernels draw it, on the CPU."""
    out = torch.full((rows, columns), math.nan, device=DEVICE)
    grid = (triton.cdiv(out.numel(), 256),)
    seeds = torch.tensor([seed], device=DEVICE)
    dropout._keep_kernel[grid](
        seeds,
        out,
        first_row=first_row,
        first_column=0,
        M=rows,
        N=columns,
        limit=limit_and_scale(dropout_p)[0],
        BLOCK=256,
    )
    return out.cpu()


@needs_kernels
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("first_row", "dropout_p"),
    [(0, 0.1), (1, 0.0), (2**31 - 20, 0.5), (2**32 - 20, 0.9), (7 * 2**32, 1 - 2**-24), (9, 2**-20), (9, 2**-32)],
)
def test_kernels_and_torch_twin_draw_the_same_bits(seed: int, first_row: int, dropout_p: float) -> None:
    twin = keep_mask(torch.tensor([seed]), first_row, 37, 41, dropout_p, torch.float32)
    assert torch.equal(kernel_mask(seed, first_row, 37, 41, dropout_p), twin)


@needs_kernels
def test_a_draw_equal_to_the_probability_is_kept() -> None:
    """As in torch: the draws below p are dropped, a share of exactly p of them."""
    drawn = drawn_word(3, 0, 0) / 2**32
    assert kernel_mask(3, 0, 1, 1, drawn) == keep_mask(torch.tensor([3]), 0, 1, 1, drawn, torch.float32) == 1
    above = drawn + 2**-32
    assert kernel_mask(3, 0, 1, 1, above) == keep_mask(torch.tensor([3]), 0, 1, 1, above, torch.float32) == 0


@pytest.mark.parametrize("dropout_p", [0.0, 1e-12, 1e-9, 1e-6, 0.1, 0.3, 0.5, 0.9, 1 - 2**-16, 1 - 1e-9, 1 - 1e-12])
def test_the_scale_makes_up_for_what_is_dropped(dropout_p: float) -> None:
    """Thirty-two bits of the probability, and an expectation that is exactly that of no dropout."""
    limit, scale = limit_and_scale(dropout_p)
    assert -(2**31) <= limit < 2**31  # kernels would be compiled again for a wider number
    dropped = limit % 2**32
    assert abs(dropped / 2**32 - dropout_p) <= 2**-32
    assert (dropped > 0) == (dropout_p > 0)
    assert scale * (1 - dropped / 2**32) == pytest.approx(1, rel=1e-15)


@pytest.mark.parametrize("dropout_p", [2**-20, 2**-18, 3e-5, 1e-4])
def test_a_small_probability_drops_as_many_as_it_says(dropout_p: float) -> None:
    """One near 1 keeps as many: within six standard deviations of so rare an event."""
    draws = 2**22
    deviation = math.sqrt(draws * dropout_p)
    seed = torch.tensor([2026])
    dropped = draws - keep_mask(seed, 0, 2**10, 2**12, dropout_p, torch.int8).sum(dtype=torch.int64)
    assert abs(dropped - draws * dropout_p) < 6 * deviation
    assert dropped > 0
    kept = keep_mask(seed, 0, 2**10, 2**12, 1 - dropout_p, torch.int8).sum(dtype=torch.int64)
    assert abs(kept - draws * dropout_p) < 6 * deviation
    assert kept > 0


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [1, 2, 37, 1000])
@pytest.mark.parametrize(("first_column", "columns"), [(0, 1), (63, 2), (5, 64), (0, 200)])
def test_parts_that_are_drawn_one_after_the_other_are_those_of_the_whole(
    rows: int, first_column: int, columns: int
) -> None:
    seed = torch.tensor([17])
    # Every part has one row more than the one before.
    firsts = [part * (part + 1) // 2 for part in range(rows) if part * (part + 1) // 2 < rows]
    parts = [
        keep_mask(seed, 7 + first, min(part + 1, rows - first), columns, 0.3, torch.int8, first_column)
        for part, first in enumerate(firsts)
    ]
    assert torch.equal(keep_mask(seed, 7, rows, columns, 0.3, torch.int8, first_column), torch.cat(parts))


@pytest.mark.parametrize("recompute", [False, True])
def test_no_hidden_units(recompute: bool) -> None:
    inputs = ffn_inputs(4, 9, 0, 11)
    y = functional.ffn(**inputs, dropout_p=0.3, dropout_seed=torch.tensor([1], device=DEVICE), recompute=recompute)
    b_down = inputs["b_down"]
    assert torch.equal(y, b_down.expand(4, 11))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
def test_a_mask_of_more_than_two_to_the_31_elements() -> None:
    seed = draw_seed(DEVICE)
    rows, columns = 2**16 + 1, 2**15
    mask = keep_mask(seed, 0, rows, columns, 0.5, torch.int8)
    assert torch.equal(mask[-2:], keep_mask(seed, rows - 2, 2, columns, 0.5, torch.int8))


@pytest.mark.parametrize("dropout_p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_the_probability_says(dropout_p: float) -> None:
    """In all, per row and per column: within six standard deviations of a binomial, for every one of them."""
    mask = keep_mask(torch.tensor([2026]), 0, 700, 900, dropout_p, torch.float64)
    for kept, draws in ((mask.sum(), mask.numel()), (mask.sum(0), 700), (mask.sum(1), 900)):
        deviation = math.sqrt(draws * dropout_p * (1 - dropout_p))
        assert (kept - draws * (1 - dropout_p)).abs().max() < 6 * deviation


def test_neighbours_do_not_know_of_each_other() -> None:
    """Rows, columns, seeds: masks one step apart, or halves of one draw, agree as often as two coins do."""
    mask = keep_mask(torch.tensor([2026]), 0, 700, 901, 0.5, torch.float64)
    shifted = [mask.roll(1, 0), *(mask.roll(distance, 1) for distance in (1, 8, 16, 32, 64))]
    others = [keep_mask(torch.tensor([2027]), 0, 700, 901, 0.5, torch.float64), *shifted]
    for other in others:
        agree = (mask == other).double().sum()
        assert (agree - mask.numel() / 2).abs() < 6 * math.sqrt(mask.numel()) / 2


@pytest.mark.parametrize("path", [*PATHS, EPILOGUE])
def test_a_given_seed_decides_the_mask(path: str) -> None:
    """The mask of a seed is the same on every path, and nothing is drawn for it."""
    inputs = ffn_inputs(20, 8, 24, 10)
    seed = draw_seed(DEVICE)
    read = torch.cuda.get_rng_state if DEVICE.type == "cuda" else torch.get_rng_state
    state = read()
    with on_path(path) as options:
        ours = functional.ffn(**inputs, dropout_p=0.5, dropout_seed=seed, **options)
        assert torch.equal(ours, functional.ffn(**inputs, dropout_p=0.5, dropout_seed=seed, **options))
        assert not torch.equal(ours, functional.ffn(**inputs, dropout_p=0.5, dropout_seed=seed + 1, **options))
    assert torch.equal(read(), state)
    theirs = reference.ffn(**inputs, dropout_p=0.5, seed=seed)
    truth = reference.ffn(**in_float64(inputs), dropout_p=0.5, seed=seed)
    assert_close(ours, theirs, truth, independent=20 * 24)


@pytest.mark.parametrize("path", [*PATHS, EPILOGUE])
def test_no_dropout_draws_nothing(path: str) -> None:
    inputs = ffn_inputs(20, 8, 24, 10)
    read = torch.cuda.get_rng_state if DEVICE.type == "cuda" else torch.get_rng_state
    with on_path(path) as options:
        before = read()
        assert torch.equal(
            functional.ffn(**inputs, dropout_p=0.0, **options), functional.ffn(**inputs, dropout_p=0, **options)
        )
        assert torch.equal(read(), before)
        functional.ffn(**inputs, dropout_p=0.1, **options)
        assert not torch.equal(read(), before)


@needs_kernels
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_tiles_do_not_change_the_mask(tiles: TileConfig) -> None:
    """All three kernels, through operands that let the mask through: x of ones, the identity as w_down and as dy."""
    M = N = 50
    seed = seed_after(3)
    ones, eye = torch.ones(1, M, 1, device=DEVICE), torch.eye(N, device=DEVICE)[None]
    operands = Operands(
        ones,
        torch.ones(1, N, 1, device=DEVICE),
        eye,
        None,
        None,
        None,
        seed,
        Arithmetic("identity", 0.5, "ieee", "exact"),
    )
    mask = keep_mask(seed.cpu(), 0, M, N, 0.5, torch.float32) * 2
    assert torch.equal(gemm_gemm.forward(operands, None, None, tiles)[0].cpu(), mask)
    assert torch.equal(gemm_gemm.data_gradient(operands, torch.ones_like(eye), tiles)[0][0, :, 0].cpu(), mask.sum(1))
    for splits in (1, 3):
        found = gemm_gemm.weight_gradients(operands, eye, WeightGradients(down=True, up=True), splits, tiles)
        assert torch.equal(found.down[0].cpu(), mask)
        assert torch.equal(found.up[0, :, 0].cpu(), mask.diagonal())


WIDE_TILES = [EpilogueTiles(16, 32, 16, 4, 1), EpilogueTiles(32, 16, 32, 4, 1), epilogue_tiles("", 32, False, True)]


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("place", [(0, 0), (7, 1000), (2**31 - 80, 3)], ids=str)
@pytest.mark.parametrize("tiles", WIDE_TILES, ids=str)
def test_tiles_do_not_change_the_mask_of_wide_layers(tiles: EpilogueTiles, place: tuple[int, int]) -> None:
    """Both kernels of the epilogue path, of parts too, through operands that let the mask through, gated or not."""
    M, N = 70, 50
    drawn = Dropout(seed_after(3), 0.5, place)
    mask = keep_mask(drawn.seed.cpu(), place[0], M, N, 0.5, torch.float32, place[1]) * 2
    one, row, dy, z = (torch.ones(shape, device=DEVICE) for shape in ((N, 1), (M, 1), (M, 1), (M, N)))
    rest = (Arithmetic("identity", 0.0, "ieee", "exact"), tiles)
    for gate in (None, one):
        found, *_ = gemm_epilogue.hidden(row, one, None, gate, None, False, *rest, dropout=drawn)
        assert torch.equal(found.cpu(), mask)
        for row_tiles in (1, 2):
            gradients = gemm_epilogue.hidden_gradient(
                dy, one.T, z, None if gate is None else z, True, row_tiles, *rest, keep_hidden=True, dropout=drawn
            )
            matrices = [gradients.dz, gradients.hidden, *([] if gate is None else [gradients.dz_gate])]
            assert all(torch.equal(matrix.cpu(), mask) for matrix in matrices)
            assert torch.equal(gradients.db_up.cpu(), mask.sum(0))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("path", [*PATHS[:2], EPILOGUE])
def test_backward_replays_the_mask_of_forward(path: str, gated: bool) -> None:
    """Exact integers (p = 1/2 scales by 2), so that one element of the mask wrong is a difference."""
    dtype = torch.float32
    inputs = ffn_inputs((3, 17), 5, 37, 6, dtype, gated=gated, residual=True, draw=INTEGERS[dtype])
    dy = like_result(inputs, INTEGERS[dtype])
    seed = seed_after(11)
    with on_path(path) as options:
        ours = results(functional.ffn, inputs, dy, activation="relu", dropout_p=0.5, **options)
    truth = results(reference.ffn, in_float64(inputs), dy.double(), activation="relu", dropout_p=0.5, seed=seed)
    assert_equal(in_float64(ours), truth)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("dropout_p", [0.1, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", [*PATHS[:2], EPILOGUE])
def test_the_scale_is_exact(path: str, dtype: torch.dtype, dropout_p: float) -> None:
    """Near p = 1 the rounding of p itself would show in 1 / (1 - p)."""
    inputs = ffn_inputs(150, 24, 60, 20, dtype, gated=True)
    with on_path(path) as options:
        assert_ffn_close(
            functional.ffn, inputs, options=options, manual_seed=12, dropout_p=dropout_p, activation="silu"
        )


@pytest.mark.parametrize("path", [*PATHS, EPILOGUE])
def test_a_probability_that_rounds_to_one_keeps_nothing(path: str) -> None:
    inputs = ffn_inputs(20, 8, 24, 10)
    with on_path(path) as options:
        y = functional.ffn(**inputs, dropout_p=1 - 1e-12, **options)
    b_down = inputs["b_down"]
    assert torch.equal(y, b_down.expand_as(y))
