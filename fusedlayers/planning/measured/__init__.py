"""Every figure that was measured on a GPU and that planning decides by: thresholds, peak rates and cost figures.

One file per architecture, which is its name: its ``FIGURES`` are found by that alone; architectures without a file take
those of ``other``. Where an operation has no figures, nothing was measured, and auto mode takes torch.

A threshold is a pair: (launched one by one, inside a CUDA graph). It says from which size on the kernels were faster
than torch; rows of thresholds give one for all widths up to their first number, narrowest first, and above the last row
torch was as fast or faster. Costs choose among ways to run, never between kernels and torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules

# The GPUs that a plan may be asked for without one, by the names that users know them by: the name that the driver
# gives, the architecture, and how many SMs there are.
CARDS = {"H100": ("NVIDIA H100 80GB HBM3", "sm_90", 132), "H200": ("NVIDIA H200", "sm_90", 132)}

Threshold = tuple[int, int]
Rows = tuple[tuple[int, Threshold], ...]


@dataclass(frozen=True, kw_only=True)
class GemmGemm:
    """The fused kernels of a GEMM-GEMM or an FFN: hidden elements (batch × M × N) by padded width.

    By (kind, whether gradients are wanted); the kinds are "ffn", "gated ffn" and "gemm_gemm". Of an FFN at most four
    times the width count as hidden units: more of them do not keep more SMs busy. Of an sm90 call with too few rows
    for all SMs, more of them count for less: beyond four times the width, twice as many units for half of that.
    """

    faster_from: Mapping[tuple[str, bool], Rows]
    sm90_faster_from: Mapping[tuple[str, bool], Rows]  # where every kernel of the problem is an sm90 one
    # The same of a training step that is launched one by one and was not compiled; wider ones as all others.
    trained_from: Mapping[str, Rows]
    busy_rows: int
    # By gated, elements of one projection's weights (padded width × N) up to which an sm90 forward pass of an FFN
    # that is launched one by one is faster with any rows.
    weights_of_one_launch: Mapping[bool, int]
    # Wider than this, a gated training step was slower with more than four times the width of hidden units, and where
    # they fill no whole number of tiles.
    widest_of_many: int
    # By gated, (width, share, units): the share of the SMs that tiles of rows must fill; with less the path for wider
    # layers was faster if there are more hidden units, beyond 64 columns in gated training any. Of more tiles than SMs
    # a last wave that is hardly filled makes no difference: that path keeps many times the bytes.
    least_filled: Mapping[bool, tuple[tuple[int, float, int], ...]]
    # A batched GEMM-GEMM with fewer tiles of rows for each SM was slower, however long they take: in sm90 kernels,
    # in generic ones if the number of hidden units is a multiple of 8, and else.
    least_tiles: tuple[float, float, float]
    most_padding: float  # how many times as large its tiles may be as what they hold, with less than two for each SM


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The epilogue path of an FFN: floating-point operations of the products with x, by (gated, training)."""

    faster_from: Mapping[tuple[bool, bool], Threshold]
    least_rows: int
    # In a CUDA graph: of gated forward passes, and of training steps unless torch.compile would fuse them, too.
    recorded_from: int
    # The fewest rows of those, with a projection of up to so many weights, and of a gated forward pass that is launched
    # one by one.
    few_rows: int
    few_rows_weights: int
    least_width: int
    # Torch's product of the hidden, and a kernel for what follows it, were faster than one kernel: for rows of x that
    # start at no multiple of so many elements, from these widths on;
    uneven_from: Mapping[int, int]
    # and without a gate, for rows of at least this width for twice as many elements as there are hidden units, or more.
    few_units_width: int
    # Of its gradient: for such rows of dy, and where each SM has up to so many tiles, of rows of dy narrower than this
    # width and of others.
    uneven_gradient_from: Mapping[int, int]
    few_tiles: tuple[float, float]
    wide_gradient_from: int
    # With adapters, whose products join that kernel alone, torch's path was faster for rows of x or dy that start at no
    # multiple of so many elements, from these widths on, by whether gradients are wanted.
    row_elements: int
    uneven_adapted_from: Mapping[bool, int]


@dataclass(frozen=True, kw_only=True)
class HiddenGradient:
    """Floating-point operations of the hidden gradient, by whether there is a gate."""

    faster_from: Mapping[bool, Threshold]
    least_width: int
    # Without a gate and up to these (O, N) programs that stay in a column of tiles were faster, where as many programs
    # in each column keep at least this share of the SMs busy.
    widest_staying: tuple[int, int]
    least_staying: float


