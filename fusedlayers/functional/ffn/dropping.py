"""The dropout of an FFN on torch's path: one kernel where it may be launched, so that no mask is in memory."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from ... import reference
from ...kernels import dropout as kernels
from ...kernels.device import HAS_TRITON, interpreted
from ...kernels.tuning.dtypes import KERNEL_DTYPES
from ..call import PLAIN_TENSORS, observed, transformed
from ..operands import rows

_DTYPES = tuple(getattr(torch, name) for name in KERNEL_DTYPES)


def draw_seed(*tensors: Tensor | None) -> Tensor | None:
    """The seed of one call's dropout, on the device of the first tensor; None where DTensor draws its own masks.

    A DTensor's dropout differs from shard to shard and must be drawn by DTensor itself.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors):
        return None
    first = tensors[0]
    assert first is not None
    if not observed():
        return kernels.draw_seed(first.device)
    with _kept_by_compilers():
        return kernels.draw_seed(first.device)


@contextmanager
def _kept_by_compilers() -> Iterator[None]:
    """What is drawn inside is the same in both passes of a compiled graph, whatever its partitioner recomputes.

    Without a mark torch draws again what it recomputes. MUST_SAVE saves it, except under a memory budget of 0; there
    PREFER_RECOMPUTE restores the generator's state.
    """
    meta = traceback.current_meta
    if "recompute" in meta:  # set by a checkpoint, which restores the state, too
        yield
        return
    meta["recompute"] = CheckpointPolicy.MUST_SAVE if _memory_budget(meta) else CheckpointPolicy.PREFER_RECOMPUTE
    try:
        yield
    finally:
        del meta["recompute"]


def _memory_budget(meta: dict[str, Any]) -> float:
    """The activation memory budget of the graph being traced: that of its region, else of the configuration."""
    key = getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None)
    of_region = (meta.get("custom") or {}).get(key)
    config = sys.modules.get("torch._functorch.config")
    budget: float = getattr(config, "activation_memory_budget", 1.0) if of_region is None else of_region
    return budget


def dropped(values: Tensor, dropout_p: float, seed: Tensor | None, place: tuple[int, int] = (0, 0)) -> Tensor:
    """:func:`reference.dropped`, by one kernel on a GPU, whose backward pass needs only the seed.

    ``place``: (row, 0), where the mask begins.
    """
    if seed is None or not (_has_kernel(values) and _nobody_reads(values, seed)):
        return reference.dropped(values, dropout_p, seed, place)
    if torch.is_grad_enabled() and values.requires_grad:
        return _Dropped.apply(values, seed, dropout_p, place[0])
    return _launched(values, seed, dropout_p, place[0])


def _has_kernel(values: Tensor) -> bool:
    return values.is_cuda and values.dtype in _DTYPES and HAS_TRITON and not interpreted()


def _nobody_reads(values: Tensor, seed: Tensor) -> bool:
    """Whether no trace, transform or batch of gradients is active, which would miss a launch."""
    plain = type(values) in PLAIN_TENSORS and type(seed) in PLAIN_TENSORS and not values.is_neg()
    return plain and not (observed() or transformed(values))


def _launched(values: Tensor, seed: Tensor, dropout_p: float, first_row: int) -> Tensor:
    return kernels.drop(rows(values), seed, dropout_p, first_row).view(values.shape)


class _Dropped(torch.autograd.Function):
    """Dropout is linear: the gradient is dropped by the same mask, and so is the gradient of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seed: Tensor, dropout_p: float, first_row: int) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.mask = dropout_p, first_row
        return _launched(values, seed, dropout_p, first_row)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (seed,), (dropout_p, first_row) = ctx.saved_tensors, ctx.mask
        return dropped(gradient, dropout_p, seed, (first_row, 0)), None, None, None
