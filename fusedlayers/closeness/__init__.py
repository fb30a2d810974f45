"""The one rule for "these numbers are right", used by the tests, by `verify`, and by the benchmark before it times.

Three tensors are compared: ours, torch's result in the same dtype, and a float64 reference. torch's error is the
yardstick:

    max|ours - reference| <= 2.0 * max|torch - reference| + 1e-6 * rms(reference)
    rms(ours - reference) <= 1.5 * rms(torch - reference) + 1e-6 * rms(reference)

for the whole tensor, and again for every 64 x 64 tile of its last two dimensions, so that one bad tile among thousands
fails even if its values are small beside the rest. NaN, +Inf and -Inf must be exactly where torch has them.

torch's error is a sample of a rounding process, and a sample can be lucky: a 1 x 1 tail tile where torch happens to be
exact says nothing about how exact a right kernel must be. Two corrections, small or absent for large tensors, account
for this:

* *One rounding is always allowed.* torch's largest error counts as at least ``u * max|reference|`` and its RMS error as
  at least ``u / sqrt(3) * rms(reference)``, with ``u`` the unit roundoff of the dtype (half of its ``finfo.eps``): the
  error of a single rounding, about what torch shows (0.5 to 0.8 u RMS in bfloat16 and float16, more in float32). Fewer
  elements than one tile use ``u * rms(reference)``: a whole row can share the rounding of the hidden that feeds it.
* *Few elements prove little.* For one element torch's error is ``g`` times smaller than usual, and the reference too,
  with a chance of about ``g ** -2``. Of ``n`` elements about ``n / 4`` are independent, because neighbours share the
  rounding of an inner result, so the chance is ``g ** -max(2, n / 2)`` for all of them. Fewer elements than 64 * 64
  multiply both limits by the ``g`` at which that chance, over all tiles together, is one in a million: 1.07 for 400
  elements, 1.5 for 64, 5.6 for 16, 1000 for 4 and fewer. So a small tail tile is judged loosely alone, and strictly as
  part of the whole.

Single errors can decide a tile, for example in the gradient of a model's embedding, where each row comes from a few
tokens. Then several *draws* can be judged together: results of the same computation for other random inputs, whose
errors at the same position count as those of one larger tile. If there are so many tiles that one of 100,000 is over
its limit by chance, further draws can be judged *again*: a fault stays at its position, chance does not. A tile then
fails if it is over its limit both times, or once over twice its limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .populations import (
    MAX_ERROR_LIMIT,
    RMS_FLOOR,
    RMS_LIMIT,
    TILE,
    Populations,
    error_ratios,
    fractions_of_limits,
    special_value_difference,
    tile_statistics,
)

__all__ = [
    "MAX_ERROR_LIMIT",
    "RMS_FLOOR",
    "RMS_LIMIT",
    "TILE",
    "Closeness",
    "Evidence",
    "assert_all_close",
    "assert_close",
    "compare",
    "compare_all",
    "compare_draws",
    "red",
]


@dataclass(frozen=True)
class Closeness:
    """The verdict of :func:`compare`.

    ``max_error_ratio`` and ``rms_ratio`` are our error over torch's for the whole tensor (limits 2.0 and 1.5, times the
    factor for few elements). ``worst_fraction`` is the largest share of a limit that the whole or a tile used: at most
    1.0 passes. ``worst_tile`` is the index of the tile that used most of its limit: leading dimensions, then tile row
    and tile column (the column alone for one dimension); empty for a scalar, an empty tensor, or another kind of fault.
    ``judged`` is False if the elements are too few to tell a right result from a wrong one; ``ok`` then says nothing.
    """

    name: str
    ok: bool
    max_error_ratio: float
    rms_ratio: float
    worst_fraction: float
    worst_tile: tuple[int, ...]
    message: str
    judged: bool = True


def compare(
    actual: Tensor,
    torch_result: Tensor,
    reference: Tensor,
    *,
    name: str = "result",
    computed_in: torch.dtype | None = None,
    independent: int | None = None,
) -> Closeness:
    """Judge ``actual`` by the rule of this module. Runs on the device of ``actual``; deterministic.

    Args:
        actual: our result, any shape, a floating-point dtype.
        torch_result: torch's result for the same inputs, same shape and dtype as ``actual``.
        reference: the same result, computed in float64.
        name: the name of the result in messages.
        computed_in: the coarsest dtype that the computation rounds to, if that is not the dtype of ``actual`` (a
            float32 gradient of a product that autocast ran in bfloat16). Default: the dtype of ``actual``.
        independent: the number of inner results that the tensor is made of, if that is less than its elements: ``M *
            N`` for an FFN. One token through one hidden unit is one sample of torch's error, whatever the number of
            columns.

    Raises:
        TypeError: ``reference`` is not float64, or ``actual`` is not a floating-point tensor.
        ValueError: ``reference`` has another shape than ``torch_result``, or is not finite where torch is. Another
            shape or dtype of ``actual`` gives a red verdict, not an error.
    """
    evidence = Evidence(name, computed_in)
    evidence.add(actual, torch_result, reference)
    return evidence.verdict(independent)


class Evidence:
    """Collects draws of one result: :func:`compare` for several draws, with one draw in memory at a time.

    Args:
        name, computed_in: as for :func:`compare`.
    """

    def __init__(self, name: str = "result", computed_in: torch.dtype | None = None) -> None:
        self.name, self.computed_in = name, computed_in
        self.draws = 0
        self._shape, self._dtype = torch.Size(), torch.float32
        self._fault: Closeness | None = None
        self._tiles: Populations | None = None

    def add(self, actual: Tensor, torch_result: Tensor, reference: Tensor) -> None:
        """Adds one draw: ours, torch's result and the float64 reference; raises as :func:`compare` does."""
        _check(actual, torch_result, reference, self.name)
        self.draws += 1
        self._shape, self._dtype = actual.shape, actual.dtype
        if self._fault is not None:
            return
        for what, ours, theirs in (
            ("shape", tuple(actual.shape), tuple(torch_result.shape)),
            ("dtype", actual.dtype, torch_result.dtype),
        ):
            if ours != theirs:
                self._fault = red(self.name, f"{what} {ours}, torch has {theirs}")
                return
        if actual.numel() == 0:
            return
        matrix_shape = (1, 1, *actual.shape)[-2:]
        views = [x.detach().reshape(-1, *matrix_shape) for x in (actual, torch_result, reference)]
        special = special_value_difference(*views)
        if special is not None:
            (batch, row, column), count = special
            dimensions = min(actual.dim(), 2)
            index = _index(batch, actual.shape[: actual.dim() - dimensions]) + (row, column)[2 - dimensions :]
            value, torch_value = (float(view[batch, row, column]) for view in views[:2])
            self._fault = red(
                self.name,
                f"NaN/Inf pattern differs from torch's at {count} of {actual.numel()} elements, "
                f"first at {index}{f' of draw {self.draws}' * (self.draws > 1)}: {value}, torch has {torch_value}",
            )
            return
        tiles = tile_statistics(*views)
        self._tiles = tiles if self._tiles is None else self._tiles.beside(tiles)

    def verdict(self, independent: int | None = None, again: Evidence | None = None) -> Closeness:
        """The verdict on all draws together; ``independent`` is for one draw, ``again`` holds further draws."""
        name = self.name
        if self._fault is not None:
            return self._fault
        if self._tiles is None:
            return Closeness(name, True, 0.0, 0.0, 0.0, (), f"{name}: empty, as torch's")
        if again is not None and again._fault is not None:
            return again._fault
        tiles = self._tiles
        whole_max, whole_rms = (float(ratio) for ratio in error_ratios(tiles.whole(), self._unit))
        whole_share, fractions = self._shares(independent)
        if again is not None:
            second_whole, second = again._shares(independent)
            whole_share, fractions = _both_times(whole_share, second_whole), _both_times(fractions, second)
        whole_fraction = float(whole_share)
        tile_fraction = float(fractions.max())
        spot = tuple(int(i) for i in torch.unravel_index(fractions.argmax(), fractions.shape))
        worst_tile = _index(spot[0], self._shape[:-2]) + spot[3 - min(len(self._shape), 2) :]
        ok = max(whole_fraction, tile_fraction) <= 1.0
        message = (
            f"{name}: {'close' if ok else 'NOT close'}; max error {whole_max:.3g} x torch's (limit {MAX_ERROR_LIMIT}), "
            f"RMS error {whole_rms:.3g} x torch's (limit {RMS_LIMIT}), "
            f"worst 64 x 64 tile {worst_tile} at {tile_fraction:.3g} of its limit"
        )
        if not ok:
            message += (
                f": max error {float(tiles.our_max[spot]):.3g}, torch's {float(tiles.torch_max[spot]):.3g}, "
                f"largest value {float(tiles.reference_max[spot]):.3g}; "
                f"{int((fractions > 1.0).sum())} of {fractions.numel()} tiles over; "
                f"shape {tuple(self._shape)}{f' in {self.draws} draws' * (self.draws > 1)}"
                f"{'' if again is None else f', again in {again.draws}'}, {self._dtype}"
            )
        return Closeness(name, ok, whole_max, whole_rms, max(whole_fraction, tile_fraction), worst_tile, message)

    def _shares(self, independent: int | None) -> tuple[Tensor, Tensor]:
        """The shares of their limits that the whole tensor and each tile use."""
        assert self._tiles is not None
        samples = None if independent is None else max(1, independent * self.draws)
        whole = fractions_of_limits(self._tiles.whole(), self._unit, samples)
        return whole, fractions_of_limits(self._tiles, self._unit, samples)

    @property
    def _unit(self) -> torch.finfo:
        return torch.finfo(self.computed_in or self._dtype)


