"""Which path a call takes, by the seconds that each one is expected to take.

Of paths that are expected to take about as long, the one that keeps least for the backward pass is taken. Where paths
keep different amounts, one is chosen for all numbers of tokens of a layer together: as they grow it changes only to
what is worth a change, and never to a path that keeps twice the bytes, so that a few tokens more do not keep many times
as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .call import NOT_ON_RECORD, SET_TO_TORCH, not_measured
from .devices import Device
from .record import TORCH, Surface

# What a path must gain, as a logarithm of its time, if it keeps more bytes or is not that of neighbouring numbers of
# tokens; and how many times the bytes of the path with fewer tokens it may keep.
STAYS, MOST_KEPT = math.log(1.05), 1.9
# A layer is planned for numbers of tokens that are powers of the root of two, up to the most that were measured, whose
# path all larger numbers take.
_STEP = 0.5

Kept = Callable[[str], int]


class Choice(NamedTuple):
    """The path, and why each other one is not taken; and where times decided, the paths by their names on record."""

    path: str
    against: dict[str, str]
    timed: tuple[tuple[str, str], ...] = ()


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
        against |= dict.fromkeys(able, SET_TO_TORCH)
        return Choice(TORCH, against)
    if backend == "triton":
        path, *others = [*able, TORCH]
        return Choice(path, against | dict.fromkeys(others, f"the {path} path comes first"))
    if not able:
        return Choice(TORCH, against)
    if (reason := not_measured(problem, device)) is not None:
        return Choice(TORCH, against | dict.fromkeys(able, reason))
    record, names = device.record, {problem.recorded(path, device): path for path in able}
    assert record is not None, "else nothing was measured"
    found = list[Surface]()
    for how in problem.measured_as:
        surface = record.surface(problem.recorded_kin, how, len(problem.sizes))
        if surface is None:
            return Choice(TORCH, against | dict.fromkeys(able, NOT_ON_RECORD))
        found.append(surface)
    timed = {name: path for name, path in names.items() if all(name in surface.paths for surface in found)}
    timed[TORCH] = TORCH
    if kept is None or not problem.training:
        ratios = _ratios(found, problem.sizes, problem.variant, timed, faster=True)
        path = timed[min(ratios, key=ratios.__getitem__)]
        slower = f"{path} is expected to be faster"
    else:
        path = timed[_along(problem, found, {name: kept(each) for name, each in timed.items()})]
        slower = f"{path} is expected to be about as fast or faster with so many tokens, or keeps less"
    known = timed.values()
    against |= {each: slower if each in known else NOT_ON_RECORD for each in (*able, TORCH) if each != path}
    return Choice(path, against, tuple(timed.items()))


def _ratios(
    surfaces: Sequence[Surface], sizes: Sequence[int], variant: str, paths: Iterable[str], faster: bool = False
) -> dict[str, float]:
    """Logarithms of how many times as long as torch each path takes, the worst of all surfaces.

    With ``faster`` further surfaces are not asked if the ones before expect no path to be faster than torch.
    """
    first, *others = surfaces
    worst = first.ratios(*first.near(sizes, variant), paths)
    for surface in others:
        if faster and min(worst.values()) >= 0:
            break
        found = surface.ratios(*surface.near(sizes, variant), paths)
        worst = {path: max(ratio, found[path]) for path, ratio in worst.items()}
    return worst


def _along(problem: Any, surfaces: Sequence[Surface], kept: Mapping[str, int]) -> str:
    """The path of a layer for its number of tokens, which is the first size."""
    tokens, *layer = problem.sizes
    shares = tuple((name, round(bytes_kept / problem.M, 1)) for name, bytes_kept in kept.items())
    chosen = _layer(tuple(surfaces), tuple(layer), problem.variant, shares)
    return chosen[min(round(math.log2(tokens) / _STEP), len(chosen) - 1)]


@lru_cache(4096)
def _layer(
    surfaces: tuple[Surface, ...], layer: tuple[int, ...], variant: str, kept: tuple[tuple[str, float], ...]
) -> list[str]:
    """The path for each number of tokens: those that cost least together, changes included."""
    bytes_kept = dict(kept)
    least = min(bytes_kept.values())
    best: dict[str, tuple[float, list[str]]] = {name: (0.0, []) for name in bytes_kept}
    for step in range(1 + math.ceil(min(surface.most for surface in surfaces) / _STEP)):
        # A multiple of 64, as where it matters numbers of tokens are.
        tokens = round(2 ** (_STEP * step))
        ratios = _ratios(surfaces, (tokens if tokens < 64 else tokens // 64 * 64, *layer), variant, bytes_kept)
        further = {}
        for name, more in bytes_kept.items():
            costs = ratios[name] + STAYS * (more > least)
            further[name] = min(
                (cost + costs + STAYS * (before != name and step > 0), [*chosen, name])
                for before, (cost, chosen) in best.items()
                if before == name or step == 0 or more <= MOST_KEPT * bytes_kept[before]
            )
        best = further
    return min(best.values())[1]
