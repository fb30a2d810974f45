"""The record: seconds of every path that was measured, and what they say of sizes that were not.

    gpu, architecture, sms    of the GPU, one file for each; ``card`` is the name that users know it by
    ceilings                  its peak rates, (FLOP/s in 16 bits, bytes/s): large products and copies of random data
    rows                      by operation: the names of its sizes and paths; and by kind of call, lines of sizes and of
                              microseconds by path, launched one by one and then replayed in a CUDA graph; 0 where a
                              path was not timed
    loops                     the same of layers in a loop, as users launch them
    drawn                     the same of random sizes, timed while other processes compiled

``python -m benchmarks.record`` makes the files from the committed results of the benchmark. What a user's own machine
measured (``calibrations``) has the same form, and counts first.

How many times as long as torch a path takes is interpolated between the rows of the same kind of call by Gaussian
process regression (Rasmussen and Williams, *Gaussian Processes for Machine Learning*, 2006, chapter 2; in geology
*kriging*). Logarithms of times are a linear function of those of sizes, and what differs from it alike where sizes are
near one another: the covariance of two rows falls with the octaves between their sizes. Nothing else is known of the
operations, so that a new one, or another GPU, needs rows and no rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import mul, sub
from typing import Any, NamedTuple

from .measured import PATH, fitted

FOLDER = PATH.parent
TORCH = "torch"
LAUNCHED, REPLAYED = "launched", "replayed"

PARTS = ("rows", "loops", "drawn")

# Multiples of elements at which rows begin, from the best one: lines of memory, sectors, vectors, words.
_ALIGNMENTS = (64, 16, 8, 2)
# The class of alignment of a size, by its remainder modulo the best one, which the others divide.
_CLASSES = [next((place for place, each in enumerate(_ALIGNMENTS) if rest % each == 0), 4) for rest in range(64)]


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What the regression assumes of logarithms of ratios. Distances between rows are in octaves."""

    spread: float  # how far a path is from the linear function
    steepness: float  # of that function, for each octave
    steepness_of_seconds: float
    reach: float  # the distance within which rows vouch for one another
    unlike_rows: float  # the distance to another class of alignment
    unlike_variant: float  # the distance to another variant
    # Standard errors of measurements: calls launched one by one wait for hosts, which differ.
    launched_noise: float
    replayed_noise: float
    sure_noise: float
    drawn_noise: float
    # Sizes that are further below the least that was measured count as if they were this far below. Those above the
    # greatest count as the greatest: ratios no longer change once the device is busy.
    beyond: float
    # Where nothing was measured nearby, a path must be expected to be this many times as fast as torch, and this many
    # times more for each octave below what was measured.
    estimated: float
    gap: float  # from this distance to all rows of a GPU on, those of others of its architecture count for it


PRIOR = fitted("record", Prior)
NOISE = {LAUNCHED: PRIOR.launched_noise, REPLAYED: PRIOR.replayed_noise}
# Octaves that two classes of alignment are apart.
_UNLIKE = [[PRIOR.unlike_rows * min(abs(one - two), 2) for two in range(5)] for one in range(5)]


class Row(NamedTuple):
    """What was measured: the kind of call, what it is a variant of, its sizes, and seconds by path."""

    kin: str
    variant: str
    sizes: tuple[int, ...]
    launched: Mapping[str, float]
    replayed: Mapping[str, float]
    sure: bool = False  # measured by the user, or in a loop, as users launch it
    drawn: bool = False  # measured while other processes used the GPU, too


class Estimate(NamedTuple):
    """What is expected of a call: seconds by path; and the nearest row, with its seconds by path."""

    seconds: dict[str, float]
    nearest: Row
    measured: Mapping[str, float]


