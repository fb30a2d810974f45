"""Gradient of the pre-activations with its sums over the rows: architecture and dtype -> tiles. Not measured yet."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HiddenGradientTiles:
    """``block_m × block_n`` of dZ at a time, summed over ``block_o`` columns of dy in each step."""

    block_m: int
    block_n: int
    block_o: int
    num_warps: int
    num_stages: int


# By (architecture, bits of an element); architectures without a row take that of "other".
HIDDEN_GRADIENT_TABLE: dict[tuple[str, int], HiddenGradientTiles] = {
    ("sm_90", 16): HiddenGradientTiles(128, 128, 64, 8, 3),
    ("other", 16): HiddenGradientTiles(64, 64, 32, 4, 2),
    ("other", 32): HiddenGradientTiles(32, 32, 32, 4, 1),
}


def hidden_gradient_tiles(architecture: str, bits: int) -> HiddenGradientTiles:
    """The tiles for operands of ``bits`` bits."""
    return HIDDEN_GRADIENT_TABLE.get((architecture, bits)) or HIDDEN_GRADIENT_TABLE[("other", bits)]
