"""What every plan knows: the device, its peak rates, dtypes, and the user's switches."""

from dataclasses import dataclass

BACKENDS = ("auto", "triton", "torch")

# Bound of temporary memory, in bytes: the float32 partials of one call.
PARTIALS_LIMIT = 128 * 2**20

# Peak rates, (FLOP/s in 16 bits, bytes/s): large matrix products and device copies measured on random data.
CEILINGS: dict[str, tuple[float, float]] = {"NVIDIA H200": (790e12, 4.3e12)}

SIXTEEN_BITS = ("float16", "bfloat16")
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
KERNEL_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Device:
    """What planning knows of a device: ``kind`` is torch's device type, ``triton`` whether kernels run on it.

    ``avoided`` names the tile configurations that failed the self-test on it.
    """

    kind: str
    name: str = ""
    architecture: str = ""
    processors: int = 1
    triton: bool = False
    pipelined: bool = False  # whether the warp-specialised kernels run on it too
    avoided: frozenset[str] = frozenset()
    why_no_kernels: str = ""  # why no kernel may run although Triton is there


def floor_seconds(flops: int, moved_bytes: int, dtype: str, device: Device) -> float | None:
    """The time no version beats by much, from the device's measured ceilings; None where these are unknown."""
    ceilings = CEILINGS.get(device.name)
    if ceilings is None or dtype not in SIXTEEN_BITS:
        return None
    return max(flops / ceilings[0], moved_bytes / ceilings[1])
