"""The tolerance rule itself: it must let rounding pass and stop every fault, or all other tests mean little."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedlayers import closeness, reference
from fusedlayers.closeness import (
    Closeness,
    assert_all_close,
    assert_close,
    compare,
    compare_all,
    compare_draws,
    populations,
)
from tests.support import seeds

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Ragged in both output dimensions, several tiles, batched.
ROWS, INNER, HIDDEN, COLUMNS = 150, 96, 200, 130


def operands(dtype: torch.dtype, seed: int, rows: int = ROWS, columns: int = COLUMNS) -> tuple[Tensor, ...]:
    generator = seeds.generator(seed)
    shapes = (rows, INNER), (HIDDEN, INNER), (columns, HIDDEN), (HIDDEN,), (columns,)
    scales = 1.0, INNER**-0.5, HIDDEN**-0.5, 1.0, 1.0
    return tuple(
        (torch.randn(shape, generator=generator) * scale).to(dtype) for shape, scale in zip(shapes, scales, strict=True)
    )


def another_order(x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor, b_down: Tensor) -> Tensor:
    """A right FFN that rounds where a fused kernel does: float32 sums over reversed blocks of the hidden, one cast."""
    y = b_down.float().expand(x.shape[0], -1)
    for block in reversed(torch.arange(w_up.shape[0]).split(48)):
        z = x.float() @ w_up[block].float().T + b_up[block].float()
        hidden = torch.nn.functional.gelu(z).to(x.dtype)
        y = y + hidden.float() @ w_down[:, block].float().T
    return y.to(x.dtype)


def three(dtype: torch.dtype, seed: int = 0, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    """(right result in another order, torch's, reference) of one FFN."""
    tensors = operands(dtype, seed, **sizes)
    truth = reference.ffn(*(tensor.double() for tensor in tensors))
    return another_order(*tensors), reference.ffn(*tensors), truth


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_in_another_order_passes(dtype: torch.dtype) -> None:
    for seed in range(25):
        assert_close(*three(dtype, seed), name=f"seed {seed}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_passes_for_small_and_ragged_results(dtype: torch.dtype) -> None:
    for seed in range(25):
        for rows, columns in ((1, 1), (1, 3), (2, 2), (3, 17), (16, 1), (65, 65), (1, 129), (64, 1)):
            assert_close(*three(dtype, seed, rows=rows, columns=columns), name=f"{rows} x {columns}, seed {seed}")


def one_tile(y: Tensor) -> Tensor:
    y[..., 64:128, 64:128] *= 1.05
    return y


def one_row(y: Tensor) -> Tensor:
    y[..., 77, :] = y[..., 76, :]
    return y


def one_column(y: Tensor) -> Tensor:
    y[..., :, 129] = 0
    return y


def one_element(y: Tensor) -> Tensor:
    y[..., 149, 129] += 1
    return y


def the_last_rows_unwritten(y: Tensor) -> Tensor:
    y[..., 144:, :] = 0
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [one_tile, one_row, one_column, one_element, the_last_rows_unwritten])
def test_a_local_fault_fails(dtype: torch.dtype, fault: Callable[[Tensor], Tensor]) -> None:
    for seed in range(5):
        ours, torch_result, truth = three(dtype, seed)
        assert not compare(fault(ours), torch_result, truth).ok, f"seed {seed}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_of_the_computation_fails(dtype: torch.dtype) -> None:
    for seed in range(5):
        x, w_up, w_down, b_up, b_down = operands(dtype, seed)
        truth = reference.ffn(*(tensor.double() for tensor in (x, w_up, w_down, b_up, b_down)))
        torch_result = reference.ffn(x, w_up, w_down, b_up, b_down)
        faults = {
            "dropped tail of the first product": another_order(x[:, :-4], w_up[:, :-4], w_down, b_up, b_down),
            "dropped tail of the second product": another_order(x, w_up[:-2], w_down[:, :-2], b_up[:-2], b_down),
            "bias added twice": another_order(x, w_up, w_down, b_up, b_down + b_down),
            "hidden bias forgotten": another_order(x, w_up, w_down, torch.zeros_like(b_up), b_down),
            "gelu_tanh's steeper neighbour": reference.ffn(x, w_up, w_down, b_up, b_down, activation="quick_gelu"),
            "hidden kept in 8 bits": reference.ffn(x, w_up.to(torch.float8_e4m3fn).to(dtype), w_down, b_up, b_down),
        }
        for name, wrong in faults.items():
            assert not compare(wrong, torch_result, truth).ok, f"{name}, seed {seed}"


def test_a_bad_tile_of_small_values_fails_although_the_whole_looks_right() -> None:
    ours, torch_result, truth = (result.clone() for result in three(torch.bfloat16, rows=128, columns=192))
    for tensor in (ours, torch_result, truth):
        tensor[:, 64:128] *= 2**-10
    ours[64:128, 64:128] *= 1.03
    verdict = compare(ours, torch_result, truth, name="y")
    assert verdict.max_error_ratio < closeness.MAX_ERROR_LIMIT
    assert verdict.rms_ratio < closeness.RMS_LIMIT
    assert not verdict.ok
    assert verdict.worst_tile == (1, 1)
    assert "y: NOT close" in verdict.message
    assert "1 of 6 tiles over" in verdict.message


def test_the_worst_tile_is_named_in_every_number_of_dimensions() -> None:
    base = torch.randn(2, 3, 130, 70, dtype=torch.float64)
    for index, place, shape in (
        ((1, 2, 2, 1), (1, 2, 128, 64), (2, 3, 130, 70)),
        ((1, 0), (100, 5), (130, 70)),
        ((1,), (99,), (130,)),
        ((), (), ()),
    ):
        truth = base.flatten()[: math.prod(shape)].reshape(shape)
        wrong = truth.float()
        wrong[place] += 1000
        verdict = compare(wrong, truth.float(), truth)
        assert not verdict.ok
        assert verdict.worst_tile == (index or (0, 0)[2 - len(shape) :])


def test_the_ratios_say_how_far_beyond_torch() -> None:
    truth = torch.linspace(1, 2, 64 * 64, dtype=torch.float64).reshape(64, 64)
    torch_result, ours = (truth + 1e-3).float(), (truth + 3e-3).float()
    verdict = compare(ours, torch_result, truth)
    assert verdict.max_error_ratio == pytest.approx(3, rel=2e-3)
    assert verdict.rms_ratio == pytest.approx(3, rel=2e-3)
    assert verdict.worst_fraction == pytest.approx(2, rel=2e-3)
    assert compare((truth + 1.4e-3).float(), torch_result, truth).ok


def test_one_element_may_err_twice_as_much_as_torchs_worst_and_no_more() -> None:
    truth = torch.linspace(1, 2, 128 * 128, dtype=torch.float64).reshape(128, 128)
    noise = 1e-3 * torch.linspace(-1, 1, 128 * 128, dtype=torch.float64).reshape(128, 128)
    torch_result = (truth + noise).float()
    for error, right in ((1.9e-3, True), (2.1e-3, False)):
        ours = torch_result.clone()
        ours[127, 127] = truth[127, 127] + error
        verdict = compare(ours, torch_result, truth)
        assert verdict.ok is right
        assert verdict.rms_ratio < 1.01


def test_many_small_matrices_that_look_right_one_by_one_fail_together() -> None:
    truth = torch.rand(200, 4, 4, dtype=torch.float64) + 1
    torch_result, ours = (truth + 1e-3).float(), (truth + 3e-3).float()
    verdict = compare(ours, torch_result, truth)
    assert not verdict.ok
    assert "0 of 200 tiles over" in verdict.message
    assert compare(ours[0], torch_result[0], truth[0]).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_torch_results_leave_room_for_one_rounding_and_no_more(dtype: torch.dtype) -> None:
    truth = torch.randint(-64, 65, (64, 64)).double()
    exact = truth.to(dtype)
    assert compare(exact, exact, truth).worst_fraction == 0
    neighbours = torch.nextafter(exact, torch.full_like(exact, math.inf))
    rounded_away_here_and_there = torch.where(torch.rand(64, 64) < 0.1, neighbours, exact)
    assert compare(rounded_away_here_and_there, exact, truth).ok
    too_far = 4 * torch.finfo(dtype).eps + 4 * closeness.RMS_FLOOR
    assert not compare((truth * (1 + too_far)).to(dtype), exact, truth).ok
    zeros = torch.zeros(64, 64, dtype=dtype)
    assert compare(zeros, zeros, zeros.double()).ok
    assert not compare(zeros + 1e-4, zeros, zeros.double()).ok


def test_subnormal_float16_gradients_may_round() -> None:
    truth = torch.randn(64, 64, dtype=torch.float64) * 2**-20
    rounded = truth.half()
    # The other of the two float16 numbers around the value: wrong by at most one spacing.
    neighbour = torch.nextafter(rounded, torch.where(truth > rounded, math.inf, -math.inf).half())
    assert compare(rounded, rounded, truth).ok
    assert not compare(torch.zeros_like(rounded), rounded, truth).ok
    few = torch.where(torch.rand(64, 64) < 0.1, neighbour, rounded)
    assert compare(few, rounded, truth).ok


@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf])
def test_special_values_must_sit_where_torch_has_them(planted: float) -> None:
    ours, torch_result, truth = three(torch.float32)
    for tensor in (ours, torch_result, truth):
        tensor[70, 5] = planted
    assert_close(ours, torch_result, truth)
    for other in ({math.nan, math.inf, -math.inf} - {planted}) | {0.0}:
        different = ours.clone()
        different[70, 5] = other
        verdict = compare(different, torch_result, truth)
        assert not verdict.ok
        assert "1 of 19500 elements, first at (70, 5)" in verdict.message
    elsewhere = ours.clone()
    elsewhere[3, 4] = planted
    assert "first at (3, 4)" in compare(elsewhere, torch_result, truth).message


