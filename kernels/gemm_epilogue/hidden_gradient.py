"""dZ, and with a gate dZg, from dy and the pre-activations, with their sums over rows, and H once more."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..column_sums import column_partials
from ..dropout import NO_DROPOUT, Dropout
from ..hopper import ALIGNMENT, Matrix, matrix, untransposed
from ..launching import Launch, ceil_div, empty_rows, layout_of, prepared
from ..matmul import generic, sm90
from ..matmul.arithmetic import Arithmetic, Named
from ..matmul.low_rank import LowRank
from ..partials import ReduceBlocks, reduce_partials
from ..tuning import BAND_BLOCKS, ColumnSumTiles, EpiloguePipeline, EpilogueTiles, gradients_joined, hidden_stride

_BAND_BLOCKS = ReduceBlocks(*BAND_BLOCKS)


class HiddenGradients(NamedTuple):
    """dz, dz_gate and the hidden ``[M, N]``, db_up and db_gate ``[N]``, db_down ``[O]``; None if not requested."""

    dz: torch.Tensor
    dz_gate: torch.Tensor | None
    db_up: torch.Tensor | None
    db_gate: torch.Tensor | None
    hidden: torch.Tensor | None
    db_down: torch.Tensor | None


def hidden_gradient(
    dy: torch.Tensor,
    w_down: torch.Tensor,
    z: torch.Tensor,
    z_gate: torch.Tensor | None,
    bias: bool,
    row_tiles: int,
    arithmetic: Named,
    tiles: EpilogueTiles,
    pipeline: EpiloguePipeline | None = None,
    keep_hidden: bool = False,
    for_products: bool = False,
    in_place: bool = False,
    sums_into: Sequence[torch.Tensor] = (),
    partials_into: torch.Tensor | None = None,
    hidden_into: torch.Tensor | None = None,
    dropout: Dropout = NO_DROPOUT,
    column_sums: ColumnSumTiles | None = None,
    ready: dict[Any, Any] | None = None,
    low_rank: LowRank | None = None,
    added: torch.Tensor | None = None,
) -> HiddenGradients:
    """The gradients of the pre-activations, with ``bias`` their sums over rows, with ``keep_hidden`` also the hidden.

    With ``column_sums`` also the sums of dy, by these tiles. ``low_rank``'s product and ``added``, contiguous
    ``[M, N]``, are added to dH. If ``tiles.block_inner`` is 0, torch writes dH to the memory of dz, which rules out
    ``in_place``.

    Operands ``[M, *]`` may have any strides. Results are contiguous, unless only products read them (``for_products``):
    then rows begin at memory sectors, and dz and dz_gate may be the halves of one ``[M, 2 N]``: see
    ``gradients_joined``. ``in_place``: they overwrite z and z_gate, whose rows are contiguous, with equal row strides.
    The sums are written to ``sums_into``, of up and of the gate, or to new tensors of dy's dtype; their partials to
    ``partials_into``, a float32 vector, if that is large enough. The hidden is written to ``hidden_into``, contiguous,
    or to a new tensor. A program of the generic kernel computes ``row_tiles`` tiles.

    ``ready`` belongs to one prepared call (see ``gemm_gemm.Operands``), whose options are all but those for what is
    requested and where it goes; dy's layout may change between its executions.
    """
    keep_hidden = keep_hidden or hidden_into is not None
    (rows, _), columns, parts = dy.shape, w_down.shape[1], 1 if z_gate is None else 2

    def prepare() -> _Prepared:
        can_copy = pipeline is not None and dropout.in_whole_draws
        copied = can_copy and untransposed(dy) is None
        left = dy.contiguous() if copied else dy
        stride = hidden_stride(columns, dy.element_size()) if for_products else columns
        joined = for_products and z_gate is not None and gradients_joined(rows, columns, dy.element_size())
        side_by_side = joined and not in_place
        strides = z.stride(0) if in_place else stride * (2 if side_by_side else 1), stride
        how = Arithmetic.of(arithmetic)
        matrices = _matrices(left, w_down, z, z_gate)
        if pipeline is not None and can_copy and matrices is not None:
            launch = sm90.prepare_hidden_gradient(
                *matrices, strides, keep_hidden, bias, how, pipeline, dropout, low_rank
            )  # fmt: skip
            if launch is not None:
                bands = pipeline.bands(rows, columns, z_gate is not None)
                return _Prepared(stride, sums_shape(bands), copied, side_by_side, True, launch, {})
        right = w_down
        if low_rank is not None:
            left, right, _ = low_rank.joined(left, right, None, 0)
        launch = generic.prepare_hidden_gradient(
            left, right, (z, z_gate), strides, how, tiles, row_tiles=row_tiles, dropout=dropout
        )
        bands = ceil_div(ceil_div(rows, tiles.block_m), row_tiles)
        return _Prepared(stride, sums_shape(bands), copied, side_by_side, False, launch, {})

    def sums_shape(bands: int) -> tuple[int, ...] | None:
        if not bias:
            return None
        # Partials also for given tensors, of any layout and dtype, and for two gradients, which must not share memory.
        return (columns,) if bands == parts == 1 and not sums_into else (bands, columns * parts)

    name = ("hidden gradient", bias, keep_hidden, column_sums is not None, bool(sums_into), in_place, *layout_of(dy))
    made = prepared(ready, name, prepare)
    if made.copied:
        # Autograd may pass an expanded or transposed dy: a copy costs less than the generic kernel.
        dy = dy.contiguous()
    d_gate: torch.Tensor | None = None
    if in_place:
        assert tiles.block_inner, "dH needs memory of its own"
        dz, d_gate = z, z_gate
    elif made.side_by_side:
        dz, d_gate = dy.new_empty(rows, 2 * columns).split(columns, 1)
    else:
        dz = empty_rows(dy, rows, columns, made.stride)
        d_gate = None if z_gate is None else empty_rows(dy, rows, columns, made.stride)
    hidden = empty_rows(dy, rows, columns, made.stride) if keep_hidden and hidden_into is None else hidden_into
    # A single band: the kernel's sums are the result, not partials.
    complete = made.sums is not None and len(made.sums) == 1
    sums = None
    if made.sums is not None:
        sums = dy.new_empty(made.sums) if complete else _partials(dy, made.sums, partials_into)
    # First, so that the next kernel finds dy in the L2 cache.
    dy_sums = None if column_sums is None else column_partials(dy, column_sums, made.ready)
    factors: tuple[torch.Tensor | None, ...] = ()
    no_scales: tuple[None, ...] = ()
    if made.sm90:
        no_scales = (None,) * 4
        factors = (None, None) if low_rank is None else low_rank.copied(w_down.stride(1) != 1)[:2]
    else:
        if low_rank is not None:
            dy, w_down, _ = low_rank.joined(dy, w_down, None, 0)
        if not tiles.block_inner:
            torch.mm(dy, w_down, out=dz)
    dense = None, None, None, None  # what rows sorted by expert have
    made.launch((dy, w_down, z, z_gate, dz, d_gate, hidden, *factors, sums, dropout.seed, added, *dense, *no_scales))
    other: tuple[torch.Tensor, torch.Tensor] | None = None
    db_down = dy_sums
    if dy_sums is not None and dy_sums.dim() == 2:
        db_down = dy.new_empty(dy_sums.shape[1])
        other = dy_sums, db_down
    if sums is None or complete:
        if other is not None:
            reduce_partials(other[0], [other[1]], blocks=_BAND_BLOCKS, ready=made.ready)
        return HiddenGradients(dz, d_gate, sums, None, hidden, db_down)
    found = list(sums_into) or [dy.new_empty(columns) for _ in range(parts)]
    reduce_partials(sums, found, blocks=_BAND_BLOCKS, other=other, ready=made.ready)
    return HiddenGradients(dz, d_gate, found[0], found[1] if parts == 2 else None, hidden, db_down)


class _Prepared(NamedTuple):
    """What all executions of one prepared call share.

    ``stride`` is the hidden's row stride, ``sums`` the shape of the partials of bands, or ``[N]`` if the single band
    gives complete sums. ``copied``: dy is copied for TMA. ``side_by_side``: dz and dz_gate are halves of one matrix.
    """

    stride: int
    sums: tuple[int, ...] | None
    copied: bool
    side_by_side: bool
    sm90: bool
    launch: Launch
    ready: dict[Any, Any]


def _partials(dy: torch.Tensor, shape: tuple[int, ...], memory: torch.Tensor | None) -> torch.Tensor:
    """An empty float32 tensor of this shape, in the vector ``memory`` if that is large enough."""
    size = torch.Size(shape).numel()
    if memory is None or memory.shape[0] < size:
        return dy.new_empty(shape, dtype=torch.float32)
    return memory[:size].view(shape)


def _matrices(
    dy: torch.Tensor, w_down: torch.Tensor, z: torch.Tensor, z_gate: torch.Tensor | None
) -> tuple[Matrix, Matrix, Matrix, Matrix | None] | None:
    """The operands as TMA sees them, or None if it cannot read one of them.

    w_down may be transposed.
    """
    left, right, first = untransposed(dy), matrix(w_down), untransposed(z)
    gate = None if z_gate is None else untransposed(z_gate)
    if left is None or right is None or first is None or (z_gate is not None and gate is None):
        return None
    # Rows of the results must be aligned, too.
    if w_down.shape[1] * dy.element_size() % ALIGNMENT:
        return None
    return left, right, first, gate
