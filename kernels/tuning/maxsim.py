"""Late interaction: the tiles of its gradients; the forward pass has those of GEMM-reduce.

Conservative ones that were compiled for every architecture.
"""

from dataclasses import dataclass

from .limits import padded_width

WIDEST_COLUMNS = 128  # of a gradient that one program holds; a wider one is shared out


@dataclass(frozen=True)
class GatherConfig:
    """Tile of the queries' gradient: tokens × columns, and the documents of one step of its loop."""

    block_p: int
    block_k: int
    documents: int
    num_warps: int


@dataclass(frozen=True)
class OneHotConfig:
    """Tile of the documents' gradient: document rows × columns, and the query tokens that join it at once."""

    block_l: int
    block_p: int
    block_k: int
    num_warps: int
    num_stages: int


def gather_config(architecture: str, element_bits: int, width: int) -> GatherConfig:
    """The tiles of the queries' gradient, ``width`` columns."""
    return GatherConfig(8, min(padded_width(width), WIDEST_COLUMNS), 4, 4)


def one_hot_config(architecture: str, element_bits: int, width: int) -> OneHotConfig:
    """The tiles of the documents' gradient, ``width`` columns."""
    columns = min(padded_width(width), WIDEST_COLUMNS)
    if element_bits == 32:
        return OneHotConfig(32, 32, min(columns, 64), 4, 2)
    if architecture == "sm_90":
        return OneHotConfig(64, 64, columns, 4, 3)
    return OneHotConfig(64, 32, min(columns, 64), 4, 2)
