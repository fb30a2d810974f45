"""The products of experts: launches of the sm90 kernels if the plan names them and TMA can read the operands.

The operands of a product are tensors, or both are in 8 bits, for which there are sm90 kernels alone: rows with a scale
each, and weights with contiguous scales ``[E, out]``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..dropout import NO_DROPOUT
from ..hopper import ALIGNMENT, Matrix, Scaled, stacked, untransposed
from ..launching import Launch, ceil_div, prepared
from ..matmul import generic, sm90
from ..matmul.arithmetic import Arithmetic
from ..matmul.sm90.ring import HALF, TILE
from ..tuning import EpiloguePipeline
from ..tuning.grouped_gemm import GroupedTiles
from ..tuning.grouped_gemm_pipelines import CooperativePipeline
from .sorting import SortedRows

Operand = Any  # a tensor, or in 8 bits a ``Scaled``

_ALIGNED = "the widths of operands in 8 bits are multiples of 16"


class HiddenGradients(NamedTuple):
    """dZ, dG and w ⊙ H ``[P, N]``, 0 in padding, and partial sums of the gradient of w; None if not requested.

    ``partials`` ``[T, P]``: for every row the sums of dH' ⊙ H over the columns of each tile, without the row's weight.
    """

    dz: torch.Tensor
    dg: torch.Tensor | None
    weighted_hidden: torch.Tensor | None
    partials: torch.Tensor | None


def hidden(
    x: Operand,
    w_up: Operand,
    w_gate: Operand | None,
    b_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    rows: SortedRows,
    keep: bool,
    arithmetic: Arithmetic,
    *,
    gathered: bool,
    tiles: GroupedTiles,
    pipeline: EpiloguePipeline | None = None,
    dtype: torch.dtype | None = None,
    ready: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(H, Z, G) ``[P, N]`` of ``dtype``, None: that of x; contiguous; Z, and G with a gate, only to ``keep``.

    x has the sorted rows ``[P, K]`` if ``gathered``, else tokens ``[M, K]``; weights ``[E, N, K]`` and
    biases ``[E, N]`` are views of any strides. Nothing is written to tiles of padding.
    """
    experts, columns, _ = _values(w_up).shape
    found = _values(x).new_empty(rows.capacity, columns, dtype=dtype)

    def sm90_launch() -> Launch | None:
        if pipeline is None or not gathered or not _storable(columns, found.dtype, rows):
            return None
        left, weights = untransposed(x), _stacked_alike([w_up] if w_gate is None else [w_up, w_gate], pipeline.step)
        if left is None or weights is None:
            return None
        gate = None if w_gate is None else weights[1]
        return sm90.prepare_hidden(
            left, weights[0], gate, columns, keep, arithmetic, pipeline, NO_DROPOUT, experts=experts
        )  # fmt: skip

    def generic_launch() -> Launch:
        assert not isinstance(x, Scaled), _ALIGNED
        return generic.prepare_hidden(
            x, (w_up, w_gate), (b_up, b_gate), rows.capacity, columns, arithmetic, tiles, order=rows.order(gathered)
        )

    launch, on_sm90 = prepared(ready, ("hidden", keep, gathered), _sm90_or_generic, sm90_launch, generic_launch)
    z = torch.empty_like(found) if keep else None
    g = torch.empty_like(found) if keep and w_gate is not None else None
    if on_sm90:
        biases = [None if bias is None else bias.contiguous() for bias in (b_up, b_gate)]
        values, scales = zip(*map(_parts, (x, w_up, w_gate)), strict=True)
        launch((*values, found, z, g, None, None, None, *biases, None, rows.tile_expert, rows.starts, *scales))
    else:
        launch((x, w_up, w_gate, found, z, g, b_up, b_gate, None, rows.tile_expert, rows.slots))
    return found, z, g


