"""What the benchmark measures: costs, saved memory, interleaved rounds, and the mark of a busy host."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedlayers.bench import contenders, timing
from fusedlayers.bench.cases import CASES, Draw, Options
from fusedlayers.bench.memory import saved_bytes
from fusedlayers.bench.work import Work, random_work

CPU = torch.device("cpu")
FFN, GEMM_GEMM, MAXSIM = CASES["ffn"], CASES["gemm_gemm"], CASES["maxsim"]
PLAIN = Options("gelu_tanh", bias=True)


def test_costs_are_those_of_the_published_floors() -> None:
    """Floors of the published tables in µs, from 790 TFLOP/s and 4.3 TB/s."""
    for case, options, shape, backward, microseconds in (
        (FFN, PLAIN, (131072, 64, 256), False, 11),
        (FFN, PLAIN, (131072, 64, 256), True, 33),
        (FFN, PLAIN, (8192, 4096, 14336), True, 7307),
        (FFN, Options("silu", gated=True), (65536, 256, 768), False, 98),
        (FFN, Options("silu", gated=True), (8192, 4096, 14336), True, 10960),
        (GEMM_GEMM, Options(), (64, 1024, 1024, 64, 64), False, 22),
        (GEMM_GEMM, Options(), (16, 4096, 4096, 128, 128), False, 174),
        (MAXSIM, Options(), (1, 10_000, 32, 300, 128), False, 179),
        (MAXSIM, Options(), (128, 128, 32, 300, 128), False, 51),
        (MAXSIM, Options(), (32, 32, 1024, 1024, 128), False, 348),
    ):
        flops = case.flops(shape, options, backward)
        moved = case.moved_bytes(shape, options, torch.bfloat16, backward)
        assert max(flops / 790e12, moved / 4.3e12) * 1e6 == pytest.approx(microseconds, abs=0.5)


def test_saved_bytes_count_each_activation_once_and_no_parameter() -> None:
    rows, width, hidden = shape = (64, 16, 48)
    work = random_work(FFN, PLAIN, shape, Draw(torch.float32, CPU), backward=True)
    eager = contenders.contender(contenders.EAGER, FFN, PLAIN)
    # x, the pre-activation and the hidden.
    assert saved_bytes(eager, work, FFN.parameters) == 4 * rows * (width + 2 * hidden)
    chunked = contenders.contender(contenders.AUTO, FFN, dataclasses.replace(PLAIN, recompute=True))
    assert saved_bytes(chunked, work, FFN.parameters) == 4 * rows * width
    checkpointed = contenders.contender(contenders.CHECKPOINTED, FFN, PLAIN)
    assert saved_bytes(checkpointed, work, FFN.parameters) is None


def test_a_checkpoint_gives_the_gradients_of_the_expression_that_it_repeats() -> None:
    work = random_work(FFN, PLAIN, (64, 16, 48), Draw(torch.float32, CPU), backward=True)
    calls: list[None] = []

    def expression(**inputs: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return FFN.torch_expression(**inputs, activation="gelu_tanh")

    repeated = dataclasses.replace(FFN, torch_expression=expression, keywords=lambda options: {})
    found = work.run(contenders.contender(contenders.CHECKPOINTED, repeated, PLAIN).call)
    assert len(calls) == 2
    expected = work.run(contenders.contender(contenders.EAGER, repeated, PLAIN).call)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


class _RecordingClock(timing.Clock):
    """Runs nothing; the k-th measurement takes k seconds."""

    separate_host = True

    def __init__(self) -> None:
        self.order: list[object] = []

    def capture(self, launch: Callable[[], object]) -> tuple[Callable[[], object] | None, str]:
        if "broken" in launch.args[0].__name__:
            return None, "not capturable"
        return launch, ""

    def visit(self, run: Callable[[], object]) -> list[tuple[float, float]]:
        self.order.append(run)
        return [(float(len(self.order)), 0.0)]


def test_rounds_interleave_in_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 10)

    def first(**inputs: Tensor) -> Tensor:
        return inputs["x"] * 1

    def broken_second(**inputs: Tensor) -> Tensor:
        return inputs["x"] * 2

    clock = _RecordingClock()
    work = Work({"x": torch.ones(2)}, torch.ones(2), backward=False)
    entrants = [contenders.Contender("a", first), contenders.Contender("b", broken_second)]
    found = timing.measure(entrants, work, seconds=1e9, clock=clock)
    # Three entrants: a launched, a replayed, b launched.
    rounds = [clock.order[i : i + 3] for i in range(0, len(clock.order), 3)]
    assert len(rounds) == timing.DISCARDED_ROUNDS + 10
    names = [[run.args[0].__name__ for run in each] for each in rounds]
    assert all(sorted(each) == ["broken_second", "first", "first"] for each in names)
    assert len(set(map(tuple, names))) > 1, "nobody follows the same other one each time"
    a, b = found["a"], found["b"]
    assert isinstance(a, timing.Timing)
    assert isinstance(b, timing.Timing)
    assert (a.replayed is None, b.replayed is None, b.replay_reason) == (False, True, "not capturable")
    assert a.launched.repeats == 10
    assert a.launched.minimum > 3 * timing.DISCARDED_ROUNDS


def test_a_capture_needs_no_switch_of_its_own() -> None:
    """What is recorded is warmed up as users do: by plain calls in the contender's own mode."""
    seen: list[str] = []

    class CapturingClock(_RecordingClock):
        def capture(self, launch: Callable[[], object]) -> tuple[Callable[[], object] | None, str]:
            seen.append("capture")
            return super().capture(launch)

    def call(**inputs: Tensor) -> Tensor:
        seen.append(os.environ["FUSEDLAYERS_BACKEND"])
        return inputs["x"] * 1

    work = Work({"x": torch.ones(2)}, (torch.ones(2),), backward=False)
    entrants = [contenders.Contender("auto", call, contenders.AUTO_SWITCHES, recorded=once) for once in (True, False)]
    timing.measure(entrants[:1], work, seconds=1e-9, clock=CapturingClock())
    assert seen == ["auto"] * timing.WARM_UP_RUNS + ["capture"]
    seen.clear()
    found = timing.measure(entrants[1:], work, seconds=1e-9, clock=CapturingClock())["auto"]
    assert seen == ["auto"] * timing.WARM_UP_RUNS
    assert isinstance(found, timing.Timing)
    assert (found.replayed, found.replay_reason) == (None, "")


