"""Tensor parallelism of a `FusedFFN`: each process has a part of the hidden."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from .. import functional
from ..functional.shapes import Shapes
from ..modules import FusedFFN, OnOneProcess, class_name, say_once, why_not_now
from .shards import check_mesh, checked_placement, distribute, local_part, mesh_of, replicated, why_not_local

_SHAPES = Shapes("x: *B M? K, residual?: *R")
_SUM_SHAPES = Shapes("the result: float(*B M? O), residual: float(*B M? O)")


class FusedFFNParallel(ParallelStyle):
    """Splits the hidden of a `FusedFFN` over the P processes of a device mesh (Shoeybi et al., 2019, "Megatron-LM").

    Each process keeps N / P rows of ``up_proj`` and ``gate_proj`` and as many columns of ``down_proj``, as DTensors
    under the same keys, and runs :func:`fusedlayers.functional.ffn` on them, in kernels where planned. The results are
    summed by one all-reduce, or by a reduce-scatter where ``output_layouts`` is a ``Shard``: with ``Shard(1)`` on both
    sides tokens are split outside of the block (sequence parallelism). Every process draws its own dropout mask,
    whether all start from one ``torch.manual_seed`` or each from its own.

        parallelize_module(model, mesh, {"blocks.*.feed_forward": FusedFFNParallel()})

    Args:
        input_layouts: placement of the input ``[*B, M, K]`` on the mesh, if it is no DTensor. Default: ``Replicate()``.
            Plain tensors that are sharded have one shape in all processes.
        output_layouts: placement of the result, and of the residual if there is one. Default: ``Replicate()``.
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
        self.input_layouts = checked_placement("input_layouts", input_layouts)
        self.output_layouts = checked_placement("output_layouts", output_layouts)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not FusedFFN:
            raise TypeError(f"module must be exactly a FusedFFN, got a {class_name(module)}")
        check_mesh(device_mesh)
        if reason := module.ffn_pieces().why_not_plain():
            raise ValueError(f"module cannot be split: {reason}")
        for linear, placements in _layouts(module):
            distribute(linear, placements, device_mesh, self.src_data_rank)
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
    """A `FusedFFN` that `FusedFFNParallel` has split: parameters and keys stay, forward runs on the local shards.

    Children that hold anything but these shards (LoRA, hooks, ...) are called with DTensors, without fusing.
    """

    style: FusedFFNParallel

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call would call the children, or None if ``functional.ffn`` would run on the local shards."""
        for linear, placements in _layouts(self):
            if reason := why_not_local(linear, placements):
                return f"a linear child {reason}"
        return why_not_now(*(tensor for tensor in tensors if not isinstance(tensor, DTensor)))

    def call_arguments(self, x: Tensor, residual: Tensor | None = None) -> dict[str, Any]:
        """The arguments that ``forward`` gives to ``functional.ffn``, without the residual, which it adds later."""
        arguments = self.ffn_pieces().arguments(x, None, self.recompute, self.precision)
        # From the whole gradient of y every process computes its own share of the gradient of x.
        arguments["x"] = self._replicated(x).to_local(grad_placements=[Partial()])
        for name, value in arguments.items():
            if isinstance(value, DTensor):
                arguments[name] = local_part(value)
        if arguments["b_down"] is not None:
            arguments["b_down"] = OnOneProcess.apply(arguments["b_down"], self._mesh().get_local_rank() == 0)
        return arguments

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The FFN of x ``[*B, M, K]``, plus ``residual`` ``[*B, M, K]`` if given, as the style lays them out.

        Raises:
            TypeError, ValueError: x or residual does not fit the weights; the message names it.
        """
        layout = self.style.output_layouts
        _SHAPES.check(x, residual)
        if (reason := self.why_called(x, residual)) is None:
            arguments = self.call_arguments(x)
            if arguments["dropout_p"]:
                arguments["dropout_seed"] = self._dropout_seed(arguments["x"].device)
            y = self._laid_out(functional.ffn(**arguments), Partial())
        else:
            say_once(self, reason)
            y = cast(DTensor, super().forward(self._replicated(x)))
        y = y.redistribute(placements=[layout])
        if residual is not None:
            added = residual if isinstance(residual, DTensor) else self._laid_out(residual, layout)
            _SUM_SHAPES.check(y, added)
            y = cast(DTensor, y + added.redistribute(placements=[layout]))
        return y.to_local() if self.style.use_local_output else y

    def _mesh(self) -> DeviceMesh:
        return mesh_of("down_proj.weight", self.down_proj.weight, FusedFFNParallel.__name__)

    def _replicated(self, x: Tensor) -> DTensor:
        return replicated(x, self.style.input_layouts, self._mesh())

    def _laid_out(self, tensor: Tensor, layout: Placement) -> DTensor:
        return DTensor.from_local(tensor, self._mesh(), [layout], run_check=False)

    def _dropout_seed(self, device: torch.device) -> Tensor:
        # Every process draws the seeds of all, so that equal generators stay equal.
        mesh = self._mesh()
        seeds = torch.randint(2**63 - 1, (mesh.size(),), dtype=torch.int64, device=device)
        return seeds[mesh.get_local_rank()].view(1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, style={self.style}"


def _layouts(ffn: FusedFFN) -> list[tuple[nn.Module, dict[str, Placement]]]:
    """Each linear child with the placement of its parameters: the hidden is split, the output's bias is not."""
    into: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
    linears: list[tuple[nn.Module | None, dict[str, Placement]]] = [
        (ffn.up_proj, into), (ffn.gate_proj, into), (ffn.down_proj, {"weight": Shard(1), "bias": Replicate()}),
    ]  # fmt: skip
    return [
        (linear, {name: placement for name, placement in placements.items() if getattr(linear, name, None) is not None})
        for linear, placements in linears
        if linear is not None
    ]
