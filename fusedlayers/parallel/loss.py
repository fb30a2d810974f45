"""Vocabulary parallelism: each process has some classes of a `LinearCrossEntropyLoss`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ..functional.linear_cross_entropy.arguments import LOG_PROBS_SHAPES, checked_ignore_index
from ..functional.linear_cross_entropy.parts import Part, losses_of_part
from ..functional.shapes import Shapes
from ..modules import LinearCrossEntropyLoss, class_name, say_once, why_not_now, why_not_plain
from .shards import check_mesh, checked_placement, distribute, local_part, mesh_of, replicated, why_not_local

_SHAPES = Shapes("input: *B K, target: class(*T)")


class LinearCrossEntropyLossParallel(ParallelStyle):
    """Splits the classes of a `LinearCrossEntropyLoss` over the P processes of a device mesh.

    Each process keeps V / P rows of ``linear.weight``, and of its bias, as DTensors under the same keys, and computes
    the logits of its own classes, chunk by chunk. The forward pass gathers four numbers for each token: two of its
    logits, its local loss, and whether its class is local. The backward pass sums the gradient of the input by one
    all-reduce, or by a reduce-scatter where ``input_layouts`` is a ``Shard``. All processes get the same bits.

        parallelize_module(model, mesh, {"loss": LinearCrossEntropyLossParallel()})

    The parameters are replaced: a weight that was tied to an embedding is untied, without a warning, because the module
    does not know who else has it.

    Args:
        input_layouts: placement of the input ``[*B, K]`` on the mesh, if it is no DTensor. Default: ``Replicate()``.
            Plain tensors that are sharded have one shape in all processes. Targets are whole in every process.

    Raises:
        TypeError: the layout is no placement, or the module is not exactly a `LinearCrossEntropyLoss`.
        ValueError: the mesh has more than one dimension, the linear layer is no longer plain, the module has class
            weights or smooths labels, for which a process would need all classes, it has ``out_features``, or a process
            would have no class.
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__()
        self.input_layouts = checked_placement("input_layouts", input_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not LinearCrossEntropyLoss:
            raise TypeError(f"module must be exactly a LinearCrossEntropyLoss, got a {class_name(module)}")
        check_mesh(device_mesh)
        if reason := why_not_plain(module.linear):
            raise ValueError(f"module cannot be split: linear {reason}")
        if module.weight is not None or module.label_smoothing:
            raise ValueError("module cannot be split: class weights and label_smoothing take all classes at once")
        if module.out_features:
            raise ValueError(
                f"module cannot be split: it has several losses a token, out_features={module.out_features}"
            )
        classes, parts = module.linear.out_features, device_mesh.size()
        if (parts - 1) * _part_size(classes, parts) >= classes:
            raise ValueError(f"module cannot be split: of {classes} classes one of {parts} processes would have none")
        distribute(module.linear, _layouts(module), device_mesh, self.src_data_rank)
        module.__class__ = VocabularyParallelLoss
        assert isinstance(module, VocabularyParallelLoss)
        module.style = self
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(input_layouts={self.input_layouts})"


class VocabularyParallelLoss(LinearCrossEntropyLoss):
    """A `LinearCrossEntropyLoss` that `LinearCrossEntropyLossParallel` has split: parameters and keys stay.

    A linear layer that holds anything but its shards (LoRA, hooks, ...) is called with DTensors, and its logits are
    gathered. Second derivatives, and probabilities as targets, are not supported, and ``torch.compile`` breaks the
    graph at its call.
    """

    style: LinearCrossEntropyLossParallel

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call would call the linear layer, or None if it would read its local shards."""
        if reason := why_not_local(self.linear, _layouts(self)):
            return f"linear {reason}"
        return why_not_now(*(tensor for tensor in tensors if not isinstance(tensor, DTensor)))

    # Dynamo would break the graph after the rows of the input. AOTAutograd regenerates a result that is a view of an
    # input from that input, which would lose the sum of its gradient over the processes.
    @torch.compiler.disable(reason="the loss of a vocabulary in parts runs in eager mode")
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of input ``[*B, K]``, in the placement of the style, and of classes ``[*B]``.

        Raises:
            TypeError, ValueError: input or target does not fit the linear layer; the message names it.
        """
        _SHAPES.check(input, target)
        target = target.full_tensor() if isinstance(target, DTensor) else target
        if (reason := self.why_called(input, target)) is not None:
            say_once(self, reason)
            logits: Any = self.linear(self._replicated(input))
            return self.loss_of(logits.full_tensor(), target)
        arguments = self.call_arguments(input, target)
        x, weight, bias = (arguments[name] for name in ("input", "linear_weight", "linear_bias"))
        LOG_PROBS_SHAPES.check(x, weight, target, bias)
        ignored = checked_ignore_index(self.ignore_index)
        mesh = self.mesh_of_classes()
        classes, parts, rank = self.linear.weight.shape[0], mesh.size(), mesh.get_local_rank()

        def gather(found: Tensor) -> Tensor:
            everywhere = [torch.empty_like(found) for _ in range(parts)]
            dist.all_gather(everywhere, found, group=mesh.get_group())
            return torch.stack(everywhere)

        part = Part(
            rank * _part_size(classes, parts), classes, gather, ignored, self.softcap, self.logit_scale, self.z_loss
        )  # fmt: skip
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        losses = losses_of_part(rows, weight, target.reshape(-1).to(torch.int64), bias, part)
        if self.reduction == "none":
            return losses.view(target.shape)
        if self.reduction == "sum":
            return losses.sum()
        return losses.sum() / (target.to(torch.int64) != ignored).sum()

    def call_arguments(self, input: Tensor, target: Tensor) -> dict[str, Any]:
        """The arguments of this process's call: the whole input and its own classes, without a reduction."""
        arguments = super().call_arguments(input, target) | {"reduction": "none"}
        # Every process computes its own share of the gradient of the input.
        arguments["input"] = self._replicated(input).to_local(grad_placements=[Partial()])
        for name in ("linear_weight", "linear_bias"):
            if isinstance(whole := arguments[name], DTensor):
                arguments[name] = local_part(whole)
        return arguments

    def _replicated(self, input: Tensor) -> DTensor:
        return replicated(input, self.style.input_layouts, self.mesh_of_classes())

    def mesh_of_classes(self) -> DeviceMesh:
        """The mesh over which the classes are split."""
        return mesh_of("linear.weight", self.linear.weight, LinearCrossEntropyLossParallel.__name__)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, style={self.style}"


def _part_size(classes: int, parts: int) -> int:
    """Classes per process; the last ones may have fewer."""
    return -(-classes // parts)


def _layouts(loss: LinearCrossEntropyLoss) -> dict[str, Placement]:
    names = ("weight",) if loss.linear.bias is None else ("weight", "bias")
    return {name: Shard(0) for name in names}
