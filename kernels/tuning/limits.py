"""What the hardware sets, whatever the kernel: sizes, and which architectures have an instruction."""

MINIMUM_WIDTH = 16  # the smallest inner dimension a matrix instruction takes

CONSUMER_ROWS = 64  # of one group of four warps: the rows of a matrix instruction on Hopper
SHARED_MEMORY = 227 * 1024  # bytes that one program may have on Hopper
BARRIER_BYTES = 1024  # of them, kept for the barriers of all rings
MOST_STAGES = 4  # of a ring, beyond which more did not help


def has_tanh(architecture: str) -> bool:
    """Whether there is an instruction for tanh."""
    return architecture.startswith("sm_")


def starts_early(architecture: str) -> bool:
    """Whether a kernel may be started while the one before it still runs: on NVIDIA's GPUs from Hopper on."""
    return architecture.startswith("sm_") and int(architecture.removeprefix("sm_")) >= 90


def stages_that_fit(lines: int, step: int, buffers: int, most: int = 8, bits: int = 16) -> int:
    """Stages of a ring for which one program has memory beside ``buffers`` of 64 × 64, and no more than ``most``.

    A stage has ``lines`` rows and columns of both operands together, ``step`` elements of ``bits`` bits of the inner
    axis each; those of a buffer have 16 bits.
    """
    free = SHARED_MEMORY - BARRIER_BYTES - 2 * buffers * CONSUMER_ROWS**2
    return min(most, free // (lines * step * bits // 8))


def padded_width(width: int) -> int:
    """The width a kernel works with on chip: the next power of two, at least 16."""
    return max(MINIMUM_WIDTH, 1 << (width - 1).bit_length())


def sm90_width(width: int) -> int:
    """The same for the warp-specialised kernels, which hold up to 256 columns, and 128 bytes at least."""
    return 64 if width <= 64 else 128 if width <= 128 else 256
