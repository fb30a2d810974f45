"""Parameters that are sharded over a device mesh, and the part that a process has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakTensorKeyDictionary

from ..modules import class_name, why_not_plain, why_not_read_past

# Whole parameters that were split, and what they were split into -> a token, one for each whole parameter.
_TOKENS = WeakTensorKeyDictionary()


def check_mesh(mesh: DeviceMesh) -> None:
    """Checks that a mesh has one dimension."""
    if mesh.ndim != 1:
        raise ValueError(f"device_mesh must have one dimension, got {mesh.ndim}: pass one of its submeshes")


def mesh_of(what: str, parameter: Tensor, style: str) -> DeviceMesh:
    """The mesh over which a style has split a parameter."""
    if not isinstance(parameter, DTensor):
        raise TypeError(f"{what} must be a DTensor, as {style} made it, got {class_name(parameter)}")
    return parameter.device_mesh


def replicated(x: Tensor, layout: Placement, mesh: DeviceMesh) -> DTensor:
    """The whole of an input in every process; ``layout`` is its placement, if it is a plain tensor."""
    given = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [layout], run_check=False)
    return given.redistribute(placements=[Replicate()])


def distribute(linear: nn.Module, placements: dict[str, Placement], mesh: DeviceMesh, source: int | None) -> None:
    """Distributes the parameters of a linear over a mesh, under their names; ``source``: the rank that has them."""
    for name, placement in placements.items():
        parameter = getattr(linear, name)
        part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
        split = nn.Parameter(part, parameter.requires_grad)
        _TOKENS[split] = _TOKENS.setdefault(parameter, object())
        linear.register_parameter(name, split)


def were_one(first: Tensor, second: Tensor) -> bool:
    """Whether these were one parameter before :func:`distribute` split it for one of its owners, or for both."""
    return first is not second and first in _TOKENS and _TOKENS[first] is _TOKENS.get(second)


def local_part(whole: DTensor) -> Tensor:
    """The part of a parameter that this process has; gradients flow back to the whole."""
    parts = whole.device_mesh.size()
    uneven = any(isinstance(each, Shard) and whole.shape[each.dim] % parts for each in whole.placements)
    return _UnevenPart.apply(whole) if uneven else whole.to_local()


class _UnevenPart(torch.autograd.Function):
    """The local part of a parameter whose parts differ in size; its gradient has the parameter's placement.

    ``to_local`` guesses the strides of the whole gradient from those of one part, which is right for even parts only.
    Gradients of other strides than their parameter's are copied, and torch 2.11 then replicates them.
    """

    @staticmethod
    def forward(ctx: Any, whole: DTensor) -> Tensor:
        ctx.layout = whole.device_mesh, whole.placements
        ctx.geometry = {"shape": whole.shape, "stride": whole.stride()}
        part = whole.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return DTensor.from_local(gradient, *ctx.layout, run_check=False, **ctx.geometry)


def checked_placement(name: str, layout: Placement | None) -> Placement:
    """A placement, ``Replicate()`` by default."""
    if layout is not None and not isinstance(layout, Placement):
        raise TypeError(f"{name} must be a placement (Replicate(), Shard(1)) or None, got {layout!r}")
    return Replicate() if layout is None else layout


def why_not_local(linear: nn.Module, placements: dict[str, Placement]) -> str | None:
    """Why the local shards of ``linear`` may not be read past its call, or None."""
    if type(linear) is not nn.Linear:
        return why_not_plain(linear)
    if reason := why_not_read_past(linear):
        return reason
    for name, placement in placements.items():
        parameter = getattr(linear, name)
        if not isinstance(parameter, DTensor) or parameter.placements != (placement,):
            return f"has a {name} that is not laid out as {placement}"
    return None
