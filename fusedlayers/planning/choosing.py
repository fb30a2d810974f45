"""Which path a call takes, by the seconds that each one is expected to take.

Of paths that are expected to take about as long, the one that keeps least for the backward pass is taken. Where paths
keep different amounts, one is chosen for all numbers of tokens of a layer together: as they grow it changes only to
what is worth a change, and never to a path that keeps twice the bytes, so that a few tokens more do not keep many times
as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .call import in_words, no_time_on_record, not_measured
from .devices import Device
from .record import TORCH, Estimate, Record, Surface

# A path that keeps more, or a change between neighbouring numbers of tokens, must be expected to be so many times as
# fast; and a path that keeps so many times the bytes is not changed to.
STAYS, MOST_KEPT = math.log(1.05), 1.9
# Numbers of tokens that a layer is looked at for: powers of the root of two, up to four million.
_STEP, _STEPS = 0.5, 45

Kept = Callable[[str], int]


class Choice(NamedTuple):
    """The path, why each other one is not taken, and what is expected of them where that is known."""

    path: str
    against: dict[str, str]
    estimate: Estimate | None = None


def choose(
    problem: Any, device: Device, backend: str, cannot: Mapping[str, str | None], kept: Kept | None = None
) -> Choice:
    """Torch's path, or one of those that ``cannot`` names, each with the reason why it cannot run, or None.

    ``kept``: the bytes that a path keeps for the backward pass, where these differ. The first path that can run is
    what ``backend="triton"`` takes.
    """
    against = {path: reason for path, reason in cannot.items() if reason is not None}
    able = [path for path in cannot if path not in against]
    if backend == "torch":
        against |= dict.fromkeys(able, "the backend is set to torch")
        return Choice(TORCH, against)
    if backend == "triton":
        path, *others = [*able, TORCH]
        return Choice(path, against | {each: f"the {path} path comes first" for each in others})
    reason = not_measured(problem, device) if able else None
    if reason is not None:
        return Choice(TORCH, against | dict.fromkeys(able, reason))
    record = device.record
    surfaces = [record.surface(problem.kin, how) for how in problem.measured_as] if record is not None and able else []
    if not surfaces or None in surfaces:
        return Choice(TORCH, against | {path: no_time_on_record(problem) for path in able})
    found: list[Surface] = surfaces  # type: ignore[assignment]
    ratios = _ratios(found, problem.sizes, problem.variant, able)
    path = _least(ratios, kept) if kept is None or not problem.training else _along(problem, found, able, kept)
    place, near = found[0].near(problem.sizes, problem.variant)
    seconds = found[0].torch_seconds(place, near)
    expected = {each: seconds * math.exp(ratio) for each, ratio in ratios.items()}
    against |= {each: no_time_on_record(problem) for each in able if each not in ratios}
    against |= {
        each: f"{in_words(time)} expected, {path} {in_words(expected[path])}"
        for each, time in expected.items()
        if each != path
    }
    return Choice(path, against, Estimate(expected, *found[0].nearest(near)))


def _ratios(
    surfaces: Sequence[Surface], sizes: Sequence[int], variant: str, paths: Sequence[str]
) -> dict[str, float]:
    """Logarithms of how many times as long as torch each path takes, the worst of all surfaces."""
    found = [surface.ratios(*surface.near(sizes, variant), paths) for surface in surfaces]
    return {path: max(each[path] for each in found) for path in found[0] if all(path in each for each in found)}


def _least(ratios: Mapping[str, float], kept: Kept | None) -> str:
    """The fastest path, or one that keeps less and is about as fast."""
    if kept is None:
        return min(ratios, key=ratios.__getitem__)
    least = min(map(kept, ratios))
    return min(ratios, key=lambda path: ratios[path] + STAYS * (kept(path) > least))


def _along(problem: Any, surfaces: Sequence[Surface], paths: Sequence[str], kept: Kept) -> str:
    """The path of a layer with so many tokens, its first size."""
    tokens, *layer = problem.sizes
    bytes_kept = tuple(kept(path) / problem.M for path in (*paths, TORCH))
    chosen = _layer(tuple(surfaces), tuple(layer), problem.variant, (*paths, TORCH), bytes_kept)
    return chosen[min(round(math.log2(tokens) / _STEP), _STEPS - 1)]


@lru_cache(4096)
def _layer(
    surfaces: tuple[Surface, ...], layer: tuple[int, ...], variant: str, paths: tuple[str, ...], kept: tuple[float, ...]
) -> list[str]:
    """The path for each number of tokens: those that cost least together, changes included."""
    costs = dict(zip(paths, kept, strict=True))
    least = min(costs.values())
    best: dict[str, tuple[float, list[str]]] = {path: (0.0, []) for path in paths}
    for step in range(_STEPS):
        # A multiple of 64, as where it matters numbers of tokens are.
        tokens = round(2 ** (_STEP * step))
        ratios = _ratios(surfaces, (tokens if tokens < 64 else tokens // 64 * 64, *layer), variant, paths)
        best = {
            path: min(
                (
                    cost + ratio + STAYS * (costs[path] > least) + STAYS * (before != path and step > 0),
                    [*chosen, path],
                )
                for before, (cost, chosen) in best.items()
                if before == path or step == 0 or costs[path] <= MOST_KEPT * costs[before]
            )
            for path, ratio in ratios.items()
        }
    return min(best.values())[1]
