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


# By (architecture, bits of an element, gated); architectures without a row take that of "other". Two pre-activations
# and their gradients take as many registers as the product: with a gate 128 columns spilled, and 64 with ragged sizes
# where a step has 64 columns of dy.
HIDDEN_GRADIENT_TABLE: dict[tuple[str, int, bool], HiddenGradientTiles] = {
    ("sm_90", 16, False): HiddenGradientTiles(128, 128, 64, 8, 3),
    ("sm_90", 16, True): HiddenGradientTiles(128, 64, 32, 8, 3),
    ("other", 16, False): HiddenGradientTiles(64, 64, 32, 4, 2),
    ("other", 16, True): HiddenGradientTiles(64, 64, 32, 4, 2),
    ("other", 32, False): HiddenGradientTiles(32, 32, 32, 4, 1),
    ("other", 32, True): HiddenGradientTiles(32, 32, 32, 4, 1),
}


def hidden_gradient_tiles(architecture: str, bits: int, gated: bool) -> HiddenGradientTiles:
    """The tiles for operands of ``bits`` bits."""
    return HIDDEN_GRADIENT_TABLE.get((architecture, bits, gated)) or HIDDEN_GRADIENT_TABLE[("other", bits, gated)]
