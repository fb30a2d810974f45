"""Linear layers that tensor parallelism has split: each process computes the product of the parts that it has."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class Parts(NamedTuple):
    """Local parts of the operands of a linear layer, and on which mesh their products are what part of y."""

    operands: tuple[Tensor, Tensor, Tensor | None]  # x, weight and bias
    mesh: Any
    placement: Any

    def joined(self, y: Tensor) -> Tensor:
        """The DTensor of which each process has its product ``y``."""
        module: Any = sys.modules["torch.distributed.tensor"]
        return cast(Tensor, module.DTensor.from_local(y, self.mesh, [self.placement], run_check=False))


def parts_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Parts | None:
    """The parts from which each process can compute its part of ``x Wᵀ + b``; None if there are none.

    A weight ``[N, K]`` that is split by rows, as by torch's ``ColwiseParallel``, takes all of x, and gives parts of the
    columns of y. One that is split by columns, as by ``RowwiseParallel``, takes parts of the columns of x, and gives
    terms of y. Parts are of equal size.
    """
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(weight, module.DTensor) or not isinstance(x, module.DTensor):
        return None
    mesh, last = weight.device_mesh, x.dim() - 1
    split = {(module.Shard(0),): 0, (module.Shard(1),): 1}.get(weight.placements)
    if split is None or x.device_mesh != mesh or weight.shape[split] % mesh.size():
        return None
    by_rows = split == 0
    of_x = module.Replicate() if by_rows else module.Shard(last)
    of_bias = module.Shard(0) if by_rows else module.Replicate()
    if x.placements != (of_x,) or (bias is not None and getattr(bias, "placements", None) != (of_bias,)):
        return None
    # From its part of the columns of dy each process computes a term of the gradient of x.
    part = x.to_local(grad_placements=[module.Partial()] if by_rows else None)
    if type(part) is not Tensor:
        part = _Waited.apply(part)
    local = None if bias is None else cast(Any, bias).to_local()
    if local is not None and not by_rows:
        local = OnOneProcess.apply(local, mesh.get_local_rank() == 0)
    return Parts((part, weight.to_local(), local), mesh, module.Shard(last) if by_rows else module.Partial())


class _Waited(torch.autograd.Function):
    """What a collective that may still be running fills, once it is there: torch's styles gather x like that."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return cast(Any, part).wait() if hasattr(part, "wait") else part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OnOneProcess(torch.autograd.Function):
    """A bias that only one process adds to their sum; each of them has its whole gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, here: bool) -> Tensor:
        return bias.view_as(bias) if here else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
