"""The choice between the two kernels, and the sum of the splits."""

from typing import Any, NamedTuple

import torch

from ..hopper import Matrix, untransposed
from ..launching import Launch, layout_of, prepared
from ..matmul import generic, sm90
from ..partials import split_size, summed_over_splits
from ..tuning import WeightGradientPipeline, WeightGradientTiles
from ..tuning.grouped_gemm import GroupedTiles


def weight_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: bool,
    splits: int,
    input_precision: str,
    tiles: WeightGradientTiles,
    pipeline: WeightGradientPipeline | None = None,
    ready: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dW ``[O, K]`` and db ``[O]``, or None without ``bias``, from dy ``[M, O]`` and x ``[M, K]`` of any strides.

    ``ready`` belongs to one prepared call (see ``gemm_gemm.Operands``); dy may lie differently from call to call.
    """
    name = ("weight gradient", bias, *layout_of(dy))
    made = prepared(ready, name, _prepare, dy, x, bias, splits, input_precision, tiles, pipeline)

    def fill(targets: list[torch.Tensor | None], _: int) -> None:
        made.launch((dy, x, *targets) if made.sm90 else (dy, x, *targets, None))

    dw, db = summed_over_splits(dy, made.shapes, splits, fill, made.ready)
    assert dw is not None
    return dw, db


class _Prepared(NamedTuple):
    """What all executions of one prepared call share."""

    shapes: tuple[tuple[int, int], tuple[int] | None]
    launch: Launch
    sm90: bool
    ready: dict[Any, Any]


def _prepare(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: bool,
    splits: int,
    input_precision: str,
    tiles: WeightGradientTiles,
    pipeline: WeightGradientPipeline | None,
) -> _Prepared:
    shapes = ((dy.shape[1], x.shape[1]), (dy.shape[1],) if bias else None)
    size = split_size(shapes, splits)
    matrices = None if pipeline is None else _matrices(dy, x)
    if pipeline is not None and matrices is not None:
        return _Prepared(shapes, sm90.prepare_weight_gradient(*matrices, size, splits, pipeline), True, {})
    blocks = GroupedTiles(tiles.block_o, tiles.block_k, tiles.block_m, tiles.num_warps, tiles.num_stages)
    strides = (size, x.shape[1], 1)
    launch = generic.prepare_weight_gradient(dy, x, strides, splits, input_precision, blocks)
    return _Prepared(shapes, launch, False, {})


def _matrices(dy: torch.Tensor, x: torch.Tensor) -> tuple[Matrix, Matrix] | None:
    """Both as TMA sees them, or None where one does not lie as it needs them."""
    left, right = untransposed(dy), untransposed(x)
    return None if left is None or right is None else (left, right)
