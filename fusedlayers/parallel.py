"""Tensor parallelism of a `FusedFFN`, in torch's own words: a ``ParallelStyle`` for ``parallelize_module``.

DDP and FSDP2 need nothing from here: the weights that they give to a forward pass are plain tensors.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from . import functional
from .modules import FusedFFN, class_name, say_once, why_not_now, why_not_plain, why_not_read_past

__all__ = ["FusedFFNParallel", "TensorParallelFFN"]


class FusedFFNParallel(ParallelStyle):
    """Splits the hidden of a `FusedFFN` over the P processes of a device mesh (Shoeybi et al., 2019, "Megatron-LM").

    Each process keeps N / P rows of ``up_proj`` and ``gate_proj`` and as many columns of ``down_proj``, as DTensors
    under the same keys, and runs :func:`fusedlayers.functional.ffn` on them, in kernels where it is planned so. The
    results are summed by one all-reduce, or by a reduce-scatter where ``output_layouts`` is a ``Shard``: with
    ``Shard(1)`` on both sides tokens are split outside of the block (sequence parallelism). Dropout of the hidden draws
    another mask in every process, as long as all start from the same ``torch.manual_seed`` or each from its own.

        parallelize_module(model, mesh, {"blocks.*.feed_forward": FusedFFNParallel()})

    Args:
        input_layouts: how the input ``[*B, M, K]`` lies on the mesh, if it is no DTensor. Default: ``Replicate()``.
            Plain tensors that are sharded have one shape in all processes.
        output_layouts: how the result, and the residual if there is one, lie on the mesh. Default: ``Replicate()``.
        use_local_output: whether the result is the local tensor or a DTensor.

    Raises:
        TypeError: a layout is no placement, or the module is not exactly a `FusedFFN`.
        ValueError: the mesh has more than one dimension, or a linear child is no longer plain.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = _placement("input_layouts", input_layouts)
        self.output_layouts = _placement("output_layouts", output_layouts)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not FusedFFN:
            raise TypeError(f"module must be exactly a FusedFFN, got a {class_name(module)}")
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh must have one dimension, got {device_mesh.ndim}: pass one of its submeshes")
        if reason := module.ffn_pieces().why_not_plain():
            raise ValueError(f"module cannot be split: {reason}")
        for linear, placements in _layouts(module):
            for name, placement in placements.items():
                parameter = getattr(linear, name)
                whole = parameter.detach()
                part = distribute_tensor(whole, device_mesh, [placement], src_data_rank=self.src_data_rank)
                linear.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
        module.__class__ = TensorParallelFFN
        assert isinstance(module, TensorParallelFFN)
        module.style = self
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class TensorParallelFFN(FusedFFN):
    """What `FusedFFNParallel` makes of a `FusedFFN`: parameters and keys stay, its forward runs on the local shards.

    Children that hold something else than these shards (LoRA, hooks, ...) are called with DTensors, without fusing.
    """

    style: FusedFFNParallel

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call would call the children, or None if ``functional.ffn`` would run on the local shards."""
        for linear, placements in _layouts(self):
            if reason := _why_not_local(linear, placements):
                return f"a linear child {reason}"
        return why_not_now(*(tensor for tensor in tensors if not isinstance(tensor, DTensor)))

    def call_arguments(self, x: Tensor, residual: Tensor | None = None) -> dict[str, Any]:
        """The arguments that ``forward`` gives to ``functional.ffn``: the residual is added to the sum, not there."""
        arguments = self.ffn_pieces().arguments(x, None, self.recompute)
        # Every process turns the whole gradient of y into its own share of the gradient of x.
        arguments["x"] = self._replicated(x).to_local(grad_placements=[Partial()])
        for name, value in arguments.items():
            if isinstance(value, DTensor):
                arguments[name] = _UnevenPart.apply(value) if _is_uneven(value) else value.to_local()
        if arguments["b_down"] is not None:
            arguments["b_down"] = _OnOneProcess.apply(arguments["b_down"], self._mesh().get_local_rank() == 0)
        return arguments

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The FFN of x ``[*B, M, K]``, plus ``residual`` ``[*B, M, K]`` if given, as the style lays them out.

        Raises:
            TypeError, ValueError: x does not fit the weights; the message names it.
        """
        layout = self.style.output_layouts
        if (reason := self.why_called(x, residual)) is None:
            arguments = self.call_arguments(x)
            if arguments["dropout_p"]:
                arguments["dropout_seed"] = self._dropout_seed(arguments["x"].device)
            y = self._laid_out(functional.ffn(**arguments), Partial())
        else:
            say_once(self, reason)
            y = self._called(x)
        y = y.redistribute(placements=[layout])
        if residual is not None:
            added = residual if isinstance(residual, DTensor) else self._laid_out(residual, layout)
            y = cast(DTensor, y + added.redistribute(placements=[layout]))
        return y.to_local() if self.style.use_local_output else y

    def _called(self, x: Tensor) -> DTensor:
        y = super().forward(self._replicated(x))
        assert isinstance(y, DTensor)
        return y

    def _mesh(self) -> DeviceMesh:
        weight = self.down_proj.weight
        if not isinstance(weight, DTensor):
            raise TypeError(
                f"down_proj.weight must be a DTensor, as FusedFFNParallel made it, got {class_name(weight)}"
            )
        return weight.device_mesh

    def _replicated(self, x: Tensor) -> DTensor:
        given = x if isinstance(x, DTensor) else self._laid_out(x, self.style.input_layouts)
        return given.redistribute(placements=[Replicate()])

    def _laid_out(self, tensor: Tensor, layout: Placement) -> DTensor:
        return DTensor.from_local(tensor, self._mesh(), [layout], run_check=False)

    def _dropout_seed(self, device: torch.device) -> Tensor:
        # All processes draw the seeds of all, so that generators which were equal stay so.
        mesh = self._mesh()
        seeds = torch.randint(2**63 - 1, (mesh.size(),), dtype=torch.int64, device=device)
        return seeds[mesh.get_local_rank()].view(1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, style={self.style}"


class _UnevenPart(torch.autograd.Function):
    """The local part of a parameter whose parts differ in size; its gradient lies on the mesh as the parameter does.

    ``to_local`` guesses the strides of the whole gradient from those of one part, which is right for even parts only.
    Gradients of other strides than their parameter's are copied, and torch 2.11 makes replicas of them then.
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


def _is_uneven(whole: DTensor) -> bool:
    parts = whole.device_mesh.size()
    return any(isinstance(each, Shard) and whole.shape[each.dim] % parts for each in whole.placements)


class _OnOneProcess(torch.autograd.Function):
    """A bias that is added to a sum over processes once; each of them knows its whole gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, here: bool) -> Tensor:
        return bias.view_as(bias) if here else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _placement(name: str, layout: Placement | None) -> Placement:
    if layout is not None and not isinstance(layout, Placement):
        raise TypeError(f"{name} must be a placement (Replicate(), Shard(1)) or None, got {layout!r}")
    return Replicate() if layout is None else layout


def _layouts(ffn: FusedFFN) -> list[tuple[nn.Module, dict[str, Placement]]]:
    """Each linear child with the placement of its parameters: the hidden is split, the output's bias is not."""
    found: list[tuple[nn.Module, dict[str, Placement]]] = []
    for linear in (ffn.up_proj, ffn.gate_proj):
        if linear is not None:
            found.append((linear, {"weight": Shard(0), "bias": Shard(0)}))
    found.append((ffn.down_proj, {"weight": Shard(1), "bias": Replicate()}))
    return [
        (linear, {name: placement for name, placement in placements.items() if getattr(linear, name, None) is not None})
        for linear, placements in found
    ]


def _why_not_local(linear: nn.Module, placements: dict[str, Placement]) -> str | None:
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
