"""The table of dtypes: their width and precision, and the back ends that have kernels for them.

``generic`` kernels are in Triton and run wherever it compiles; ``sm90`` kernels are warp-specialised, for Hopper only.
"""

from dataclasses import dataclass, field

GENERIC = "generic"
SM90 = "sm90"


@dataclass(frozen=True)
class Format:
    """``bits`` of an element (a key of tile tables), the ``backends`` whose kernels support it, its name in Gluon.

    ``accuracy`` is the coarsest one of activations (``kernels.activations``) whose error is below the rounding of a
    result. ``narrow`` formats have fewer bits than the float32 accumulator. Sums that fit float32 may overflow a format
    of ``small_range``. ``scaled`` values mean nothing without a scale: no call takes a plain tensor of them.
    """

    bits: int
    backends: tuple[str, ...] = ()
    gluon: str = ""
    accuracy: str = "exact"
    small_range: bool = False
    scaled: bool = False
    bytes: int = field(init=False)
    narrow: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", self.bits // 8)
        object.__setattr__(self, "narrow", self.bits < 32)


# By torch's name of the dtype.
FORMATS: dict[str, Format] = {
    "float16": Format(16, (GENERIC, SM90), "float16", accuracy="half", small_range=True),
    "bfloat16": Format(16, (GENERIC, SM90), "bfloat16", accuracy="coarse"),
    "float32": Format(32, (GENERIC,), "float32"),
    "float64": Format(64),
    "float8_e4m3fn": Format(8, (SM90,), "float8e4nv", scaled=True),
}
# Stands for dtypes without kernels.
UNKNOWN = Format(32)
KERNEL_DTYPES = tuple(name for name, found in FORMATS.items() if found.backends and not found.scaled)
