"""The statistics that the rule judges: errors in tiles, in the whole tensor, and over several draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

MAX_ERROR_LIMIT = 2.0
RMS_LIMIT = 1.5
RMS_FLOOR = 1e-6
TILE = 64
FALSE_ALARM = 1e-6
# Bounds the float64 temporaries of one step to about 128 MB each, however large the tensors are.
ELEMENTS_PER_STEP = 2**24


@dataclass(frozen=True)
class Populations:
    """Statistics of groups of elements, one entry per group; all float64 on the CPU."""

    count: Tensor
    our_max: Tensor
    our_squares: Tensor
    torch_max: Tensor
    torch_squares: Tensor
    reference_max: Tensor
    reference_squares: Tensor

    def whole(self) -> Populations:
        """All groups as one."""
        return self._as_one(lambda statistic: statistic.reshape(-1, 1))

    def beside(self, other: Populations) -> Populations:
        """Two draws as one: each group is merged with the other draw's group at the same index."""
        both = {each.name: torch.stack([getattr(self, each.name), getattr(other, each.name)]) for each in fields(self)}
        return Populations(**both)._as_one(lambda statistic: statistic)

    def _as_one(self, stacked: Callable[[Tensor], Tensor]) -> Populations:
        """Merges groups over the first dimension of each ``stacked`` statistic."""
        found = {}
        for each in fields(self):
            statistic = stacked(getattr(self, each.name))
            found[each.name] = statistic.amax(dim=0) if each.name.endswith("_max") else statistic.sum(dim=0)
        return Populations(**found)


