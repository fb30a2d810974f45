"""The record: what it says at the sizes that were measured, between them, and far from all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies

from fusedlayers.planning import CARDS, Device, LinearProblem, plan
from fusedlayers.planning.record import (
    LAUNCHED,
    NOISE,
    PRIOR,
    REPLAYED,
    TORCH,
    Record,
    Row,
    Surface,
    _solved,
    classes,
    estimate,
    octaves,
    of_device,
    read,
    shipped,
)
from tests.support.records import rows, where

H200 = CARDS["H200"]
CALL = LinearProblem(M=64, N=256, K=4096, dtype="bfloat16")


def row(sizes: tuple[int, ...], variant: str = "", sure: bool = False, **seconds: float) -> Row:
    return Row("it", variant, sizes, seconds, seconds, sure)


def surface(*found: Row, how: str = REPLAYED) -> Surface:
    made = Record(found).surface("it", how, len(found[0].sizes))
    assert made is not None
    return made


def ratio(found: Surface, sizes: tuple[int, ...], path: str = "fused", variant: str = "") -> float:
    """How many times as long as torch, as decisions take it."""
    return math.exp(found.ratios(*found.near(sizes, variant), [path])[path])


def grid(of: Callable[[int, int], float]) -> list[Row]:
    """Rows at powers of two, where torch takes 1 ms and ``fused`` as many times as long as ``of`` the sizes."""
    sides = [2**power for power in range(6, 14, 2)]
    return [row((M, K), torch=1e-3, fused=1e-3 * of(M, K)) for M in sides for K in sides]


@pytest.mark.parametrize("size", [1, 2, 5, 30])
def test_equations_are_solved(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    half = torch.randn(size, size, generator=generator, dtype=torch.float64)
    matrix = half @ half.T + torch.eye(size, dtype=torch.float64)
    right = torch.randn(size, generator=generator, dtype=torch.float64)
    found = torch.tensor(_solved(matrix.tolist(), right.tolist()), dtype=torch.float64)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right))


def test_at_a_row_it_says_what_was_measured() -> None:
    """Within the error of a measurement, which is larger where a host launches."""
    found = grid(lambda M, K: 0.5 + (M > 1000) + 0.3 * (K > 1000))
    for how, off in ((REPLAYED, 1.03), (LAUNCHED, 1.5)):
        made = surface(*found, how=how)
        for each in found:
            assert 1 / off < ratio(made, each.sizes) / (each.replayed["fused"] / 1e-3) < off
            _, near = made.near(each.sizes, "")
            assert made.nearest(near)[0] == each
            assert max(near) == 1
    assert PRIOR.sure_noise <= NOISE[REPLAYED] < NOISE[LAUNCHED]


def test_between_rows_it_says_something_between() -> None:
    made = surface(*grid(lambda M, K: 0.5 if M < 1000 else 2.0))
    crossing = [ratio(made, (M, 1024)) for M in (256, 512, 704, 1024)]
    assert crossing == sorted(crossing)
    assert 0.45 < crossing[0] < 0.6 < crossing[1] < crossing[2] < 1.8 < crossing[3] < 2.2


def test_a_row_that_is_left_out_is_expected_from_its_neighbours() -> None:
    """Of what changes by a tenth with each octave, and of what is alike everywhere."""
    for of in (lambda M, K: (M / 64) ** 0.1, lambda M, K: (K / M) ** -0.05, lambda M, K: 0.7):
        found = grid(of)
        for each in found:
            made = Record(found).without("it", each.sizes).surface("it", REPLAYED, 2)
            assert len(made.rows) == len(found) - 1
            assert abs(math.log(ratio(made, each.sizes) / of(*each.sizes))) < 0.25, each.sizes


def test_a_path_is_known_where_rows_have_it() -> None:
    found = grid(lambda M, K: 0.5)
    some = [each._replace(replayed={TORCH: 1e-3, "other": 3e-3}) if each.sizes[0] > 1000 else each for each in found]
    made = surface(*some)
    assert made.ratios(*made.near((64, 64), ""), ["fused", "other", "third"]).keys() == {"fused", "other", TORCH}
    # Rows without a time of a path say nothing of it, wherever they lie.
    alone = surface(*(each for each in some if "fused" in each.replayed))
    assert ratio(made, (64, 64)) == pytest.approx(ratio(alone, (64, 64)), rel=1e-3)
    # One time alone is no ratio.
    assert Record([row((64, 64), torch=1e-3)]).surface("it", REPLAYED, 2) is None
    # Nor are those of two kernels, as ratios are to torch's.
    assert Record([row((64, 64), fused=1e-3, other=1e-3)]).surface("it", REPLAYED, 2) is None
    assert Record(found).surface("another", REPLAYED, 2) is None


def test_rows_of_other_sizes_are_none_of_the_kind() -> None:
    """What a user's file may hold."""
    found = Record([*grid(lambda M, K: 0.5), row((64, 64, 64), torch=1e-3, fused=9e-3)])
    two, three = (found.surface("it", REPLAYED, axes) for axes in (2, 3))
    assert (len(two.rows), len(three.rows)) == (len(found) - 1, 1)
    assert found.surface("it", REPLAYED, 4) is None


def test_rows_of_one_place_are_one_answer() -> None:
    """Measured again and again, by the user and by others."""
    for sure in (False, True):
        made = surface(*[row((64, 64), torch=1e-3, fused=1e-3 * times, sure=sure) for times in (0.5, 0.55, 0.5, 0.5)])
        assert 0.45 < ratio(made, (64, 64)) < 0.6


