"""GEMM-reduce: kernel, architecture, dtype and inner width -> tile configuration.

Rows of every architecture are conservative ones that were compiled for it.
"""

from dataclasses import dataclass, replace

from .limits import BARRIER_BYTES, CONSUMER_ROWS, SHARED_MEMORY, padded_width, sm90_width


@dataclass(frozen=True)
class Sm90ReduceConfig:
    """The sm90 forward pass: consumers of 64 kept rows each, and two rings.

    ``width`` is the padded inner dimension. A stage of the first ring has kept rows for all consumers, a stage of the
    second ring ``block`` reduced rows. ``in_registers``: consumers load their rows into registers, once for all blocks.
    The kernel is persistent, with at most ``programs`` programs.
    """

    block: int
    width: int
    consumers: int
    kept_stages: int
    stages: int
    in_registers: bool
    programs: int


@dataclass(frozen=True)
class OneHotPipeline:
    """The sm90 gradient of the reduced side of maxima, for MaxSim: consumers of 64 rows each.

    A stage holds ``block`` kept rows of ``width`` columns, padded. Persistent, with at most ``programs`` programs.
    """

    block: int
    width: int
    consumers: int
    stages: int
    programs: int


@dataclass(frozen=True)
class ReduceConfig:
    """Tile of a kernel: kept rows × reduced rows × inner columns, its warps, and the depth of its software pipeline.

    ``sm90`` is the configuration of the sm90 kernel, which runs if TMA can read the operands.
    """

    block_p: int
    block_r: int
    block_k: int
    num_warps: int
    num_stages: int
    sm90: Sm90ReduceConfig | None = None


# (largest padded width, configuration), narrowest first; narrower products take fewer inner columns.
_Rows = tuple[tuple[int, ReduceConfig], ...]
_ANY = 2**31
# By (architecture, bits of an element), as below; architectures without rows of their own take those of "other".
TABLE: dict[tuple[str, int], _Rows] = {
    # In several steps 128 columns of the inner dimension at once spilled registers.
    ("sm_90", 16): (
        (64, ReduceConfig(64, 128, 64, 4, 4)),
        (128, ReduceConfig(64, 128, 128, 4, 3)),
        (_ANY, ReduceConfig(64, 128, 64, 4, 3)),
    ),
    ("other", 16): ((_ANY, ReduceConfig(64, 64, 64, 4, 2)),),
    ("other", 32): ((_ANY, ReduceConfig(64, 64, 32, 4, 2)),),
}
# Rows of the gradients, also by whether they go through an index. The one-hot matrix is then made in registers, and
# more than one stage would serialise the products.
GRADIENT_TABLE: dict[tuple[str, int, bool], _Rows] = {
    ("sm_90", 16, False): (
        (128, ReduceConfig(64, 64, 128, 4, 2)),
        (256, ReduceConfig(64, 32, 256, 4, 2)),
        (_ANY, ReduceConfig(64, 64, 128, 4, 2)),
    ),
    ("sm_90", 16, True): ((256, ReduceConfig(64, 64, 256, 4, 1)), (_ANY, ReduceConfig(64, 64, 128, 4, 1))),
    ("other", 16, False): ((128, ReduceConfig(64, 64, 128, 4, 2)), (_ANY, ReduceConfig(64, 64, 64, 4, 2))),
    ("other", 16, True): ((_ANY, ReduceConfig(64, 64, 128, 4, 1)),),
    ("other", 32, False): ((_ANY, ReduceConfig(32, 32, 64, 4, 1)),),
    ("other", 32, True): ((_ANY, ReduceConfig(32, 32, 64, 4, 1)),),
}


def reduce_config(architecture: str, element_bits: int, width: int) -> ReduceConfig:
    """The tiles of the forward pass for products of inner dimension ``width``."""
    rows = TABLE.get((architecture, element_bits)) or TABLE["other", element_bits]
    return _fitted(rows, padded_width(width))


def reduce_gradient_config(architecture: str, element_bits: int, width: int, indexed: bool) -> ReduceConfig:
    """The tiles of the gradients: ``block_p`` rows of the gradient, ``block_r`` of the axis it sums over.

    An accumulator has ``block_k`` columns of the gradient; wider gradients are distributed over programs, each of which
    computes the first product again. ``indexed`` is the gradient through an index.
    """
    rows = GRADIENT_TABLE.get((architecture, element_bits, indexed)) or GRADIENT_TABLE["other", element_bits, indexed]
    # With 16 columns Triton 3.7 serialised the products of sm_90.
    return _fitted(rows, max(padded_width(width), 32))


