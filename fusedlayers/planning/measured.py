"""What was measured of kernels beside one another, by architecture: which of them a path takes, never which path.

It lies in ``data/kernels.json``. An architecture that is not in it takes the costs of one that is, and no preference.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "data" / "kernels.json"


@dataclass(frozen=True, kw_only=True)
class TileCosts:
    """What an sm90 tile of a weight gradient costs, which the choice among them is made by."""

    clock: float  # of an SM, Hz, under this load
    products_per_cycle: int  # multiply-adds of an SM's matrix unit, in 16 bits
    share_of_peak: float  # that a ring which never runs dry reaches
    bytes_per_cycle: int  # that an SM gets out of the L2 cache while all of them ask
    bytes_per_second: float  # of device memory
    fill_seconds: float  # until the first stage of a program has arrived
    store_bytes_per_second: float  # of one SM, at the end of a tile, when nothing else is done
    reduce_seconds: float  # of the kernel that adds up partials, beside their bytes
    partial_bytes_per_second: float  # of reading partials, mostly out of the L2 cache


@dataclass(frozen=True, kw_only=True)
class Preferences:
    """Which kernels are faster, of an FFN's epilogue path, of its hidden's gradient, and of a linear layer.

    Torch's product of the hidden, and a kernel for what follows it, are faster than one kernel if rows of x start at no
    multiple of some number of elements and are as wide as ``uneven_from`` says for it; and without a gate if rows of x
    have at least ``few_units_width`` elements, and at most half as many hidden units. Of the hidden's gradient
    ``uneven_gradient_from`` says the same of rows of dy. There torch's product is also faster with up to ``few_tiles``
    for each SM: one number for rows of dy narrower than ``wide_gradient_from``, and one for others.

    Without a gate and up to ``widest_staying`` (O, N), programs that stay in one column of tiles are faster if as many
    programs in each column keep at least the share ``least_staying`` of the SMs busy.

    A kernel of a linear layer with up to ``dependent_rows`` starts while the one before it still runs. From
    ``padded_from`` elements of x and W on (launched one by one, in a CUDA graph), torch's gradients are faster if dz
    and W are padded to whole vectors of columns.
    """

    uneven_from: Mapping[int, int]
    few_units_width: int
    uneven_gradient_from: Mapping[int, int]
    few_tiles: tuple[float, float]
    wide_gradient_from: int
    widest_staying: tuple[int, int]
    least_staying: float
    dependent_rows: int
    padded_from: tuple[int, int]


@cache
def preferences(architecture: str) -> Preferences | None:
    """Those of an architecture; None where nothing was measured."""
    found = _read().get(architecture)
    if found is None:
        return None
    values: dict[str, Any] = {
        name: {int(multiple): width for multiple, width in value.items()} if isinstance(value, dict) else value
        for name, value in found.items()
        if name != "tile_costs"
    }
    return Preferences(**values)


@cache
def tile_costs(architecture: str) -> TileCosts:
    """Those of an architecture, or of the first one that has some."""
    known = _read()
    return TileCosts(**known.get(architecture, next(iter(known.values())))["tile_costs"])


@cache
def _read() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(PATH.read_text())
    return found