def test_a_result_that_overflows_as_torchs_does_passes() -> None:
    truth = torch.randn(64, 64, dtype=torch.float64)
    truth[3, 3] = 1e6
    overflowed = truth.half()
    assert overflowed.isinf().sum() == 1
    assert_close(overflowed, overflowed, truth)
    assert not compare(overflowed.nan_to_num(), overflowed, truth).ok


def test_large_tensors_are_judged_in_steps_with_the_same_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((5, 130, 70), (1, 700, 70), (300, 1, 3)):
        truth = torch.randn(shape, dtype=torch.float64)
        torch_result, ours = truth.bfloat16(), (truth * (1 + 1e-3)).bfloat16()
        ours[-1, -1, -1] = math.nan if shape[0] == 1 else ours[-1, -1, -1]
        monkeypatch.undo()
        whole = compare(ours, torch_result, truth)
        monkeypatch.setattr(populations, "ELEMENTS_PER_STEP", 9000)
        assert compare(ours, torch_result, truth) == whole


def test_strided_and_expanded_results_are_read_right() -> None:
    truth = torch.randn(70, 130, dtype=torch.float64)
    assert compare(truth.float().T.contiguous().T, truth.float(), truth).ok
    row = torch.randn(130, dtype=torch.float64)
    assert compare(row.float().expand(70, 130), row.float().expand(70, 130).contiguous(), row.expand(70, 130)).ok


