"""What every plan knows: the device, its peak rates, dtypes, and the user's switches."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.tuning.dtypes import FORMATS, GENERIC, SM90, UNKNOWN
from . import measured, record
from .measured import Preferences, TileCosts
from .record import Record

BACKENDS = ("auto", "triton", "torch")

# Bound of temporary memory, in bytes: the float32 partials of one call.
PARTIALS_LIMIT = 128 * 2**20

_RATED_BITS = 16  # of the operands that peak rates are on record for


@dataclass(frozen=True)
class Device:
    """What planning knows of a device: ``kind`` is torch's device type, ``triton`` whether kernels run on it.

    ``triton_release`` is that of the compiler, whose default is the one that everything on record was measured with.
    ``avoided`` names the tile configurations that failed the self-test on it, ``calibration`` is what was measured on
    it, and ``left_to_torch`` why auto mode takes no kernel on it. ``release_note`` is what is to be said of a compiler
    that is not known, which is ``untested`` until auto mode would take a kernel for the first time.
    """

    kind: str
    name: str = ""
    architecture: str = ""
    sms: int = 1
    triton: bool = False
    backend: str = GENERIC  # whose kernels run on it, besides the generic ones, which run everywhere
    triton_release: tuple[int, ...] = (3, 6)
    avoided: frozenset[str] = frozenset()
    calibration: Record | None = None
    override: Record | None = None  # what is known in place of all that is on record
    left_to_torch: str = ""
    release_note: str = ""
    untested: bool = False
    why_no_kernels: str = ""  # why no kernel may run although Triton is there

    def backend_for(self, dtype: str) -> str:
        """The back end whose kernels take operands of ``dtype`` on it: its own, or the generic one."""
        return self.backend if self.backend in FORMATS.get(dtype, UNKNOWN).backends else GENERIC

    @property
    def record(self) -> Record | None:
        """What was measured on it, and on GPUs like it; None where nothing was.

        What is shipped was measured in the kernels of the architecture, and says nothing of the generic ones.
        """
        if self.override is not None:
            return self.override
        return record.of_device(self.name, self.architecture if self.backend != GENERIC else "", self.calibration)

    @property
    def preferences(self) -> Preferences | None:
        """What was measured of kernels beside one another on GPUs of this architecture."""
        return measured.preferences(self.architecture)

    @property
    def tile_costs(self) -> TileCosts:
        """What tiles cost on GPUs of this architecture, or on others."""
        return measured.tile_costs(self.architecture)

    @property
    def ceilings(self) -> tuple[float, float] | None:
        """Its peak rates, (FLOP/s in 16 bits, bytes/s), where they are on record."""
        found = record.shipped().get(self.name)
        return None if found is None else tuple(found["ceilings"])


# Descriptions of GPUs that are not there. Nothing that a user's own machine measured is in them, and the compiler is
# the one that everything on record was measured with.
CARDS = {
    each["card"]: Device("cuda", each["gpu"], each["architecture"], sms=each["sms"], triton=True, backend=SM90)
    for each in record.shipped().values()
}


def card(name: str) -> Device:
    """The description of a GPU by its name.

    Raises:
        ValueError: no GPU of that name is described; the message names those that are.
    """
    if not isinstance(name, str) or name not in CARDS:
        raise ValueError(f"on must be the name of a GPU, one of {', '.join(CARDS)}; got {name!r}")
    return CARDS[name]


def filling_splits(programs: int, at_once: int, most: int, partial_bytes: int) -> int:
    """Splits of each of these ``programs`` that run ``at_once``: at least one, at most ``most``, bounded partials."""
    return max(1, min(at_once // max(programs, 1), most, PARTIALS_LIMIT // max(partial_bytes, 1)))


def splits_of_full_waves(tiles: int, at_once: int, most: int) -> tuple[int, ...]:
    """One split of every tile, then those at which one more would need one more wave of programs, up to four waves."""
    found: tuple[int, ...] = (1,)
    for waves in (1, 2, 3, 4):
        splits = waves * at_once // tiles
        if splits > most:
            splits = most
        if splits > found[-1]:
            found += (splits,)
    return found


def floor_seconds(flops: int, moved_bytes: int, dtype: str, device: Device) -> float | None:
    """The time no version beats by much, from the device's measured ceilings; None where these are unknown."""
    ceilings = device.ceilings
    if ceilings is None or FORMATS.get(dtype, UNKNOWN).bits != _RATED_BITS:
        return None
    return max(flops / ceilings[0], moved_bytes / ceilings[1])
