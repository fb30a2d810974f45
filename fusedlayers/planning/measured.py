"""The fitted numbers: which of several kernels a path takes, with which tiles and splits.

They choose no path by themselves, with one exception: no record says what products in 8 bits take.

They lie in ``data/kernels.json``, those that were measured together beside ``why``: where and when. Those of ``rules``
hold on every GPU, and the file of a rule says what they mean. An architecture that is not in ``architectures`` takes
the tile costs of one that is, and no preference.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

PATH = Path(__file__).parent / "data" / "kernels.json"

_Numbers = TypeVar("_Numbers")


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

    In a CUDA graph torch's gradients of a linear layer with up to ``data_gradient_first_rows`` are faster if dx comes
    before dW. From ``padded_from`` elements of x and W on (launched one by one, in a CUDA graph), they are faster if dz
    and W are padded to whole vectors of columns.
    """

    uneven_from: Mapping[int, int]
    few_units_width: int
    uneven_gradient_from: Mapping[int, int]
    few_tiles: tuple[float, float]
    wide_gradient_from: int
    widest_staying: tuple[int, int]
    least_staying: float
    data_gradient_first_rows: int
    padded_from: tuple[int, int]


def fitted(rule: str, numbers: type[_Numbers]) -> _Numbers:
    """The ``numbers`` of a rule, a dataclass. The file of the rule calls this once, when it is imported.

    Raises:
        TypeError: a field is not in the data, or the data names another one.
    """
    return numbers(**_values(_read()["rules"][rule]))


@cache
def preferences(architecture: str) -> Preferences | None:
    """Those of an architecture; None where nothing was measured."""
    found = _read()["architectures"].get(architecture)
    return None if found is None else Preferences(**_values(found["preferences"]))


@cache
def tile_costs(architecture: str) -> TileCosts:
    """Those of an architecture, or of the first one that has some."""
    known = _read()["architectures"]
    return TileCosts(**_values(known.get(architecture, next(iter(known.values())))["tile_costs"]))


@cache
def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text())
    return found


def _values(measurements: list[dict[str, Any]]) -> dict[str, Any]:
    """All numbers, without their reasons."""
    return {name: _value(value) for each in measurements for name, value in each.items() if name != "why"}


def _value(value: Any) -> Any:
    # JSON has neither tuples nor keys that are numbers.
    if isinstance(value, dict):
        return {int(key): each for key, each in value.items()}
    return tuple(value) if isinstance(value, list) else value