def test_few_elements_are_judged_loosely_but_judged() -> None:
    truth = torch.tensor([[0.001]], dtype=torch.float64)
    assert compare((truth * 1.01).bfloat16(), truth.bfloat16(), truth).ok
    truth = torch.randn(16, 16, dtype=torch.float64)
    assert not compare((truth * 1.05).bfloat16(), truth.bfloat16(), truth).ok
    # Many columns that come from two inner results are two samples.
    wrong = (truth * 1.05).bfloat16()
    assert compare(wrong, truth.bfloat16(), truth, independent=2).ok
    assert not compare(wrong, truth.bfloat16(), truth, independent=256).ok
    assert not compare(wrong + 1000, truth.bfloat16(), truth, independent=1).ok


def test_a_float32_gradient_of_a_bfloat16_product_may_round_as_bfloat16() -> None:
    truth = torch.randn(64, 64, dtype=torch.float64)
    ours = truth.bfloat16().float()
    assert not compare(ours, truth.float(), truth).ok
    assert compare(ours, truth.float(), truth, computed_in=torch.bfloat16).ok


def test_another_shape_or_dtype_is_a_red_verdict() -> None:
    truth = torch.randn(4, 6, dtype=torch.float64)
    assert "shape (6, 4), torch has (4, 6)" in compare(truth.T.float(), truth.float(), truth).message
    verdict = compare(truth.half(), truth.float(), truth, name="dx")
    assert not verdict.ok
    assert verdict.message == "dx: NOT close; dtype torch.float16, torch has torch.float32"


