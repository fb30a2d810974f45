"""The backward pass that stores the hidden and its gradient, instead of recomputing them in every kernel.

The forward pass still saves its inputs alone: dZ, dZg and H exist only during the backward pass of the layer. If the
accumulators of all weight gradients do not fit on chip together, this takes fewer products than recomputing: at width
256 forward and backward take 7 GEMM units instead of 10, gated 11 instead of 19.

dx, a plain product of the stored dZ with the weights, is torch's.
"""

from typing import Any

import torch

from ..activations import activation_unit
from ..launching import Launch, layout_of, prepared
from ..partials import split_size, summed_over_splits
from ..tuning import StoredConfig
from . import sm90
from .operands import Operands
from .weight_gradient import Shapes, WeightGradients, gradient_shapes


def stored_gradients(
    operands: Operands,
    dy: torch.Tensor,
    up_bias: bool,
    gate_bias: bool,
    down_bias: bool,
    splits: int,
    config: StoredConfig,
) -> tuple[torch.Tensor, WeightGradients, torch.Tensor | None] | None:
    """(dx, gradients of the weights and of the requested biases, that of the last bias) for operands without a batch.

    None if TMA cannot read an operand, or if a weight is transposed.
    """

    def prepare() -> tuple[Shapes, tuple[int, int, int], Launch, Launch, dict[Any, Any]] | None:
        """(shapes of the gradients, shape of the stored tensor, both launches, cache of the reduction's launch)"""
        matrices = operands.matrices(dy)
        if matrices is None or matrices.up.transposed or matrices.down.transposed:
            return None
        wanted = WeightGradients(True, operands.gate is not None, True, up_bias, gate_bias)
        shapes = (*gradient_shapes(operands, wanted), (operands.down.shape[0],) if down_bias else None)
        return shapes, *sm90.prepare_stored(operands, matrices, split_size(shapes, splits), splits, config), {}

    name = ("stored gradients", up_bias, gate_bias, down_bias, *layout_of(dy))
    made = prepared(operands.ready, name, prepare)
    if made is None:
        return None
    shapes, stored_shape, hidden_gradient, weight_gradients, ready = made
    stored = operands.x.new_empty(stored_shape)
    hidden_gradient(operands.tensors(dy, stored))

    def fill(targets: list[torch.Tensor | None], _: int) -> None:
        weight_gradients((stored, operands.x, dy, stored, *targets))

    *found, d_down_bias = summed_over_splits(operands.x, shapes, splits, fill, ready)
    return _data_gradient(operands, stored), WeightGradients(*found), d_down_bias


def _data_gradient(operands: Operands, stored: torch.Tensor) -> torch.Tensor:
    unit = activation_unit(operands.arithmetic.activation, operands.arithmetic.accuracy)
    # One product for both projections, so that dx is rounded once. Only gated, with an N that is not whole blocks, dZ
    # is copied for it.
    columns, (rows, parts, padded) = operands.up.shape[0], stored.shape
    if parts == 2 or columns == padded:
        dz = stored.as_strided((rows, (parts - 1) * columns), (parts * padded, 1))
    else:
        dz = stored[:, :-1, :columns].reshape(rows, -1)
    weight = operands.up if operands.gate is None else torch.cat((operands.up, operands.gate))
    # With beta=0 only the shape of the first operand matters.
    return torch.addmm(operands.x, dz, weight, beta=0, alpha=unit)
