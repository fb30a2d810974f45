"""The calls that a model's fused blocks would make for a given number of tokens, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..functional.operands import autocast_dtype
from ..functional.operation import Operation, operation_of
from ..modules import FFNPieces, FusedFFN, FusedMoE, LinearCrossEntropyLoss, SplitKLinear, linear_weight
from ..replacing.experts import FusedExperts, routing_of_experts
from ..replacing.ffn.blocks import FusedBlock, FusedSequentialFFN
from ..replacing.ffn.by_rule import FusedInside
from ..replacing.loss import FusedLossHead

_BLOCKS = (FusedBlock, FusedExperts, FusedFFN, FusedLossHead, FusedMoE, LinearCrossEntropyLoss, SplitKLinear)


class BlockCall(NamedTuple):
    """An unchecked call of an operation; ``device`` holds the block's parameters."""

    operation: Operation
    tensors: tuple[Any, ...]
    options: tuple[Any, ...]
    device: torch.device


def function_and_arguments(
    module: Any, *inputs: Tensor, **options: Any
) -> tuple[Callable[..., Any], dict[str, Any]] | str:
    """The public function that a fused module calls for these inputs, and its arguments; or why its children run."""
    given = (*inputs, *(value for value in options.values() if isinstance(value, Tensor)))
    reason: str | None = module.why_called(*given) if hasattr(module, "why_called") else None
    if reason is not None:
        return reason
    arguments = module.call_arguments(*inputs, **options)
    adapted = "up_scale" in arguments
    return getattr(module, "function", functional.lora_ffn if adapted else functional.ffn), arguments


def is_model(target: object, *inputs: Any) -> bool:
    """Whether ``target`` holds blocks of this library that are explained one by one, for the tokens of its inputs."""
    if not isinstance(target, nn.Module):
        return False
    others = any(isinstance(module, _BLOCKS) for module in target.modules() if module is not target)
    if isinstance(target, FusedSequentialFFN):
        # The input of an nn.Sequential is that of its FFN only if the FFN comes first and is the only one.
        starts = [linears.partition("..")[0] for linears in target.find_ffn_pieces(target)]
        return others or starts != list(target._modules)[:1]
    if isinstance(target, FusedInside):
        # The input of a method need not be that of the FFN inside it.
        return others or not _fits(target, inputs[0] if inputs else None)
    return isinstance(target, FusedLossHead) or (others and not isinstance(target, _BLOCKS))


def _fits(block: FusedBlock, x: Any) -> bool:
    """Whether x may be the input of the FFN of a block."""
    found = [pieces for pieces in block.find_ffn_pieces(block).values() if isinstance(pieces, FFNPieces)]
    widths = [linear_weight(pieces.up).shape[1:] for pieces in found]
    return not found or not isinstance(x, Tensor) or (x.is_floating_point() and x.shape[-1:] in widths)


def calls_of_model(
    model: nn.Module, tokens: int, wants_gradient: bool
) -> Iterator[tuple[str, nn.Module, BlockCall | str]]:
    """(path, block, its call for this number of tokens, or why its own forward runs) of every block.

    If a block holds several FFNs, the path is followed by the name of the part.
    """
    for path, module in model.named_modules():
        if isinstance(module, _BLOCKS):
            calls = _Calls(module, tokens, wants_gradient).found()
            for part, found in calls.items():
                yield f"{path} {part}".strip() if len(calls) > 1 else path, module, found


class _Calls:
    """The calls of one block, with inputs of its own width."""

    def __init__(self, module: nn.Module, tokens: int, wants_gradient: bool) -> None:
        self.module, self.tokens, self.wants_gradient = module, tokens, wants_gradient

    def found(self) -> dict[str, BlockCall | str]:
        """The calls, by the name of the part that makes them."""
        module: Any = self.module
        if isinstance(module, FusedBlock):
            # An FFN has its own reason not to be fused, or one that applies to the whole block.
            reason = module.why_called()
            parts = module.find_ffn_pieces(module)
            return {
                name: pieces if isinstance(pieces, str) else reason or self.of_pieces(pieces)
                for name, pieces in parts.items()
            }
        if isinstance(module, FusedLossHead):
            return {module.fused_head: module.why_called() or self.of_head()}
        if isinstance(module, FusedExperts):
            given: tuple[Tensor, ...] = self.of_experts()
        elif isinstance(module, LinearCrossEntropyLoss):
            given = (self.x(module.linear.in_features, module.linear), self.targets(*module.out_features))
        else:
            width = module.in_features if isinstance(module, SplitKLinear) else module.d_model
            given = (self.x(width, module),)
        called = function_and_arguments(module, *given)
        return {"": called if isinstance(called, str) else self.call(*called)}

    def x(self, width: int, holder: nn.Module) -> Tensor:
        """An input for the weights of ``holder``, in the dtype of its products."""
        weight = next(each for each in holder.parameters() if each.is_floating_point())
        return self.input(width, weight)

    def input(self, width: int, weight: Tensor) -> Tensor:
        dtype = weight.dtype if weight.dtype is torch.float64 else autocast_dtype(weight.device) or weight.dtype
        x = torch.empty(self.tokens, width, dtype=dtype, device="meta")
        return x.requires_grad_(self.wants_gradient)

    def targets(self, *more: int) -> Tensor:
        return torch.empty(self.tokens, *more, dtype=torch.int64, device="meta")

    def of_pieces(self, pieces: FFNPieces) -> BlockCall:
        weight = linear_weight(pieces.up)
        block: Any = self.module
        x = self.input(weight.shape[1], weight)
        arguments = pieces.arguments(x, None, block.fused_recompute, block.fused_precision)
        return self.call(pieces.operation.function, arguments)

    def of_experts(self) -> tuple[Tensor, Tensor, Tensor]:
        module: Any = self.module
        width, chosen, weight = routing_of_experts(module, module.fused_ffn)
        # If the configuration does not say, one expert per token.
        chosen = chosen or 1
        return self.input(width, weight), self.targets(chosen), self.input(chosen, weight)

    def of_head(self) -> BlockCall:
        module: Any = self.module
        head = getattr(module, module.fused_head)
        given = {"input": self.x(head.in_features, head), "target": self.targets()}
        weights = {"linear_weight": head.weight, "linear_bias": head.bias}
        return self.call(functional.linear_cross_entropy, given | weights)

    def call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> BlockCall:
        operation = operation_of(function)
        assert operation is not None
        tensors, options = operation.bound(**arguments)
        device = next(each.device for each in self.module.parameters())
        moved: dict[int, Tensor] = {}
        dtype = autocast_dtype(device)
        return BlockCall(operation, tuple(_without_memory(each, dtype, moved) for each in tensors), options, device)


def _without_memory(tensor: Tensor | None, cast: torch.dtype | None, moved: dict[int, Tensor]) -> Tensor | None:
    """The tensor on the meta device, like the inputs, and cast to ``cast``, because autocast does nothing on meta.

    A tensor that is passed twice stays one tensor.
    """
    if tensor is None or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return tensor
    if id(tensor) not in moved:
        whole = not tensor.is_floating_point() or tensor.dtype is torch.float64
        dtype = tensor.dtype if whole or cast is None else cast
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
        moved[id(tensor)] = empty.requires_grad_(tensor.requires_grad)
    return moved[id(tensor)]