class Record:
    """All rows of one GPU; compared by identity."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[str, list[Row]] = {}
        for row in rows:
            self._rows.setdefault(row.kin, []).append(row)
        self._surfaces: dict[tuple[str, str, int], Surface | None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def rows(self) -> Iterator[Row]:
        """Every row."""
        for rows in self._rows.values():
            yield from rows

    def has(self, kin: str) -> bool:
        """Whether anything was measured of a kind of call."""
        return kin in self._rows

    def without(self, kin: str, sizes: tuple[int, ...]) -> Record:
        """As if nothing had been measured at these sizes."""
        return Record(row for row in self.rows() if (row.kin, row.sizes) != (kin, sizes))

    def surface(self, kin: str, how: str, axes: int) -> Surface | None:
        """What is known of a kind of call of so many sizes, launched or replayed; None where nothing is."""
        place = kin, how, axes
        if place not in self._surfaces:
            # A file from elsewhere may hold rows with another number of sizes.
            known = [row for row in self._rows.get(kin, ()) if len(row.sizes) == axes]
            rows = [row for row in known if len(getattr(row, how)) > 1 and TORCH in getattr(row, how)]
            self._surfaces[place] = Surface(rows, how) if rows else None
        return self._surfaces[place]


class Surface:
    """The ratios of one kind of call, launched or replayed, at any sizes."""

    def __init__(self, rows: Sequence[Row], how: str) -> None:
        self.rows, self.seconds = rows, [getattr(row, how) for row in rows]
        self._octaves = [octaves(row.sizes) for row in rows]
        self._classes = [classes(row.sizes) for row in rows]
        self._axes = [*zip(*self._octaves, strict=True)]
        # By alignment and variant: how far rows are apart for that alone.
        self._unlike: dict[tuple[tuple[int, ...], str], list[float]] = {}
        self._bounds = [(min(axis), max(axis)) for axis in self._axes]
        self.most = self._bounds[0][1]  # of the first size, in octaves
        self._middle = [math.fsum(axis) / len(rows) for axis in self._axes]
        near = [
            self._nearness(*place)
            for place in zip(self._octaves, self._classes, [row.variant for row in rows], strict=True)
        ]
        noise = [PRIOR.sure_noise if row.sure else PRIOR.drawn_noise if row.drawn else NOISE[how] for row in rows]
        logs = [{path: math.log(time) for path, time in found.items()} for found in self.seconds]
        self._paths = {
            path: self._fitted(near, noise, [found.get(path, math.nan) - found.get(TORCH, math.nan) for found in logs])
            for path in {path for found in logs for path in found} - {TORCH}
        }
        of_torch = [found.get(TORCH, math.nan) for found in logs]
        self._torch = self._fitted(near, noise, of_torch, PRIOR.steepness_of_seconds)

    def near(self, sizes: Sequence[int], variant: str) -> tuple[list[float], list[float]]:
        """Where sizes lie, in octaves; and how near they are to each row."""
        place = [
            min(max(octave, least - PRIOR.beyond), most)
            for octave, (least, most) in zip(octaves(sizes), self._bounds, strict=True)
        ]
        return place, self._nearness(place, classes(sizes), variant)

    def ratios(self, place: Sequence[float], near: Sequence[float], paths: Iterable[str]) -> dict[str, float]:
        """Logarithms of how many times as long as torch the ``paths`` take that were measured; torch's is 0."""
        beyond = sum(max(least - size, 0) for size, (least, _) in zip(place, self._bounds, strict=True))
        margin = math.log(PRIOR.estimated) * (1 - max(near) + beyond)
        found = {path: self._at(self._paths[path], place, near) + margin for path in paths if path in self._paths}
        return {**found, TORCH: 0.0}

    @property
    def paths(self) -> Iterable[str]:
        """The paths that were timed, except torch's."""
        return self._paths

    def torch_seconds(self, sizes: Sequence[int], place: Sequence[float], near: Sequence[float]) -> float:
        """What torch takes: beyond the greatest sizes that were measured, as much longer as there is more work."""
        bounds = zip(octaves(sizes), self._bounds, strict=True)
        return math.exp(self._at(self._torch, place, near)) * 2 ** sum(
            max(size - most, 0) for size, (_, most) in bounds
        )

    def nearest(self, near: Sequence[float]) -> tuple[Row, Mapping[str, float]]:
        """The row that is nearest, and its seconds."""
        place = max(range(len(near)), key=near.__getitem__)
        return self.rows[place], self.seconds[place]

    def _nearness(self, place: Sequence[float], of: tuple[int, ...], variant: str) -> list[float]:
        # This runs over all rows at every new size, so it calls as few functions as possible.
        apart = self._unlike.get((of, variant))
        if apart is None:
            apart = [0.0 if row.variant == variant else PRIOR.unlike_variant for row in self.rows]
            for axis, aligned in enumerate(of):
                away = _UNLIKE[aligned]
                apart = [so_far + away[known[axis]] for so_far, known in zip(apart, self._classes, strict=True)]
            self._unlike[of, variant] = apart
        for size, sizes in zip(place, self._axes, strict=True):
            apart = [
                so_far + (size - other if size > other else other - size)
                for so_far, other in zip(apart, sizes, strict=True)
            ]
        scale = -PRIOR.reach
        return list(map(math.exp, [distance / scale for distance in apart]))

    def _fitted(
        self, near: list[list[float]], noise: list[float], values: list[float], steepness: float = PRIOR.steepness
    ) -> tuple[list[float], float, list[float]]:
        """Weights of rows, of 1 and of each octave from the middle, by which values are interpolated.

        Rows without a value have no weight.
        """
        known = [place for place, value in enumerate(values) if not math.isnan(value)]
        away = [[one - two for one, two in zip(octave, self._middle, strict=True)] for octave in self._octaves]
        variance = PRIOR.spread * PRIOR.spread
        covariance = [
            [
                variance * near[one][two] + 1 + steepness * steepness * _dot(away[one], away[two])
                + (noise[one] * noise[one] if one == two else 0)
                for two in known[: place + 1]
            ]
            for place, one in enumerate(known)
        ]  # fmt: skip
        weights = [0.0] * len(values)
        for place, weight in zip(known, _solved(covariance, [values[place] for place in known]), strict=True):
            weights[place] = weight
        slopes = [steepness * steepness * _dot(weights, axis) for axis in zip(*away, strict=True)]
        return [variance * weight for weight in weights], math.fsum(weights), slopes

    def _at(
        self, fitted: tuple[list[float], float, list[float]], place: Sequence[float], near: Sequence[float]
    ) -> float:
        weights, constant, slopes = fitted
        away = [one - two for one, two in zip(place, self._middle, strict=True)]
        return _dot(weights, near) + constant + _dot(slopes, away)


