"""One table: kernel, architecture, dtype and width -> tile configuration. Plain data, so that planning needs no Triton.

A width is ``max(K, O)`` padded to a power of two: it decides what fits on chip. Rows of ``sm_90`` were measured on an
H200; rows of other architectures are conservative ones that were compiled for them, not run (``MEASURED`` tells).
"""

from dataclasses import dataclass

MINIMUM_WIDTH = 16  # the smallest inner dimension a matrix instruction takes


@dataclass(frozen=True)
class TileConfig:
    """Tile rows and columns of one kernel, its warps, and the depth of its software pipeline.

    ``passes`` is for weight gradients alone: how many launches share out the gradients, each of which keeps an
    accumulator in registers.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    passes: int = 1


def padded_width(width: int) -> int:
    """The width a kernel works with on chip: the next power of two, at least 16."""
    return max(MINIMUM_WIDTH, 1 << (width - 1).bit_length())


def padded_widths(width: int, out_width: int) -> tuple[int, int]:
    """The widths of x's tile and of y's tile on chip: each padded, and neither below a quarter of the other.

    Triton 3.6 compiles lopsided tiles wrongly on sm_90: 256 by 16 columns with 8 warps gave wrong sums.
    """
    padded, out_padded = padded_width(width), padded_width(out_width)
    return max(padded, out_padded // 4), max(out_padded, padded // 4)


# (largest padded width, configuration), narrowest first; widths above the last row do not fit on chip.
_Rows = tuple[tuple[int, TileConfig], ...]

# Measured at 131072 tokens (width 256: 65536), bfloat16, gelu_tanh, Triton 3.6; microseconds beside the rows that were.
# Left out: configurations that spill registers, those of 64 rows with 8 warps (one came out wrong), and those of 128
# rows and 64 columns where the width is ragged (forward at 256 and the gated data gradient came out wrong there).
_SM_90_16_BIT: dict[str, _Rows] = {
    "forward": (
        (64, TileConfig(128, 32, 4, 3)),  # 40
        (128, TileConfig(128, 32, 8, 3)),  # 105
        (256, TileConfig(64, 32, 4, 2)),  # 223
    ),
    "data_gradient": (
        (64, TileConfig(64, 64, 4, 2)),  # 53
        (128, TileConfig(128, 32, 8, 2)),  # 163
        (256, TileConfig(128, 32, 8, 2)),  # 317
    ),
    "weight_gradient": (
        (64, TileConfig(32, 64, 4, 3)),
        (128, TileConfig(32, 128, 8, 2)),
        (256, TileConfig(64, 64, 8, 2, passes=2)),
    ),
}

# Gated, silu; the same token counts.
_SM_90_16_BIT_GATED: dict[str, _Rows] = {
    "forward": (
        (64, TileConfig(128, 64, 8, 3)),  # 48
        (128, TileConfig(128, 32, 8, 3)),  # 107
        (256, TileConfig(128, 32, 8, 2)),  # 249
    ),
    "data_gradient": (
        (64, TileConfig(64, 32, 4, 3)),  # 69
        (128, TileConfig(64, 32, 4, 2)),  # 215
        (256, TileConfig(128, 32, 8, 2)),  # 334
    ),
    "weight_gradient": (
        (64, TileConfig(32, 64, 4, 3)),  # 101
        (128, TileConfig(64, 128, 8, 2, passes=3)),  # 340
        (256, TileConfig(16, 64, 8, 2, passes=3)),
    ),
}

_SMALL_16_BIT: dict[str, _Rows] = {
    "forward": ((64, TileConfig(64, 32, 4, 2)), (128, TileConfig(64, 32, 4, 2)), (256, TileConfig(32, 32, 4, 1))),
    "data_gradient": ((64, TileConfig(64, 32, 4, 2)), (128, TileConfig(32, 32, 4, 1)), (256, TileConfig(16, 16, 4, 1))),
    "weight_gradient": (
        (64, TileConfig(32, 32, 4, 2)),
        (128, TileConfig(32, 32, 4, 1, passes=2)),
        (256, TileConfig(16, 16, 4, 1, passes=3)),
    ),
}

# IEEE float32 has no matrix instruction: small tiles, so that the operands fit in registers.
_32_BIT: dict[str, _Rows] = {
    "forward": ((64, TileConfig(32, 32, 4, 1)), (128, TileConfig(32, 16, 4, 1))),
    "data_gradient": ((64, TileConfig(32, 32, 4, 1)), (128, TileConfig(16, 16, 4, 1))),
    "weight_gradient": ((64, TileConfig(16, 32, 8, 1)), (128, TileConfig(16, 16, 8, 1))),
}
_32_BIT_GATED: dict[str, _Rows] = {
    "forward": ((64, TileConfig(16, 16, 4, 1)), (128, TileConfig(16, 16, 4, 1))),
    "data_gradient": ((64, TileConfig(16, 16, 4, 1)), (128, TileConfig(16, 16, 8, 1))),
    "weight_gradient": ((64, TileConfig(16, 16, 4, 1)), (128, TileConfig(16, 16, 4, 1))),
}

# (architecture, bits of an element, gated); architectures without rows of their own take those of "other".
TABLE: dict[tuple[str, int, bool], dict[str, _Rows]] = {
    ("sm_90", 16, False): _SM_90_16_BIT,
    ("sm_90", 16, True): _SM_90_16_BIT_GATED,
    ("other", 16, False): _SMALL_16_BIT,
    ("other", 16, True): _SMALL_16_BIT,
    ("other", 32, False): _32_BIT,
    ("other", 32, True): _32_BIT_GATED,
}


def rows(kernel: str, architecture: str, bits: int, gated: bool) -> _Rows:
    """The rows of ``kernel`` for an architecture and operands of ``bits`` bits, narrowest first."""
    return (TABLE.get((architecture, bits, gated)) or TABLE[("other", bits, gated)])[kernel]


def tile_config(kernel: str, architecture: str, bits: int, gated: bool, width: int) -> TileConfig | None:
    """The configuration of ``kernel`` for an unpadded ``width``, the larger of K and O, or None if it does not fit."""
    for largest, config in rows(kernel, architecture, bits, gated):
        if padded_width(width) <= largest:
            return config
    return None