def test_nothing_near_needs_a_margin() -> None:
    """A path must be expected to be faster by more where nothing was measured."""
    made = surface(*grid(lambda M, K: 0.99))
    assert ratio(made, (256, 256)) < 1
    between = ratio(made, (512, 512))
    below = [ratio(made, (2**power, 2**power)) for power in (5, 4, 3)]
    assert 0.97 < between < PRIOR.estimated
    assert below == sorted(below)
    assert below[-1] > PRIOR.estimated
    # From so many octaves on sizes count as those, and larger ones than the greatest as that one.
    assert ratio(made, (2 ** round(6 - PRIOR.beyond), 256)) == pytest.approx(ratio(made, (1, 256)), rel=0.05)
    assert ratio(made, (2**12, 256)) == pytest.approx(ratio(made, (2**15, 256)))


def test_alignment_sets_rows_apart() -> None:
    assert classes((64, 4096, 16, 48, 8, 24, 2, 6, 1, 7)) == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    assert octaves((1, 2, 64)) == [0, 1, 6]
    found = [row((M, K), torch=1e-3, fused=1e-3 * (0.5 if K % 64 == 0 else 2.0)) for M in (256, 1024) for K in
             (512, 520, 1024, 1032)]  # fmt: skip
    made = surface(*found)
    assert ratio(made, (512, 768)) < 0.8 < 1.4 < ratio(made, (512, 776))


def test_a_variant_differs_by_little() -> None:
    found = [
        row((M, 256), variant, torch=1e-3, fused=1e-3 * of)
        for M in (256, 1024)
        for variant, of in (("relu", 0.8), ("gelu", 0.9))
    ]
    made = surface(*found)
    assert ratio(made, (256, 256), variant="relu") < ratio(made, (256, 256), variant="gelu")
    assert 0.75 < ratio(made, (256, 256), variant="silu") < 1.0


def test_what_the_user_measured_counts_more() -> None:
    shipped_rows, own = rows(CALL, {"fused": 0.8}), rows(CALL, {"fused": 1.5}, sure=True)
    both = replace(H200, override=Record([*shipped_rows, *own]))
    assert plan(CALL, both).path == "torch"
    assert (
        plan(
            CALL, replace(H200, override=Record([*rows(CALL, {"fused": 0.8}, sure=True), *rows(CALL, {"fused": 1.5})]))
        ).path
        == "fused"
    )
    # With what is shipped for the GPU, where that is another kind of call's, too.
    record = of_device(H200.name, H200.architecture, Record(own))
    assert len(record) == len(of_device(H200.name, H200.architecture, None) or ()) + len(own)
    assert plan(CALL, replace(H200, calibration=Record(own))).path == "torch"


def test_a_device_of_another_architecture_has_no_record_but_its_own() -> None:
    assert of_device("NVIDIA A100", "sm_80", None) is None
    alone = Device("cuda", "NVIDIA A100", "sm_80", sms=108, triton=True, calibration=Record(rows(CALL, {"fused": 0.5})))
    assert plan(CALL, alone).path == "fused"
    # A GPU of the same architecture knows what others of it know.
    assert of_device("NVIDIA H800", "sm_90", None) is not None


def test_a_file_is_read() -> None:
    given: dict[str, Any] = {
        "rows": {
            "one": {
                "sizes": ["M", "K"],
                "paths": ["torch", "fused"],
                "kinds": {
                    "training: relu": [[64, 32, 10, 20, 30, 0]],
                    "": [[1, 2, 3, 4]],
                },
            }
        }
    }
    first, second = read(json.loads(json.dumps(given)))
    assert first[:3] == ("one training", "relu", (64, 32))
    assert first.launched == pytest.approx({TORCH: 10e-6, "fused": 20e-6})
    assert first.replayed == pytest.approx({TORCH: 30e-6})
    assert second == Row("one", "", (1, 2), {TORCH: pytest.approx(3e-6), "fused": pytest.approx(4e-6)}, {})
    found = Record([first, second])
    assert len(found) == 2
    assert found.surface("one training", REPLAYED, 2) is None
    assert found.surface("one training", LAUNCHED, 2) is not None


@pytest.mark.parametrize("gpu", shipped())
def test_what_is_shipped_is_sound(gpu: str) -> None:
    found = list(read(shipped()[gpu]))
    assert len(found) == len({(each.kin, each.variant, each.sizes) for each in found}), "no sizes twice"
    for each in found:
        assert TORCH in each.launched or TORCH in each.replayed, each
        assert all(1e-7 < time < 10 for times in (each.launched, each.replayed) for time in times.values()), each
        assert all(size > 0 for size in each.sizes)


@hypothesis.given(
    strategies.tuples(*[strategies.integers(1, 2**24)] * 3), strategies.sampled_from([LAUNCHED, REPLAYED])
)
def test_any_size_has_an_estimate(sizes: tuple[int, int, int], how: str) -> None:
    M, N, K = sizes
    problem = replace(CALL, M=M, N=N, K=K)
    found = estimate(problem, where(H200, CALL, {"fused": 0.5}).override, how, {"fused": "fused"})  # type: ignore[arg-type]
    assert found.seconds.keys() == {"fused", TORCH}
    assert all(0 < seconds < math.inf for seconds in found.seconds.values())
    assert found.measured == {"fused": pytest.approx(0.5e-3), TORCH: pytest.approx(1e-3)}