def test_an_empty_result_is_close() -> None:
    empty = torch.empty(0, 5)
    assert compare(empty, empty, empty.double()).ok
    assert not compare(torch.empty(5, 0), empty, empty.double()).ok


def test_arguments_that_cannot_judge_are_refused() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(TypeError, match=r"reference: expected float64, got torch\.float32 \(comparing dw_up\)"):
        compare(x, x, x, name="dw_up")
    with pytest.raises(TypeError, match=r"actual: expected a floating-point tensor, got torch\.int64"):
        compare(x.long(), x, x.double())
    with pytest.raises(ValueError, match=r"reference: expected torch's shape \(2, 2\), got \(2, 1\)"):
        compare(x, x, x.double()[:, :1])
    with pytest.raises(ValueError, match="reference: not finite where torch's result is"):
        compare(x, x, x.double() * math.nan)


def test_several_results_at_once() -> None:
    ours, torch_result, truth = three(torch.float32)
    right = {"y": ours, "dx": None}, {"y": torch_result, "dx": None}, {"y": truth, "dx": None}
    assert set(assert_all_close(*right)) == {"y"}
    wrong = {"y": ours + 1, "dx": torch.zeros(2)}
    with pytest.raises(AssertionError, match=r"(?s)y: NOT close.*dx: NOT close; a tensor, torch has None"):
        assert_all_close(wrong, *right[1:])
    missing = compare_all({"y": None, "dx": None}, *right[1:])
    assert missing["y"].message == "y: NOT close; None, torch has a tensor"
    with pytest.raises(ValueError, match="expected the same keys"):
        compare_all({"y": ours}, *right[1:])
    with pytest.raises(ValueError, match="references: dx must be None exactly where"):
        compare_all(right[0], right[1], {"y": truth, "dx": truth})


def draws(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """So many results with errors of a thousandth, torch's, and references, 150 x 130 each."""
    generator = seeds.generator(count)
    truth, *errors = torch.randn(3, count, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    ours, torch_results = (truth + 1e-3 * error for error in errors)
    return ours.float(), torch_results.float(), truth


def together(*results: Tensor) -> Closeness:
    """The verdict on results whose first dimension counts draws."""
    return compare_draws(tuple({"dw": each} for each in draw) for draw in zip(*results, strict=True))["dw"]


def test_draws_are_judged_tile_by_tile_as_one() -> None:
    ours, torch_results, truths = draws(3)
    assert together(ours, torch_results, truths).ok
    # Where torch is almost right by chance in one draw, the others tell how large its errors are there.
    tile = slice(64, 128), slice(64, 128)
    lucky = torch_results.clone()
    lucky[1][tile] = truths[1][tile].lerp(lucky[1][tile].double(), 0.1)
    assert not compare(ours[1], lucky[1], truths[1]).ok
    assert together(ours, lucky, truths).ok
    # An error in one draw is a fault, and so is one that all of them have in the same place.
    for place in ((1, *tile), (slice(None), *tile)):
        wrong = ours.clone()
        wrong[place] *= 1.01
        verdict = together(wrong, torch_results, truths)
        assert not verdict.ok
        assert verdict.worst_tile == (1, 1)
        assert "1 of 9 tiles over" in verdict.message


@pytest.mark.parametrize("shape", [(), (70,), (3, 70, 5), (2, 3, 4, 5)], ids=str)
def test_draws_of_every_dimension(shape: tuple[int, ...]) -> None:
    """Each draw of a vector has tiles of its own length, and what is not finite is named with its draw."""
    generator = seeds.generator(3)
    truths = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    results = truths.bfloat16()
    verdict = together(results, results, truths)
    assert verdict.ok
    assert len(verdict.worst_tile) == len(shape)
    wrong = results.clone()
    last = tuple(size - 1 for size in shape)
    wrong[(1, *last)] = math.nan
    assert f"first at {last} of draw 2: nan" in together(wrong, results, truths).message


def test_a_gradient_that_is_missing_in_one_draw_is_missing() -> None:
    ours, torch_results, truths = draws(2)
    given = [
        ({"dw": each[0]}, {"dw": each[1]}, {"dw": each[2]}) for each in zip(ours, torch_results, truths, strict=True)
    ]
    missing = ({"dw": None}, *given[1][1:])
    assert compare_draws([given[0], missing])["dw"].message == "dw: NOT close; None, torch has a tensor"