# Above this multiple of a limit a single draw shows a fault, not chance.
_NO_CHANCE = 2.0


def _both_times(first: Tensor, second: Tensor) -> Tensor:
    """The smaller share of a limit, or the larger one if it is above ``_NO_CHANCE``."""
    more = torch.maximum(first, second)
    return torch.where(more > _NO_CHANCE, more, torch.minimum(first, second))


def _check(actual: Tensor, torch_result: Tensor, reference: Tensor, name: str) -> None:
    if reference.dtype != torch.float64:
        raise TypeError(f"reference: expected float64, got {reference.dtype} (comparing {name})")
    if not actual.is_floating_point():
        raise TypeError(f"actual: expected a floating-point tensor, got {actual.dtype} (comparing {name})")
    if reference.shape != torch_result.shape:
        raise ValueError(
            f"reference: expected torch's shape {tuple(torch_result.shape)}, got {tuple(reference.shape)} "
            f"(comparing {name})"
        )


def assert_close(
    actual: Tensor,
    torch_result: Tensor,
    reference: Tensor,
    name: str = "result",
    *,
    computed_in: torch.dtype | None = None,
    independent: int | None = None,
) -> Closeness:
    """:func:`compare` that raises ``AssertionError``, with the verdict's message, if the verdict is red."""
    verdict = compare(actual, torch_result, reference, name=name, computed_in=computed_in, independent=independent)
    if not verdict.ok:
        raise AssertionError(verdict.message)
    return verdict


