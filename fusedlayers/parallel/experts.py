"""Expert parallelism: each process has some of the experts of a mixture, and its own tokens."""

from __future__ import annotations

import copyreg
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from .. import functional
from ..functional.moe_ffn import MOE_FFN
from ..modules import FusedMoE, class_name
from .shards import check_mesh, distribute, local_part, mesh_of

# Runs the local experts: rows, the local experts of each row and their weights.
_Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertParallel(ParallelStyle):
    """Splits the experts of a mixture over the P processes of a device mesh; every process keeps its own tokens.

    Each process has E / P experts, as DTensors under the same keys. In the forward pass all-to-alls send every token,
    with its experts and their weights, once to each process that has experts of it, and another one returns a single
    sum for each. The backward pass reverses these exchanges. The host reads the numbers of tokens to exchange once per
    call, which synchronises it with the router: a CUDA graph cannot capture that.

        parallelize_module(model, mesh, {"blocks.*.feed_forward": ExpertParallel()})  # a FusedMoE
        parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})  # after replace(model)

    The module is a `FusedMoE`, or the experts of a transformers model that `replace` has fused: called with tokens
    ``[M, K]``, their experts ``[M, k]`` and the weights of these. The first dimension of all its parameters is that of
    the experts, and it ignores an index past the last one. Tokens may differ in number from process to process, and
    require a gradient in all of them or in none. The gradient of an expert is the sum over the tokens of all processes;
    where DDP or FSDP average the other gradients over P processes, divide that of the experts by P, too. DDP has to be
    told to ignore the experts' parameters.

    Raises:
        TypeError: the module is neither.
        ValueError: the mesh has more than one dimension, or P does not divide E.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh)
        mixture = type(module) is FusedMoE
        holder = cast(FusedMoE, module).experts if mixture else module
        experts = _number_of_experts(module, holder, mixture)
        if experts % device_mesh.size():
            raise ValueError(f"module cannot be split: {experts} experts over {device_mesh.size()} processes")
        placements = {name: Shard(0) for name, each in holder._parameters.items() if each is not None}
        distribute(holder, dict(placements), device_mesh, self.src_data_rank)
        if not mixture and getattr(module, "num_experts", None) == experts:
            # Its own forward reads it.
            cast(Any, module).num_experts = experts // device_mesh.size()
        module.__class__ = ExpertParallelMoE if mixture else _class_for(type(module))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _number_of_experts(module: nn.Module, holder: nn.Module, mixture: bool) -> int:
    parameters = [each for each in holder.parameters() if each is not None]
    sizes = {each.shape[0] if each.dim() else 0 for each in parameters}
    called = mixture or len(inspect.signature(module.forward).parameters) == 3
    own = len(parameters) == sum(each is not None for each in holder._parameters.values())
    if len(sizes) != 1 or not called or not own or isinstance(module, InParts):
        raise TypeError(
            "module must be a FusedMoE, or be called with tokens, their experts and weights and hold nothing but "
            f"parameters with a first dimension for the experts, got a {class_name(module)}"
        )
    [experts] = sizes
    return experts


class InParts(nn.Module):
    """Mixin of modules whose experts are spread over processes."""


class ExpertParallelMoE(InParts, FusedMoE):
    """A `FusedMoE` that `ExpertParallel` has split: parameters and keys stay, forward runs the local experts."""

    def call_arguments(self, x: Tensor) -> dict[str, Any]:
        """The arguments of this process's call, as if it received as many tokens as are in x."""
        with _local_parameters(self.experts):
            return super().call_arguments(x)

    def forward(self, x: Tensor) -> Tensor:
        """The mixture of x ``[*B, M, K]``, the tokens of this process.

        Raises:
            TypeError, ValueError: x does not fit the weights; the message names it.
        """
        index, weights = self.routing(x)
        MOE_FFN.check(*MOE_FFN.bound(**self._arguments(x, index, weights)))

        def run(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return functional.moe_ffn(**self._arguments(rows, index, weights))

        y = _through_all(self.experts, x, index, weights, run)
        return y if self.shared_expert is None else cast(Tensor, self.shared_expert(x, residual=y))


class _ExpertsInParts(InParts):
    """Mixin of the classes of :func:`_class_for`, which cannot be imported by name."""

    whole: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the original class does, and give the copy this class."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        new, arguments, *state = reduced
        if new is copyreg.__newobj__:  # type: ignore[attr-defined]
            arguments = (self.whole, *arguments[1:])
        return _new_in_parts, (new, *arguments), *state


# Methods that `explain` calls on fused experts.
_ASKED = ("why_called", "call_arguments")


def _on_local_parameters(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _local_parameters(self):
            return method(self, *args, **kwargs)

    return run


def _new_in_parts(new: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    made = new(*arguments)
    made.__class__ = _class_for(type(made))
    return made


# Original classes -> their split classes, while these are in use.
_classes: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()


def _class_for(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``original`` whose forward runs the local experts."""
    if (made := _classes.get(original)) is not None:
        return made
    signature = inspect.signature(original.forward)

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        _, x, index, weights = signature.bind(self, *args, **kwargs).arguments.values()
        return _through_all(self, x, index, weights, functools.partial(original.forward, self))

    asked = {name: _on_local_parameters(getattr(original, name)) for name in _ASKED if hasattr(original, name)}
    attributes = {"forward": forward, "whole": original} | asked
    made = _classes[original] = type(f"ExpertParallel{original.__name__}", (_ExpertsInParts, original), attributes)
    return made


def _through_all(holder: nn.Module, x: Tensor, index: Tensor, weights: Tensor, run: _Run) -> Tensor:
    """The result of the experts of all processes for this process's tokens, in the shape of x."""
    name, first = next((name, each) for name, each in holder._parameters.items() if each is not None)
    mesh = mesh_of(f"the experts' {name}", first, ExpertParallel.__name__)
    parts, experts = mesh.size(), first.shape[0] // mesh.size()
    tokens = math.prod(x.shape[:-1])
    flat, index, weights = (each.reshape(tokens, each.shape[-1]) for each in (x, index, weights))
    # The process of each expert; ``parts`` for an index that is no expert.
    owners = torch.where((index >= 0) & (index < first.shape[0]), index // experts, parts)
    needed = (owners.unsqueeze(-1) == torch.arange(parts, device=x.device)).any(1)
    sent, received, order = _sizes(needed, mesh)
    destination, token = order // max(tokens, 1), order % max(tokens, 1)
    # Experts of other processes get an index past the local ones.
    theirs = owners[token] == destination.unsqueeze(-1)
    local = torch.where(theirs, index[token] - experts * destination.unsqueeze(-1), experts)
    group = mesh.get_group()
    rows = _Exchange.apply(flat[token], received, sent, group)
    chosen = _exchanged(local, received, sent, group)
    scores = _Exchange.apply(weights[token], received, sent, group)
    with _local_parameters(holder) as parameters:
        y = run(rows, chosen, scores)
        if not rows.shape[0]:
            # Without rows, too, a process takes part in the backward exchanges and has a gradient of every parameter.
            used = rows * 1 + sum(each.flatten()[:0].sum() for each in parameters) + scores.sum()
            y = used.to(y.dtype)
    found = _Exchange.apply(y, sent, received, group)
    wide = torch.promote_types(y.dtype, torch.float32)
    # Added up in the order of the processes.
    sums = torch.zeros_like(flat, dtype=wide).index_put((token,), found.to(wide), accumulate=True)
    return sums.to(y.dtype).view(x.shape)


def _sizes(needed: Tensor, mesh: DeviceMesh) -> tuple[list[int], list[int], Tensor]:
    """Numbers of tokens sent to and received from every process, and ``process * tokens + token`` of those sent."""
    going = needed.sum(0)
    coming = _exchanged(going, None, None, mesh.get_group())
    sent, received = torch.stack((going, coming)).tolist()
    places = needed.T.flatten().logical_not().to(torch.int8).argsort(stable=True)
    return sent, received, places[: sum(sent)]


@contextmanager
def _local_parameters(holder: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the module reads the local shards as its parameters."""
    whole: dict[str, Any] = dict(holder._parameters)
    local = {name: local_part(each) for name, each in whole.items() if isinstance(each, DTensor)}
    holder._parameters.update(cast(Any, local))
    try:
        yield list(local.values())
    finally:
        holder._parameters.update(whole)


def _exchanged(rows: Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup) -> Tensor:
    """The rows that all processes send to this one, in their order."""
    count = rows.shape[0] if received is None else sum(received)
    found = rows.new_empty(count, *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


class _Exchange(torch.autograd.Function):
    """An all-to-all; its backward pass is the reverse exchange."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = sent, received, group
        return _exchanged(rows, received, sent, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradient, *ctx.way_back), None, None, None