# By (architecture, bits of an element): tiles of both gradients at once, for kept rows and columns up to theirs. At 22
# sizes of 65 to 128 kept rows on an H200 a training step took 0.7 to 1.02 of the time of separate gradients.
ONE_PASS_TABLE: dict[tuple[str, int], tuple[ReduceConfig, ...]] = {
    ("sm_90", 16): (
        ReduceConfig(32, 64, 128, 4, 3), ReduceConfig(64, 64, 64, 4, 3), ReduceConfig(64, 64, 128, 4, 3),
        ReduceConfig(128, 128, 128, 8, 2),
    ),
    ("other", 16): (ReduceConfig(32, 64, 128, 4, 1), ReduceConfig(64, 64, 128, 4, 1)),
}  # fmt: skip
# The same if most SMs have one entry, and none has two: a step of (Z, P, R, K) = (128, 64, 1344, 72) takes 61 µs
# instead of 70. Otherwise four warps are faster: 202 instead of 246 for (424, 61, 1560, 104), and 55 instead of 70 with
# four ranges for (64, 34, 1920, 80).
ONE_PASS_ALONE: dict[tuple[str, int, ReduceConfig], ReduceConfig] = {
    ("sm_90", 16, ReduceConfig(64, 64, 128, 4, 3)): ReduceConfig(64, 128, 128, 8, 3),
}


def one_pass_config(architecture: str, element_bits: int, P: int, K: int, alone: bool) -> ReduceConfig | None:
    """The tiles of both gradients at once, of P kept rows and inner dimension K, or None.

    ``alone`` says that there are about as many batch entries as SMs, and no more.
    """
    configs = ONE_PASS_TABLE.get((architecture, element_bits)) or ONE_PASS_TABLE.get(("other", element_bits), ())
    width = max(padded_width(K), 32)
    config = next((one for one in configs if one.block_p >= P and one.block_k >= width), None)
    if config is None:
        return None
    if alone:
        config = ONE_PASS_ALONE.get((architecture, element_bits, config), config)
    return replace(config, block_k=width)


def _fitted(rows: _Rows, padded: int) -> ReduceConfig:
    config = next(config for largest, config in rows if padded <= largest)
    return replace(config, block_k=min(padded, config.block_k))


# From this many reduced rows on blocks of 128 are as fast as blocks of 64, however ragged the last one is.
_LONG = 512


def sm90_reduce_config(P: int, R: int, K: int, sms: int, costly: bool = False) -> Sm90ReduceConfig | None:
    """The sm90 forward pass of P kept rows, R reduced rows and inner dimension K, or None.

    ``costly``: it finds indices or reads a mask, for which four consumers with blocks of 128 have no registers. Each
    configuration is compiled, so there are few. Microseconds on an H200 in bfloat16 for (Z, P, R, K): maxima with four
    consumers 52 (two: 58) for (64, 2048, 2048, 64) and 66 (82) for (128, 4096, 300, 128), a logsumexp 41 (46) for
    (64, 1024, 1024, 128); with indices 51 (47) for the latter, and 113 (131) for (128, 4096, 300, 128). One consumer
    191 (two: 215) for (10000, 32, 300, 128).
    """
    if not 0 < K <= 128 or K % 8:
        return None
    width = sm90_width(K)
    block = 64 if R < _LONG else 128
    if P <= 2 * CONSUMER_ROWS or (costly and block == 128):
        consumers = 1 if P <= CONSUMER_ROWS and block == 64 else 2
    else:
        consumers = 4
    kept_bytes, block_bytes = 2 * consumers * CONSUMER_ROWS * width, 2 * block * width
    # A tile has few blocks: the rows of the next tiles must be loaded early.
    kept_stages = 2 if block == 128 else 4
    room = SHARED_MEMORY - BARRIER_BYTES
    while kept_stages > 1 and (room - kept_stages * kept_bytes) // block_bytes < 3:
        kept_stages -= 1
    stages = min(6, (room - kept_stages * kept_bytes) // block_bytes)
    # Four consumers have no registers for rows beside a block of 128, or beside indices.
    in_registers = block < 128 and not costly
    return Sm90ReduceConfig(block, width, consumers, kept_stages, stages, in_registers, sms)


def one_hot_pipeline(P: int, R: int, K: int, sms: int) -> OneHotPipeline | None:
    """The sm90 gradient of R reduced rows from P kept rows of K columns, or None.

    On an H200 it took 770 µs for (Z, P, R, K) = (32, 32768, 1024, 128), the generic kernel 1500; 60 for
    (64, 1024, 1024, 128), as the generic one.
    """
    if not 0 < K <= 128 or K % 8:
        return None
    width = sm90_width(K)
    block = 64 if P > 32 else 32
    consumers = 1 if R <= CONSUMER_ROWS else 2
    stages = min(6, (SHARED_MEMORY - BARRIER_BYTES - 2 * consumers * CONSUMER_ROWS * width) // (2 * block * width))
    return OneHotPipeline(block, width, consumers, stages, sms)
