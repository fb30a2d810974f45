"""Weight and bias gradient of a linear layer ``y = x Wᵀ + b``, in one pass over dy.

    dW = dyᵀ x        db = Σ_m dy

Shapes: dy [M, O], x [M, K], dW [O, K], db [O]; the sm90 kernel calls the rows of dW units. A program owns a tile of dW
and loops over rows of dy and x; programs of the first column of tiles also sum dy while its rows are on chip. If there
are fewer tiles than SMs, rows are split: float32 partials, summed in a fixed order by ``kernels.partials`` and rounded
once: no atomics, the same bits every time.

The sm90 kernel of ``matmul`` runs if the plan names it and TMA can read the operands, otherwise the generic one.
"""

from typing import Any

import torch

from .hopper import untransposed
from .launching import Launch, layout_of, prepared
from .matmul import generic, sm90
from .partials import split_size, summed_over_splits
from .tuning import WeightGradientPipeline
from .tuning.grouped_gemm import GroupedTiles


def weight_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: bool,
    splits: int,
    input_precision: str,
    tiles: GroupedTiles,
    pipeline: WeightGradientPipeline | None = None,
    ready: dict[Any, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dW ``[O, K]`` and db ``[O]``, or None without ``bias``, from dy ``[M, O]`` and x ``[M, K]`` of any strides.

    ``ready`` belongs to one prepared call (see ``gemm_gemm.Operands``); dy's layout may change between its executions.
    """

    def prepare() -> tuple[tuple[tuple[int, int], tuple[int] | None], Launch, bool, dict[Any, Any]]:
        shapes = ((dy.shape[1], x.shape[1]), (dy.shape[1],) if bias else None)
        size = split_size(shapes, splits)
        left, right = untransposed(dy), untransposed(x)
        if pipeline is not None and left is not None and right is not None:
            return shapes, sm90.prepare_weight_gradient(left, right, size, splits, pipeline), True, {}
        strides = (size, x.shape[1], 1)
        return shapes, generic.prepare_weight_gradient(dy, x, strides, splits, input_precision, tiles), False, {}

    shapes, launch, on_sm90, sums = prepared(ready, ("weight gradient", bias, *layout_of(dy)), prepare)

    def fill(targets: list[torch.Tensor | None], _: int) -> None:
        launch((dy, x, *targets) if on_sm90 else (dy, x, *targets, None))

    dw, db = summed_over_splits(dy, shapes, splits, fill, sums)
    assert dw is not None
    return dw, db
