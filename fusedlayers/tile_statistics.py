"""What :mod:`.closeness` compares: the errors of each 64 x 64 tile of ours and of torch's, in one pass over both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

TILE = 64
# Bounds the float64 temporaries of one step to about 128 MB each, however large the tensors are.
ELEMENTS_PER_STEP = 2**24


@dataclass(frozen=True)
class Populations:
    """Statistics of groups of elements, one entry per group; all float64 on the CPU.

    ``errors`` is the number of independent ones in a group, where it was asked for.
    """

    count: Tensor
    our_max: Tensor
    our_squares: Tensor
    torch_max: Tensor
    torch_squares: Tensor
    reference_max: Tensor
    reference_squares: Tensor
    errors: Tensor

    def whole(self) -> Populations:
        """All groups as one."""
        return self._as_one(lambda statistic: statistic.reshape(-1, 1))

    def matrices(self) -> Populations:
        """The tiles of each matrix as one; those of a row or column of tiles may share their errors."""
        _, rows, columns = self.count.shape
        found = self._as_one(lambda statistic: statistic.flatten(1).T)
        return replace(found, errors=found.errors / max(rows, columns))

    def together(self, draws: int) -> Populations:
        """The groups of all draws as one, each with those in its place; the first dimension is made of the draws."""
        return self._as_one(lambda statistic: statistic.unflatten(0, (draws, -1)))

    def _as_one(self, stacked: Callable[[Tensor], Tensor]) -> Populations:
        """Over the first dimension of the statistics as they are ``stacked``."""
        found = {}
        for each in fields(self):
            statistic = stacked(getattr(self, each.name))
            found[each.name] = statistic.amax(dim=0) if each.name.endswith("_max") else statistic.sum(dim=0)
        return Populations(**found)


def steps(shape: torch.Size, rows_per_step: int) -> list[tuple[slice, slice]]:
    """Slices over (matrices, rows) that cover ``[batch, rows, columns]``, about ``ELEMENTS_PER_STEP`` elements each."""
    batch, rows, columns = shape
    if rows * columns <= ELEMENTS_PER_STEP:
        per_step = max(1, ELEMENTS_PER_STEP // (rows * columns))
        return [(slice(i, i + per_step), slice(None)) for i in range(0, batch, per_step)]
    per_step = max(1, ELEMENTS_PER_STEP // (columns * rows_per_step)) * rows_per_step
    return [(slice(b, b + 1), slice(i, i + per_step)) for b in range(batch) for i in range(0, rows, per_step)]


def tile_statistics(actual: Tensor, torch_result: Tensor, reference: Tensor, *, over_rows: bool = False) -> Populations:
    """Statistics ``[batch, tile rows, tile columns]`` of ``[batch, rows, columns]`` tensors, in one pass over them."""
    batch, rows, columns = actual.shape
    # A matrix narrower than a tile is one tile of its own width: nothing is padded up to 64.
    tile_rows, tile_columns = min(TILE, rows), min(TILE, columns)
    parts: list[tuple[Tensor, ...]] = []
    for matrices, row_range in steps(actual.shape, tile_rows):
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
        statistics.append(_independent_errors(_tiled(truth, tile_rows, tile_columns)) if over_rows else statistics[0])
        parts.append(tuple(statistics))
    shape = (batch, math.ceil(rows / tile_rows), math.ceil(columns / tile_columns))
    # Steps run over matrices first and rows second, so the concatenation is in tile order either way.
    return Populations(
        *(torch.cat([x.flatten() for x in column]).reshape(shape) for column in zip(*parts, strict=True))
    )


def _independent_errors(tiles: Tensor) -> Tensor:
    """How many inner results' errors each tile of a sum over rows holds, of tiles as ``_tiled`` makes them."""
    values = tiles.transpose(2, 3).nan_to_num(0.0, 0.0, 0.0)
    values = values / values.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    sizes = values.square()
    products = values @ values.mT
    summands = _participation(products.diagonal(dim1=-2, dim2=-1).sum(-1), products.square().sum((-2, -1)))
    places = [_participation(size.sum(-1), size.square().sum(-1)) for size in (sizes.sum(-1), sizes.sum(-2))]
    return (summands * torch.minimum(*places)).clamp(min=1.0).cpu()


def _participation(total: Tensor, squares: Tensor) -> Tensor:
    """How many equal ones would have the same sum and the same sum of squares; 0 of nothing."""
    return torch.where(squares > 0, total.square() / squares, 0.0)


def _tiled(matrices: Tensor, tile_rows: int, tile_columns: int) -> Tensor:
    """``[batch, rows, columns]`` zero-padded, as ``[batch, tile row, row inside, tile column, column inside]``."""
    batch, rows, columns = matrices.shape
    padded = torch.nn.functional.pad(matrices, (0, -columns % tile_columns, 0, -rows % tile_rows))
    return padded.reshape(batch, padded.shape[1] // tile_rows, tile_rows, padded.shape[2] // tile_columns, tile_columns)


def _tile_sum(matrices: Tensor, tile_rows: int, tile_columns: int) -> Tensor:
    return _tiled(matrices, tile_rows, tile_columns).sum(dim=(2, 4)).cpu()
