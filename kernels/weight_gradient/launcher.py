"""The choice between the two kernels, and the sum of the splits."""

import torch

from ..hopper import Matrix, matrix
from ..partials import summed_over_splits
from ..tuning import WeightGradientPipeline, WeightGradientTiles
from . import pipelined
from .portable import launch_weight_gradient


def weight_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: bool,
    splits: int,
    input_precision: str,
    tiles: WeightGradientTiles,
    pipeline: WeightGradientPipeline | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dW ``[O, K]`` and db ``[O]``, or None without ``bias``, from dy ``[M, O]`` and x ``[M, K]`` of any strides."""
    matrices = None if pipeline is None else _matrices(dy, x)

    def fill(targets: list[torch.Tensor | None], split_size: int) -> None:
        if pipeline is not None and matrices is not None:
            pipelined.launch_weight_gradient(*matrices, targets, split_size, splits, pipeline)
        else:
            launch_weight_gradient(dy, x, targets, split_size, splits, input_precision, tiles)

    shapes = ((dy.shape[1], x.shape[1]), (dy.shape[1],) if bias else None)
    dw, db = summed_over_splits(dy, shapes, splits, fill)
    assert dw is not None
    return dw, db


def _matrices(dy: torch.Tensor, x: torch.Tensor) -> tuple[Matrix, Matrix] | None:
    """Both as the copy engine sees them, or None where one does not lie as it needs them."""
    left, right = matrix(dy), matrix(x)
    if left is None or right is None or left.transposed or right.transposed:
        return None
    return left, right
