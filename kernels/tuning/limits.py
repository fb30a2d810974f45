"""Limits of all kernels: sizes, and the instructions of an architecture."""

from functools import cache

MINIMUM_WIDTH = 16  # the smallest inner dimension a matrix instruction takes

CONSUMER_ROWS = 64  # of a consumer (warp group): the rows of one wgmma
SHARED_MEMORY = 227 * 1024  # bytes per CTA on Hopper
BARRIER_BYTES = 1024  # of these, reserved for the mbarriers of all rings
MOST_STAGES = 4  # of a ring: more did not help


def has_tanh(architecture: str) -> bool:
    """Whether the GPU has a tanh instruction."""
    return architecture.startswith("sm_")


def starts_early(architecture: str) -> bool:
    """Whether the GPU has programmatic dependent launch: NVIDIA's from Hopper on."""
    return architecture.startswith("sm_") and int(architecture.removeprefix("sm_")) >= 90


@cache
def stages_that_fit(lines: int, step: int, buffers: int, most: int = 8, bits: int = 16) -> int:
    """Stages of a ring, at most ``most``, that fit into shared memory beside ``buffers`` of 64 × 64 16-bit elements.

    A stage has ``lines`` rows and columns of both operands together, each with ``step`` elements of ``bits`` bits along
    the inner axis.
    """
    free = SHARED_MEMORY - BARRIER_BYTES - 2 * buffers * CONSUMER_ROWS**2
    return min(most, free // (lines * step * bits // 8))


def padded_width(width: int) -> int:
    """The width of a tile on chip: the next power of two, at least 16."""
    return max(MINIMUM_WIDTH, 1 << (width - 1).bit_length())


def sm90_width(width: int) -> int:
    """The same for the sm90 kernels: at least 64 columns (128 bytes), at most 256."""
    return 64 if width <= 64 else 128 if width <= 128 else 256