@dataclass(frozen=True, kw_only=True)
class GemmReduce:
    """Elements of the product (batch × M × N) by inner width, for (operation, whether gradients are wanted)."""

    faster_from: Mapping[tuple[str, bool], Rows]
    widest_padded: int  # up to this the same holds at inner widths that kernels pad
    # By whether gradients are wanted: from where on the sum of a product is faster as the product of a sum than in
    # torch; and up to where kernels that are faster than torch are faster than that, too.
    algebraic_from: Mapping[bool, Threshold]
    algebraic_slower_below: int


@dataclass(frozen=True, kw_only=True)
class MaxSim:
    """Similarities (query tokens × document tokens), by whether gradients are wanted."""

    faster_from: Mapping[bool, Threshold]
    widest: int  # inner dimension


@dataclass(frozen=True, kw_only=True)
class WeightGradient:
    """Floating-point operations by whether the bias gradient is wanted, None where torch was always as fast.

    ``faster_from`` and ``most_weights`` speak of a layer's backward pass, the others of calls by themselves.
    """

    faster_from: Mapping[bool, Threshold | None]
    most_weights: int
    alone_faster_from: Threshold
    many_rows: int
    # Of fewer rows, and from these on; by the square of the share that they fill of their tiles.
    most_weights_alone: tuple[int, int]
    narrow: int  # columns of x up to which any number of weights was faster: dy is read once
    summed_from: Threshold  # elements of dy from which a kernel summed them up faster, beside torch's product
    summed_columns: int  # of dy, from which torch's sums were as fast


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Split products, by the sizes of one product; its rows are the tokens."""

    faster_from: Threshold  # bytes of both operands and of the result
    split_faster_from: int  # the same of a product and its sum without gradients, which are two launches
    most_rows: int  # that were measured
    few: int  # rows or columns up to which a split was faster than torch's own
    middle: int  # rows and columns up to which kernels were faster again from a ``long`` inner axis on
    long: int
    many_columns: int  # enough programs without a split, unless each has a ``short`` inner axis or more to add up
    short: int
    few_rows: int  # with more rows than these torch was faster from so many columns on
    wide_columns: int
    unaligned_bytes: int  # of rows that are not aligned, from which kernels were faster than some of torch's
    data_gradient_rows: int  # up to which a data gradient was faster, if it sums over so many elements
    data_gradient_inner: int
    data_gradient_weights: int  # and reads no more weights than these
    # Elements of x and W from which torch's gradients were faster with dz and W padded to whole vectors of columns.
    padded_from: Threshold


@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy:
    """Logits (tokens × classes), by path."""

    faster_from: dict[str, Threshold]
    fewest_classes: int  # a program takes a row, which must be long enough to keep it busy


@dataclass(frozen=True, kw_only=True)
class MoeFFN:
    """Floating-point operations of the forward pass of experts, by whether gradients are wanted."""

    faster_from: Mapping[bool, Threshold]
    row_elements: int  # whole multiples of which rows of weights must have


@dataclass(frozen=True, kw_only=True)
class TileCosts:
    """What an sm90 tile of a weight gradient costs, which the choice among them is made by."""

    clock: float  # of an SM, Hz, under this load
    products_per_cycle: int  # multiply-adds of an SM's matrix unit, in 16 bits
    share_of_peak: float  # that a ring which never runs dry reaches
    bytes_per_cycle: int  # that an SM gets out of the L2 cache while all of them ask
    bytes_per_second: float  # of device memory
    fill_seconds: float  # until the first stage of a program has arrived
    store_bytes_per_second: float  # of one SM, at the end of a tile, when nothing else is done
    reduce_seconds: float  # of the kernel that adds up partials, beside their bytes
    partial_bytes_per_second: float  # of reading partials, mostly out of the L2 cache


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured on the GPUs of one architecture; None where an operation was not.

    ``ceilings`` are peak rates by the device's name, (FLOP/s in 16 bits, bytes/s): large matrix products and device
    copies on random data.
    """

    tile_costs: TileCosts
    ceilings: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    gemm_gemm: GemmGemm | None = None
    epilogue: Epilogue | None = None
    hidden_gradient: HiddenGradient | None = None
    gemm_reduce: GemmReduce | None = None
    maxsim: MaxSim | None = None
    weight_gradient: WeightGradient | None = None
    linear: Linear | None = None
    linear_cross_entropy: LinearCrossEntropy | None = None
    moe_ffn: MoeFFN | None = None


# By architecture, one for each file of this folder.
FIGURES: dict[str, Figures] = {
    found.name: import_module(f"{__name__}.{found.name}").FIGURES for found in iter_modules(__path__)
}