Results = Mapping[str, Tensor | None]


def compare_all(
    actual: Results,
    torch_results: Results,
    references: Results,
    *,
    computed_in: torch.dtype | None = None,
    independent: int | None = None,
) -> dict[str, Closeness]:
    """:func:`compare` for every entry (``y``, ``dx``, ``dw_up`` ...); the gradient of a frozen input is ``None``.

    Raises:
        ValueError: the mappings have different keys, or an entry is ``None`` in only one of ``torch_results`` and
            ``references``.
    """
    return compare_draws([(actual, torch_results, references)], computed_in=computed_in, independent=independent)


def compare_draws(
    draws: Iterable[tuple[Results, Results, Results]],
    *,
    again: Iterable[tuple[Results, Results, Results]] = (),
    computed_in: torch.dtype | None = None,
    independent: int | None = None,
) -> dict[str, Closeness]:
    """:func:`compare_all` for several draws together, and for further draws ``again``, one in memory at a time.

    ``independent`` is for one draw. Raises as :func:`compare_all` does.
    """
    evidence, reds = _evidence(draws, computed_in)
    further, more_reds = _evidence(again, computed_in)
    return {name: each.verdict(independent, further.get(name)) for name, each in evidence.items()} | more_reds | reds


def _evidence(
    draws: Iterable[tuple[Results, Results, Results]], computed_in: torch.dtype | None
) -> tuple[dict[str, Evidence], dict[str, Closeness]]:
    """The evidence of all draws for each result, and a red verdict for each gradient that only one side has."""
    evidence: dict[str, Evidence] = {}
    reds: dict[str, Closeness] = {}
    for actual, torch_results, references in draws:
        if not actual.keys() == torch_results.keys() == references.keys():
            raise ValueError(
                "actual, torch_results, references: expected the same keys, "
                f"got {sorted(actual)}, {sorted(torch_results)}, {sorted(references)}"
            )
        for name, ours in actual.items():
            theirs, truth = torch_results[name], references[name]
            if (theirs is None) != (truth is None):
                raise ValueError(f"references: {name} must be None exactly where torch's result is None")
            if ours is not None and theirs is not None and truth is not None:
                evidence.setdefault(name, Evidence(name, computed_in)).add(ours, theirs, truth)
            elif (ours is None) != (theirs is None):
                have, has = ("None" if each is None else "a tensor" for each in (ours, theirs))
                reds[name] = red(name, f"{have}, torch has {has}")
    return evidence, reds


def assert_all_close(
    actual: Results,
    torch_results: Results,
    references: Results,
    *,
    computed_in: torch.dtype | None = None,
    independent: int | None = None,
) -> dict[str, Closeness]:
    """:func:`compare_all` that raises one ``AssertionError`` with the message of every red verdict, if there is any."""
    verdicts = compare_all(actual, torch_results, references, computed_in=computed_in, independent=independent)
    red = [verdict.message for verdict in verdicts.values() if not verdict.ok]
    if red:
        raise AssertionError("\n".join(red))
    return verdicts


def red(name: str, reason: str) -> Closeness:
    """A red verdict for another reason than the size of an error."""
    return Closeness(name, False, math.inf, math.inf, math.inf, (), f"{name}: NOT close; {reason}")


def _index(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of the ``position``-th element in this shape."""
    index: list[int] = []
    for size in reversed(shape):
        position, within = divmod(position, size)
        index.insert(0, within)
    return tuple(index)