def octaves(sizes: Sequence[int]) -> list[float]:
    """Their logarithms to the base of 2."""
    return [math.log2(size) if size > 1 else 0.0 for size in sizes]


def classes(sizes: Sequence[int]) -> tuple[int, ...]:
    """How well rows of so many elements are aligned."""
    return tuple(_CLASSES[size % 64] for size in sizes)


def _dot(one: Sequence[float], two: Sequence[float]) -> float:
    return sum(map(mul, one, two))


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x of ``matrix x = right`` for a positive definite matrix, of which no more than the lower triangle is read."""
    factor: list[list[float]] = []
    for row, line in enumerate(matrix):
        made: list[float] = []
        for column in range(row):
            above = factor[column]
            made.append((line[column] - _dot(made, above)) / above[column])
        # Rows of the same sizes differ by their noise alone, so that rounding could make this negative.
        made.append(math.sqrt(max(line[row] - _dot(made, made), 1e-12)))
        factor.append(made)
    half: list[float] = []
    for value, line in zip(right, factor, strict=True):
        half.append((value - _dot(half, line)) / line[-1])
    found = [0.0] * len(half)
    for row in reversed(range(len(half))):
        found[row] = half[row] / factor[row][row]
        for column in range(row):
            half[column] -= factor[row][column] * found[row]
    return found


def read(found: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a file."""
    parts = [(part, *each) for part in PARTS for each in found.get(part, {}).items()]
    for part, operation, known in parts:
        count, paths = len(known["sizes"]), known["paths"]
        for kind, lines in known["kinds"].items():
            flags, _, variant = kind.partition(": ")
            kin = f"{operation} {flags}".rstrip()
            for line in lines:
                sizes, times = line[:count], [*line[count:], *[0] * (2 * len(paths))]
                launched, replayed = times[: len(paths)], times[len(paths) :]
                seconds = _seconds(paths, launched), _seconds(paths, replayed)
                yield Row(kin, variant, tuple(sizes), *seconds, part == "loops", part == "drawn")


def _seconds(paths: Sequence[str], times: Sequence[float]) -> dict[str, float]:
    return {path: 1e-6 * time for path, time in zip(paths, times, strict=False) if time}


@cache
def shipped() -> dict[str, dict[str, Any]]:
    """The files that are installed with the package, by the driver's name of the GPU."""
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json")) if path != PATH]
    return {each["gpu"]: each for each in found}


def estimate(problem: Any, record: Record, how: str, names: Mapping[str, str]) -> Estimate | None:
    """What is expected of ``problem`` by path, ``names`` being those of the record; None where nothing is known."""
    surface = record.surface(problem.recorded_kin, how, len(problem.sizes))
    if surface is None:
        return None
    place, near = surface.near(problem.sizes, problem.variant)
    torch = surface.torch_seconds(problem.sizes, place, near)
    row, measured = surface.nearest(near)
    ratios = surface.ratios(place, near, names)
    paths = {**names, TORCH: TORCH}
    return Estimate(
        {paths[name]: torch * math.exp(ratio) for name, ratio in ratios.items()},
        row,
        {paths[name]: measured[name] for name in ratios if name in measured},
    )


@cache
def of_device(gpu: str, architecture: str, own: Record | None) -> Record | None:
    """What the user measured, what was measured on such a GPU, and what that lacks of others of its architecture.

    Launched one by one, calls wait for a host, which is no property of the GPU: there the times of all count.
    """
    alike = [each for each in shipped().values() if each["architecture"] == architecture]
    rows: dict[tuple[Any, ...], Row] = {}
    for each in sorted(alike, key=lambda each: each["gpu"] != gpu):
        known: dict[str, list[list[float]]] = {}
        for row in rows.values():
            known.setdefault(row.kin, []).append(octaves(row.sizes))
        for row in read(each):
            place = row[:3]
            if (first := rows.get(place)) is not None:
                rows[place] = first._replace(launched=_mean(first.launched, row.launched))
            else:
                sizes = octaves(row.sizes)
                apart = (sum(map(abs, map(sub, sizes, other))) for other in known.get(row.kin, ()))
                counts = min(apart, default=PRIOR.gap) >= PRIOR.gap
                rows[place] = row if counts else row._replace(replayed={})
    found = [*rows.values(), *(() if own is None else own.rows())]
    return Record(found) if found else None


def _mean(one: Mapping[str, float], other: Mapping[str, float]) -> Mapping[str, float]:
    """Of the same call on two hosts, path by path where both timed it; else what one of them timed."""
    both = {path: math.sqrt(time * other[path]) for path, time in one.items() if path in other}
    return both if len(both) > 1 else one or other
