"""Late interaction: the tiles of its gradients, conservative ones; the forward pass has those of GEMM-reduce."""

from dataclasses import dataclass, replace

from .gemm_reduce import OneHotPipeline
from .limits import padded_width

WIDEST_COLUMNS = 128  # of a gradient per program


@dataclass(frozen=True)
class GatherConfig:
    """Tile of the queries' gradient: tokens × columns, and documents per step."""

    block_p: int
    block_k: int
    documents: int
    num_warps: int


@dataclass(frozen=True)
class OneHotConfig:
    """Tile of the documents' gradient: document rows × columns, and query tokens per step.

    ``sm90`` is the configuration of the sm90 kernel, which runs for padded documents if TMA can read the queries.
    """

    block_l: int
    block_p: int
    block_k: int
    num_warps: int
    num_stages: int
    sm90: OneHotPipeline | None = None


# By (architecture, bits of an element); architectures without a row take that of "other". Narrower gradients take fewer
# columns.
TABLE: dict[tuple[str, int], OneHotConfig] = {
    ("sm_90", 16): OneHotConfig(64, 64, WIDEST_COLUMNS, 4, 3),
    ("other", 16): OneHotConfig(64, 32, 64, 4, 2),
    ("other", 32): OneHotConfig(32, 32, 64, 4, 2),
}


def gather_config(architecture: str, element_bits: int, width: int) -> GatherConfig:
    """The tiles of the queries' gradient, ``width`` columns."""
    return GatherConfig(8, min(padded_width(width), WIDEST_COLUMNS), 4, 4)


def one_hot_config(architecture: str, element_bits: int, width: int) -> OneHotConfig:
    """The tiles of the documents' gradient, ``width`` columns."""
    config = TABLE.get((architecture, element_bits)) or TABLE["other", element_bits]
    return replace(config, block_k=min(padded_width(width), config.block_k))