def hidden_gradient(
    dy: Operand,
    w_down: Operand,
    z: torch.Tensor,
    g: torch.Tensor | None,
    row_weights: torch.Tensor,
    rows: SortedRows,
    keep_hidden: bool,
    want_weights: bool,
    arithmetic: Arithmetic,
    *,
    in_place: bool,
    tiles: GroupedTiles,
    pipeline: EpiloguePipeline | None = None,
    ready: dict[Any, Any] | None = None,
) -> HiddenGradients:
    """From sorted rows dy ``[P, K]``, w_down ``[E, K, N]``, a view of any strides, and z and g ``[P, N]``.

    In 8 bits w_down has a scale for each of its columns ``[E, N]``, whose elements are contiguous.
    ``row_weights`` ``[P]``, float32, multiply the results of the experts. ``keep_hidden`` requests w ⊙ H,
    ``want_weights`` the partial sums. ``in_place``: dz and dg overwrite z and g.
    """
    (down_values, down_scale), (dy_values, dy_scale) = _parts(w_down), _parts(dy)
    experts, _, columns = down_values.shape

    def sm90_launch() -> Launch | None:
        if pipeline is None or not _storable(columns, z.dtype, rows):
            return None
        down, lefts = _stacked(w_down), _untransposed([dy, z] if g is None else [dy, z, g])
        if down is None or lefts is None or _stacked_alike([down_values.mT], pipeline.step) is None:
            return None
        left, first, *gate = lefts
        return sm90.prepare_hidden_gradient(
            left, down, first, gate[0] if gate else None, (columns, columns), keep_hidden, False, arithmetic, pipeline,
            NO_DROPOUT, experts=experts,
        )  # fmt: skip

    def generic_launch() -> Launch:
        assert not isinstance(dy, Scaled), _ALIGNED
        strides = columns, columns
        return generic.prepare_hidden_gradient(dy, w_down, (z, g), strides, arithmetic, tiles, block=rows.block)

    name = "hidden gradient", keep_hidden, want_weights
    launch, on_sm90 = prepared(ready, name, _sm90_or_generic, sm90_launch, generic_launch)
    dz, dg = (z, g) if in_place else (torch.empty_like(z), None if g is None else torch.empty_like(g))
    weighted = torch.empty_like(z) if keep_hidden else None
    tile_columns = ceil_div(columns, TILE.value if on_sm90 else tiles.block_n)
    partials = row_weights.new_empty(tile_columns, rows.capacity) if want_weights else None
    no_low_rank, starts = ((None, None), rows.starts) if on_sm90 else ((), rows.slots)
    scales = (dy_scale, down_scale, None, None) if on_sm90 else ()
    launch((
        dy_values, down_values, z, g, dz, dg, weighted, *no_low_rank, None, None, None, rows.tile_expert, starts,
        row_weights, partials, *scales,
    ))  # fmt: skip
    return HiddenGradients(dz, dg, weighted, partials)


def product(
    pairs: Sequence[tuple[Operand, Operand]],
    bias: torch.Tensor | None,
    rows: SortedRows,
    input_precision: str,
    *,
    tiles: GroupedTiles,
    pipeline: Any = None,
    dtype: torch.dtype | None = None,
    ready: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """``Σ a wᵀ + bias`` ``[P, out]`` over one or two pairs of contiguous rows a ``[P, in]`` and w ``[E, out, in]``.

    Weights and the bias ``[E, out]`` are views of any strides. Nothing is written to tiles of padding. In 8 bits there
    is one pair, whose product of ``dtype`` is summed in parts, and the pipeline is that of ``scaled_product``.
    """
    [(a, w), *more] = pairs
    if isinstance(a, Scaled):
        return _scaled_product(a, w, bias, rows, pipeline, dtype, ready)
    other, w_other = more[0] if more else (None, None)
    experts, columns, _ = w.shape

    def sm90_launch() -> Launch | None:
        if pipeline is None or not _storable(columns, a.dtype, rows):
            return None
        lefts = _untransposed([left for left, _ in pairs])
        weights = _stacked_alike([right for _, right in pairs], pipeline.step)
        if lefts is None or weights is None or any(left[1:] != lefts[0][1:] for left in lefts):
            return None
        return sm90.prepare_product(lefts[0], weights, columns, experts, pipeline)

    def generic_launch() -> Launch:
        arithmetic = Arithmetic("identity", "exact", input_precision)
        return generic.prepare_product(a, (w, w_other), bias, arithmetic, tiles, order=rows.order())

    launch, on_sm90 = prepared(ready, ("product", len(pairs)), _sm90_or_generic, sm90_launch, generic_launch)
    out = a.new_empty(rows.capacity, columns)
    if on_sm90 and bias is not None:
        bias = bias.contiguous()
    launch((a, w, other, w_other, out, bias, rows.tile_expert, rows.starts if on_sm90 else rows.slots))
    return out


def _scaled_product(
    a: Scaled,
    w: Scaled,
    bias: torch.Tensor | None,
    rows: SortedRows,
    pipeline: Any,
    dtype: torch.dtype | None,
    ready: dict[Any, Any] | None,
) -> torch.Tensor:
    experts, columns, _ = w.values.shape
    found = a.values.new_empty(rows.capacity, columns, dtype=dtype)

    def prepare() -> Launch:
        matrices, right = _untransposed([a, found]), _stacked(w)
        assert matrices is not None, _ALIGNED
        assert right is not None, _ALIGNED
        left, out = matrices
        return sm90.prepare_scaled_product(left, right._replace(transposed=True), out, pipeline, experts=experts)

    bias = None if bias is None else bias.contiguous()
    launch = prepared(ready, "scaled product", prepare)
    launch((a.values, w.values, None, None, found, bias, a.scale, w.scale, rows.tile_expert, rows.starts))
    return found


def weight_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: SortedRows,
    out: torch.Tensor,
    input_precision: str,
    *,
    tiles: GroupedTiles,
    pipeline: CooperativePipeline | None = None,
    order: torch.Tensor | None = None,
    ready: dict[Any, Any] | None = None,
    name: str = "",
) -> None:
    """Fills ``out[e] = a_eᵀ b_e``, a view ``[E, R, C]`` of any strides, from contiguous a ``[P, R]`` and b ``[P, C]``.

    An expert without rows gets zeros. ``order``: the order in which the sm90 kernel computes the experts. ``name``
    distinguishes the gradients of one call in ``ready``.
    """
    a, b, out = _by_rows(a, b, out)
    experts, units, _ = out.shape

    def sm90_launch() -> Launch | None:
        # Padding is 0 in both operands. An expert's units must end at half a tile, where the next one's begin.
        if pipeline is None or rows.block % pipeline.step or units % HALF.value:
            return None
        left, right, gradient = untransposed(a), untransposed(b), stacked(out)
        if left is None or right is None or gradient is None or gradient.transposed:
            return None
        return sm90.prepare_grouped_weight_gradient(left, right, gradient, experts, units, pipeline)

    def generic_launch() -> Launch:
        return generic.prepare_weight_gradient(a, b, out.stride(), experts, input_precision, tiles)

    launch, on_sm90 = prepared(ready, ("weight gradient", name), _sm90_or_generic, sm90_launch, generic_launch)
    launch((a, b, out, rows.starts, order, None) if on_sm90 else (a, b, out, None, rows.starts))