def test_quartiles_and_the_mark_of_the_host() -> None:
    assert timing.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == timing.Spread(3.0, 2.0, 4.0, 1.0, 5)
    assert timing.spread([2.0]) == timing.Spread(2.0, 2.0, 2.0, 2.0, 1)
    slow, quick = timing.spread([2.0]), timing.spread([1.0])
    assert timing._host_bound(slow, quick, 0.1)
    assert not timing._host_bound(quick, quick, 0.99)
    assert timing._host_bound(quick, None, 0.99)
    assert not timing._host_bound(quick, None, 0.5)


def test_rotating_work_is_timed_as_if_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 10)
    seen: list[float] = []

    def call(**inputs: Tensor) -> Tensor:
        seen.append(float(inputs["x"][0]))
        return inputs["x"] * 1

    one, two, three = (Work({"x": torch.full((2,), n)}, torch.ones(2), False) for n in (1.0, 2.0, 3.0))
    entrant = contenders.Contender("a", call)

    def median(work: Work) -> float:
        found = timing.measure([entrant], work, seconds=1e9, clock=_RecordingClock())["a"]
        assert isinstance(found, timing.Timing)
        return found.launched.median

    alone = median(one)
    seen.clear()
    rotating = dataclasses.replace(one, rotation=(two, three))
    assert (rotating.count, median(rotating)) == (3, pytest.approx(alone / 3))
    assert seen == [1.0, 2.0, 3.0] * (len(seen) // 3)


@pytest.mark.parametrize("fits", [True, False])
def test_a_contender_for_which_memory_does_not_suffice(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph is given up first, and then itself; the others are timed."""
    monkeypatch.setattr(timing, "MOST_ROUNDS", 3)
    graphs: set[str] = set()

    class SmallClock(_RecordingClock):
        def warm_up(self, launch: Callable[[], object]) -> None:
            pass

        def visit(self, run: Callable[[], object]) -> list[tuple[float, float]]:
            run()
            return [(1.0, 0.0)]  # without keeping the run, and with it the graph

        def capture(self, launch: Callable[[], object]) -> tuple[Callable[[], object] | None, str]:
            name = launch.args[0].__name__  # type: ignore[attr-defined]
            graph = _Graph(name, graphs)
            return graph.replay, ""

    def small(**inputs: Tensor) -> Tensor:
        return inputs["x"] * 1

    def large(**inputs: Tensor) -> Tensor:
        if "large" in graphs or not fits:
            raise torch.OutOfMemoryError("too little")
        return inputs["x"] * 1

    work = Work({"x": torch.ones(2)}, (torch.ones(2),), backward=False)
    entrants = [contenders.Contender(call.__name__, call) for call in (small, large)]
    found = timing.measure(entrants, work, seconds=1e-9, clock=SmallClock())
    assert isinstance(found["small"], timing.Timing)
    assert found["small"].replayed is not None
    if fits:
        assert isinstance(found["large"], timing.Timing)
        assert found["large"].replayed is None
        assert found["large"].replay_reason == "OutOfMemoryError: too little"
    else:
        assert found["large"] == timing.NotTimed("OutOfMemoryError: too little")


class _Graph:
    """Takes up memory until nobody refers to it."""

    def __init__(self, name: str, graphs: set[str]) -> None:
        self.name, self.graphs = name, graphs
        graphs.add(name)

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        self.graphs.discard(self.name)