def _steps(shape: torch.Size, rows_per_step: int) -> list[tuple[slice, slice]]:
    """Slices over (matrices, rows) that cover ``[batch, rows, columns]``, about ``ELEMENTS_PER_STEP`` elements each."""
    batch, rows, columns = shape
    if rows * columns <= ELEMENTS_PER_STEP:
        per_step = max(1, ELEMENTS_PER_STEP // (rows * columns))
        return [(slice(i, i + per_step), slice(None)) for i in range(0, batch, per_step)]
    per_step = max(1, ELEMENTS_PER_STEP // (columns * rows_per_step)) * rows_per_step
    return [(slice(b, b + 1), slice(i, i + per_step)) for b in range(batch) for i in range(0, rows, per_step)]


def special_value_difference(
    actual: Tensor, torch_result: Tensor, reference: Tensor
) -> tuple[tuple[int, int, int], int] | None:
    """(first index, count) of elements where only one of ours and torch's is NaN, +Inf or -Inf; None without any."""
    first: tuple[int, int, int] | None = None
    count = 0
    for matrices, rows in _steps(actual.shape, TILE):
        ours, theirs = actual[matrices, rows], torch_result[matrices, rows].to(actual.device)
        truth = reference[matrices, rows].to(actual.device)
        if bool((theirs.isfinite() & ~truth.isfinite()).any()):
            raise ValueError("reference: not finite where torch's result is, so it is no reference there")
        different = (ours.isnan() != theirs.isnan()) | (
            (ours.isinf() | theirs.isinf()) & (ours != theirs) & ~ours.isnan()
        )
        found = int(different.sum())
        if found and first is None:
            batch, row, column = (int(i) for i in different.nonzero()[0])
            first = (batch + (matrices.start or 0), row + (rows.start or 0), column)
        count += found
    return None if first is None else (first, count)


def tile_statistics(actual: Tensor, torch_result: Tensor, reference: Tensor) -> Populations:
    """Statistics ``[batch, tile rows, tile columns]`` of ``[batch, rows, columns]`` tensors, in one pass over them."""
    batch, rows, columns = actual.shape
    # A matrix narrower than a tile is one tile of its own width, without padding to 64.
    tile_rows, tile_columns = min(TILE, rows), min(TILE, columns)
    parts: list[tuple[Tensor, ...]] = []
    for matrices, row_range in _steps(actual.shape, tile_rows):
        ours, theirs, truth = (
            x[matrices, row_range].to(actual.device, torch.float64) for x in (actual, torch_result, reference)
        )
        finite = ours.isfinite() & theirs.isfinite()
        zero = torch.zeros((), dtype=torch.float64, device=actual.device)
        statistics = [_tile_sum(finite.to(torch.float64), tile_rows, tile_columns)]
        for value in (ours - truth, theirs - truth, truth):
            magnitude = torch.where(finite, value.abs(), zero)
            statistics.append(_tiled(magnitude, tile_rows, tile_columns).amax(dim=(2, 4)).cpu())
            statistics.append(_tile_sum(magnitude.square(), tile_rows, tile_columns))
        parts.append(tuple(statistics))
    shape = (batch, math.ceil(rows / tile_rows), math.ceil(columns / tile_columns))
    # Steps go over matrices first and rows second, so the concatenation is always in tile order.
    return Populations(
        *(torch.cat([x.flatten() for x in column]).reshape(shape) for column in zip(*parts, strict=True))
    )


def _tiled(matrices: Tensor, tile_rows: int, tile_columns: int) -> Tensor:
    """``[batch, rows, columns]`` zero-padded, as ``[batch, tile row, row inside, tile column, column inside]``."""
    batch, rows, columns = matrices.shape
    padded = torch.nn.functional.pad(matrices, (0, -columns % tile_columns, 0, -rows % tile_rows))
    return padded.reshape(batch, padded.shape[1] // tile_rows, tile_rows, padded.shape[2] // tile_columns, tile_columns)


def _tile_sum(matrices: Tensor, tile_rows: int, tile_columns: int) -> Tensor:
    return _tiled(matrices, tile_rows, tile_columns).sum(dim=(2, 4)).cpu()


def error_ratios(groups: Populations, unit: torch.finfo) -> tuple[Tensor, Tensor]:
    """Our error over torch's for each group, (largest, RMS), after allowing the absolute floor and one rounding."""
    count = groups.count.clamp(min=1)
    our_rms, torch_rms, reference_rms = (
        (squares / count).sqrt() for squares in (groups.our_squares, groups.torch_squares, groups.reference_squares)
    )
    roundoff = unit.eps / 2
    # Below the smallest normal number the spacing is constant, and so is the error of one rounding.
    largest = torch.where(groups.reference_max > 0, groups.reference_max.clamp(min=unit.tiny), groups.reference_max)
    typical = torch.where(reference_rms > 0, reference_rms.clamp(min=unit.tiny), reference_rms)
    rms_roundoff = torch.where(groups.count < TILE * TILE, roundoff, roundoff / math.sqrt(3))
    floor = RMS_FLOOR * reference_rms
    max_yardstick = torch.maximum(groups.torch_max, roundoff * largest)
    rms_yardstick = torch.maximum(torch_rms, rms_roundoff * typical)
    return _ratio(groups.our_max - floor, max_yardstick), _ratio(our_rms - floor, rms_yardstick)


def fractions_of_limits(groups: Populations, unit: torch.finfo, independent: int | None) -> Tensor:
    """For each group the share of its limit that it uses, the larger one of its two limits."""
    max_ratio, rms_ratio = error_ratios(groups, unit)
    share = torch.maximum(max_ratio / MAX_ERROR_LIMIT, rms_ratio / RMS_LIMIT)
    return share / _sample_size_factor(groups.count, independent)


def _ratio(error: Tensor, yardstick: Tensor) -> Tensor:
    """``error / yardstick``; 0 without an error, and infinite for any error if the yardstick is 0."""
    return torch.where(error <= 0, 0.0, error / yardstick)


def _sample_size_factor(count: Tensor, independent: int | None) -> Tensor:
    """The factor ``g`` of the package's docstring; 1 from one full tile on."""
    samples = count.clamp(min=1, max=independent)
    log_chance = math.log(FALSE_ALARM / count.numel())
    factor = torch.exp(-log_chance / (samples / 2).clamp(min=2))
    return torch.where(samples >= TILE * TILE, 1.0, factor)