def scaled_weight_gradient(
    a: Scaled,
    b: Scaled,
    rows: SortedRows,
    out: torch.Tensor,
    *,
    pipeline: CooperativePipeline,
    order: torch.Tensor | None = None,
    ready: dict[Any, Any] | None = None,
    name: str = "",
) -> None:
    """The same in 8 bits, from the transposes a ``[R, P]``, with a scale for each expert, and b ``[C, P]``.

    R and C are multiples of 64.
    """
    left, right, out = _by_rows(a.values, b.values, out)
    experts, units, _ = out.shape

    def prepare() -> tuple[Launch, bool]:
        """The launch, and whether it stores into ``out``, of which TMA needs contiguous rows; else that is a copy."""
        direct = stacked(out)
        first, second, gradient = stacked(left.T), stacked(right.T), direct or stacked(out.new_empty(out.shape))
        assert first is not None, _ALIGNED
        assert second is not None, _ALIGNED
        assert gradient is not None, _ALIGNED
        launch = sm90.prepare_grouped_weight_gradient(first, second, gradient, experts, units, pipeline)
        return launch, direct is not None

    launch, direct = prepared(ready, ("weight gradient", name), prepare)
    stored = out if direct else out.new_empty(out.shape)
    launch((left, right, stored, rows.starts, order, a.scale))
    if not direct:
        out.copy_(stored)


def _by_rows(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``aᵀ b = out``, or its transpose: results are stored along contiguous rows."""
    return (b, a, out.mT) if out.stride(1) < out.stride(2) else (a, b, out)


def _sm90_or_generic(
    sm90_launch: Callable[[], Launch | None], generic_launch: Callable[[], Launch]
) -> tuple[Launch, bool]:
    """(the sm90 launch, or if that is None the generic one; whether it is the sm90 one)."""
    launch = sm90_launch()
    return (generic_launch(), False) if launch is None else (launch, True)


def _parts(operand: Operand | None) -> tuple[Any, torch.Tensor | None]:
    """(values, scales), None for absent ones."""
    return operand if isinstance(operand, Scaled) else (operand, None)


def _values(operand: Operand) -> torch.Tensor:
    found: torch.Tensor = _parts(operand)[0]
    return found


def _untransposed(tensors: Sequence[Operand]) -> list[Matrix] | None:
    """All of them as TMA sees them, or None if it cannot read one, or if one is transposed."""
    found = [each for each in map(untransposed, tensors) if each is not None]
    return found if len(found) == len(tensors) else None


def _stacked(weight: Operand) -> Matrix | None:
    """`stacked`, with the stride of contiguous scales."""
    found = stacked(_values(weight))
    return found._replace(scale_stride=1) if found is not None and isinstance(weight, Scaled) else found


def _stacked_alike(weights: Sequence[Operand], step: int) -> list[Matrix] | None:
    """Weights ``[experts, out, in]`` of one product as TMA sees them, or None if their layouts differ.

    The inner axis of transposed weights must be whole steps: past its end the next expert begins.
    """
    found = [each for each in map(_stacked, weights) if each is not None]
    if len(found) < len(weights) or len({(each.transposed, each.step) for each in found}) > 1:
        return None
    return None if found[0].transposed and _values(weights[0]).shape[2] % step else found


def _storable(columns: int, dtype: torch.dtype, rows: SortedRows) -> bool:
    """Whether TMA can store contiguous rows of so many columns, and a tile of rows has a single expert."""
    return columns * dtype.itemsize % ALIGNMENT == 0 and rows.block == TILE.value
