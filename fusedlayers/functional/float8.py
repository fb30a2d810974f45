"""Operands in 8 bits, and the weights that stay quantised between the training calls of one step.

Quantised weights are kept while the weight lives and does not change: its version counter, its storage and its address
are compared at every use. Not every change shows there: optimizers, adapters that are merged and averages of weights
may write to ``parameter.data``, or with kernels of their own. So all is dropped at every step of a
``torch.optim.Optimizer``, calls without gradients neither read nor keep anything, and nothing is kept of buffers, which
compiled graphs fill with the weights of one layer after the other. CUDA graphs quantise weights themselves, and nothing
is kept of a trainable weight that was used in one, because a replay may change it. Under an initialised process group
nothing is kept at all, as sharded training refills the memory of a weight without telling.

Of frozen weights :func:`keep_frozen_weights` promises that nobody writes to them like that: then they stay quantised,
for calls without gradients, too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..kernels import gemm_epilogue as kernels
from ..kernels.bounds import channel_numbers, gradient_units, unit_table
from ..kernels.float8 import quantise_rows, quantise_transposed, transposed_pair
from ..kernels.hopper import Scaled
from ..kernels.torch_internals import is_capturing
from ..kernels.tuning import EpiloguePipeline
from ..planning import Device, Float8Plan
from ..planning.float8 import IN_16_BITS
from .operation import Operation, Tensors
from .options import checked_flag
from .prepared import Prepared

_Made = TypeVar("_Made")

# By the id of a tensor that owns memory: a parameter, or what a view is a view of.
_kept: dict[int, _Kept] = {}
# Trainable tensors that were used in a CUDA graph.
_in_graphs: dict[int, weakref.ref[Tensor]] = {}
_watching = False
# Whether a step of an optimizer was captured: each replay changes weights.
_steps_in_graphs = False
_keeps_frozen = False


class _Values:
    """Which values a tensor has, as far as its version counter and its storage tell."""

    __slots__ = ("storage", "version")

    def __init__(self, tensor: Tensor) -> None:
        # While there is a weak reference to a storage, no new one is taken for it, as may happen with an address.
        self.storage, self.version = StorageWeakRef(tensor.untyped_storage()), tensor._version

    def stand(self, tensor: Tensor) -> bool:
        """Whether a tensor still has these values."""
        return self.version == tensor._version and self.storage.cdata == tensor.untyped_storage()._cdata


class _Kept:
    """What was made of the parts of one tensor, while that tensor lives and does not change."""

    __slots__ = ("address", "made", "owner", "values")

    def __init__(self, owner: Tensor) -> None:
        key = id(owner)
        self.owner = weakref.ref(owner, lambda _: _kept.pop(key, None))
        self.address, self.values = owner.data_ptr(), _Values(owner)
        # With what is kept of further tensors that it was made of.
        self.made: dict[tuple[object, ...], tuple[Any, list[_Kept]]] = {}

    def stands(self, owner: Tensor) -> bool:
        """Whether it is still the same tensor, with the same values."""
        return self.owner() is owner and self.address == owner.data_ptr() and self.values.stand(owner)

    def is_frozen(self) -> bool:
        """Whether it lives and needs no gradient."""
        owner = self.owner()
        return owner is not None and not owner.requires_grad


def _kept_of(owner: Tensor) -> _Kept:
    found = _kept.get(id(owner))
    if found is None or not found.stands(owner):
        found = _kept[id(owner)] = _Kept(owner)
    return found


def from_weights(kind: object, weights: Sequence[Tensor], call: Prepared, make: Callable[[], _Made]) -> _Made:
    """``make()``, or what an earlier call made of the same values; ``kind`` names what is made of which weights."""
    sources = [_source_of(weight) for weight in weights]
    owners = [source if source._base is None else source._base for source in sources]
    if not _may_keep(owners, call.problem):
        return make()
    first, *others = [_kept_of(owner) for owner in owners]
    # A cycle of references would keep what was made of two parts of one tensor.
    others = [each for each in others if each is not first]
    # Another stream would have to wait for the kernel that quantises.
    stream = torch._C._cuda_getCurrentRawStream(weights[0].device.index) if weights[0].is_cuda else 0
    parts = [
        (id(owner), source.storage_offset(), source.shape, source.stride(), weight.dtype)
        for owner, source, weight in zip(owners, sources, weights, strict=True)
    ]
    key = (kind, stream, *parts)
    known = first.made.get(key)
    if known is not None and all(one is other for one, other in zip(known[1], others, strict=True)):
        found: _Made = known[0]
        return found
    # A later call may save what is made here for its backward pass, which no inference tensor can be.
    with torch.inference_mode(False), torch.no_grad():
        made = make()
    first.made[key] = made, others
    return made


class Float8Operation(Operation):
    """An operation in 8 bits, or where that is not possible or not faster, as its ``plain`` operation computes it.

    The precision is the last option of both.
    """

    # Of the tensors that are quantised once for the calls of one step.
    weight_positions: ClassVar[tuple[int, ...]]

    @property
    def plain(self) -> Operation:
        """The same operation in 16 bits."""
        raise NotImplementedError

    def variant(self, options: tuple[Any, ...]) -> Operation:
        return self

    def instead(self, plan: Any, options: tuple[Any, ...]) -> tuple[Operation, tuple[Any, ...]] | None:
        return (self.plain, (*options[:-1], None)) if plan.path == IN_16_BITS else None

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> Any:
        make: Any = self.problem_type
        return make(**super().problem(tensors, options).__getstate__(), recipe=options[-1])

    def cast(self, call: Prepared, tensors: Tensors) -> Tensors:
        found = super().cast(call, tensors)
        for position in self.weight_positions:
            weight, other = tensors[position], found[position]
            if weight is not None and other is not weight and not weight.is_inference():
                # What it was cast from lives on, and changes seldom.
                other._fused_source = weight, _Values(weight)
        return found

    def facts(self, plan: Any, device: Device) -> list[tuple[str, str]]:
        found: Float8Plan = plan
        return found.facts(device)


def _source_of(weight: Tensor) -> Tensor:
    """What a weight was cast from, if that has not changed since; else itself."""
    source, values = getattr(weight, "_fused_source", (weight, None))
    return weight if values is None or not values.stand(source) else source


def _may_keep(owners: list[Tensor], problem: Any) -> bool:
    frozen = _keeps_frozen and not any(owner.requires_grad for owner in owners)
    distributed = sys.modules.get("torch.distributed")
    if not frozen and distributed is not None and distributed.is_available() and distributed.is_initialized():
        return False
    _watch_optimizers()
    if problem.captured or (owners[0].is_cuda and is_capturing()):
        for owner in owners:
            if owner.requires_grad:
                _note_graph(owner)
        return False
    if not frozen and (_steps_in_graphs or not problem.training):
        return False
    # Inference tensors have no version, and what a call has just computed does not come again.
    if any(owner.is_inference() or not owner.is_leaf or id(owner) in _in_graphs for owner in owners):
        return False
    # Not the buffers of a compiled graph.
    return all(owner.requires_grad or isinstance(owner, Parameter) for owner in owners)


def _note_graph(owner: Tensor) -> None:
    key = id(owner)
    _in_graphs[key] = weakref.ref(owner, lambda _: _in_graphs.pop(key, None))
    _kept.pop(key, None)


def _watch_optimizers() -> None:
    global _watching
    if not _watching:
        register_optimizer_step_post_hook(_after_step)
        _watching = True


def _after_step(*_: Any) -> None:
    """Drops what is kept. Compiled steps, which do not come here, change version counters."""
    if is_dynamo_compiling():
        return
    global _steps_in_graphs
    if torch.cuda.is_available() and is_capturing():
        _steps_in_graphs = True
    for key, kept in list(_kept.items()):
        if _keeps_frozen and kept.is_frozen():
            parts = kept.made.items()
            kept.made = {name: part for name, part in parts if all(other.is_frozen() for other in part[1])}
        else:
            _kept.pop(key, None)


def forget_weights() -> None:
    """Drops all quantised weights: for weights that were changed past their version counter, and no optimizer."""
    _kept.clear()


def keep_frozen_weights(keep: bool = True) -> None:
    """Quantise weights that need no gradient once instead of once a step, and keep them for calls without gradients.

    It is a promise that such weights change only in ways that their version counter or their address shows, until
    :func:`forget_weights` is called. Merging adapters changes neither: peft adds to ``weight.data``. A weight keeps two
    bytes an element: one for each pass.

    Args:
        keep: False: frozen weights are quantised once a step again, which is the default.

    Raises:
        TypeError: ``keep`` is not a bool.
    """
    global _keeps_frozen
    _keeps_frozen = checked_flag("keep", keep)
    _kept.clear()


def quantised_weight(weight: Tensor, call: Prepared) -> Scaled:
    """The weight ``[N, K]`` with a scale for each row, any strides."""
    return from_weights("rows", (weight,), call, lambda: _quantised_rows(weight, call.ready))


def _quantised_rows(
    weight: Tensor, ready: dict[Any, Any], factors: Tensor | None = None, norms: Tensor | None = None
) -> Scaled:
    if weight.stride(1) == 1:
        return quantise_rows(weight, ready=ready, factors=factors, norms=norms)
    weights = None if factors is None else factors[None]
    return quantise_transposed(weight.T, ready=ready, weights=weights, norms=norms)


def quantised_transpose(weights: tuple[Tensor, ...], call: Prepared) -> Scaled:
    """The transposes of one or two weights ``[N, K]`` side by side, with a scale for each of the K rows."""
    other = weights[1] if len(weights) == 2 else None
    return from_weights("transposed", weights, call, lambda: quantise_transposed(weights[0], other, call.ready))


class FFNWeights(NamedTuple):
    """The weights of an FFN whose hidden is bounded, with the table of its units: see ``kernels.bounds``.

    Up and gate have words for scales; the numbers of the units are multiplied into down's columns. With a gate the norm
    of a row of x is that of x times ``channels`` ``[K]``.
    """

    up: Scaled
    gate: Scaled | None
    down: Scaled
    units: Tensor
    channels: Tensor | None


def ffn_weights(
    w_up: Tensor, w_gate: Tensor | None, w_down: Tensor, b_up: Tensor | None, call: Prepared
) -> FFNWeights:  # fmt: skip
    """The weights of an FFN with a scale for each row, any strides; with w_gate there is no b_up."""

    def make() -> FFNWeights:
        channels = gate = None
        norms = w_up.new_empty(1 if w_gate is None else 2, w_up.shape[0], dtype=torch.float32)
        if w_gate is None:
            up = _quantised_rows(w_up, call.ready, norms=norms[0]), norms[0]
        else:
            channels, inverses = channel_numbers(w_up, w_gate, call.ready)
            up, gate = (
                (quantised(weight, call.ready, of_rows, inverses), of_rows)
                for weight, of_rows in zip((w_up, w_gate), norms, strict=True)
            )
        units = unit_table(up, gate, packed(b_up), call.ready)
        words = units.view(torch.int32)
        return FFNWeights(
            up=Scaled(up[0].values, words[0]),
            gate=None if gate is None else Scaled(gate[0].values, words[1]),
            down=_quantised_rows(w_down, call.ready, factors=units[5]),
            units=units,
            channels=channels,
        )

    present = [each for each in (w_up, w_down, w_gate, b_up) if each is not None]
    return from_weights(("ffn", w_gate is None), present, call, make)


class FFNTransposes(NamedTuple):
    """The transposes of an FFN's weights: down's, and those of up and gate side by side, if they were asked for.

    Down's scales are divided by its norms. The ``factors`` ``[1 or 2, N]`` of the units of dZ and dZg are multiplied
    into the rows of up and gate: see ``kernels.bounds``.
    """

    down: Scaled
    up: Scaled | None
    factors: Tensor


def ffn_transposes(
    w_up: Tensor, w_gate: Tensor | None, w_down: Tensor, units: Tensor, dx: bool, call: Prepared
) -> FFNTransposes:
    """The transposes with a scale for each row, any strides; up's and gate's for ``dx``.

    What they take of ``units``, norms with a gate, depends on the same weights alone, as there are no biases then.
    """

    def make() -> FFNTransposes:
        norms = units.new_empty(units.shape[1])
        down = quantise_transposed(w_down, ready=call.ready, norms=norms)
        table = gradient_units(down, norms, units, w_gate is not None, call.ready)
        factors = table[1:]
        up = quantise_transposed(w_up, w_gate, call.ready, weights=factors) if dx else None
        return FFNTransposes(Scaled(down.values, table[0]), up, factors)

    present = [each for each in (w_up, w_gate, w_down) if each is not None]
    return from_weights(("ffn transposed", dx), present, call, make)


def quantised(
    x: Tensor, ready: dict[Any, Any], norms: Tensor | None = None, weights: Tensor | None = None
) -> Scaled:  # fmt: skip
    """x ``[M, K]`` with a scale for each row, any strides; ``norms`` and ``weights`` are those of ``quantise_rows``."""
    return quantise_rows(x if x.stride(1) == 1 else x.contiguous(), ready=ready, norms=norms, weights=weights)


def product(
    left: Scaled,
    right: Scaled,
    bias: Tensor | None,
    pipeline: EpiloguePipeline,
    like: Tensor,
    ready: dict[Any, Any],
    low_rank: kernels.LowRank | None = None,
) -> Tensor:
    """``left rightᵀ + bias`` in the dtype of ``like``: left ``[M, K]``, right ``[N, K]`` -> ``[M, N]``.

    The product of ``low_rank`` is added in 16 bits: ``[M, R]`` and ``[R, N]``.
    """
    return kernels.scaled_product(left, right, packed(bias), pipeline, like.dtype, ready, low_rank)


def weight_gradients(
    left: Scaled,
    right: Tensor,
    right_scale: Tensor,
    wanted: Sequence[bool],
    pipeline: EpiloguePipeline,
    dtype: torch.dtype,
    ready: dict[Any, Any],
    factors: tuple[Tensor | None, Tensor | None] = (None, None),
) -> list[Tensor | None]:
    """The wanted parts of ``leftᵀ right``: left ``[M, N · parts]`` side by side, right ``[M, K]`` -> ``[N, K]`` each.

    ``right_scale`` are the scales ``[M]`` with which the rows of ``right`` are quantised, or are to be. The columns of
    left and of right are multiplied by ``factors``, if there are any: ``[parts, N]`` and ``[K]`` in float32.
    """
    right = right if right.stride(1) == 1 else right.contiguous()
    of_left, of_right = factors
    (values, scale), (right_values, one) = transposed_pair(left, right, right_scale, ready, of_left)
    scales = [scale] * len(wanted) if of_left is None else scale
    transposed = Scaled(right_values, one if of_right is None else of_right)
    return [
        kernels.scaled_product(Scaled(part, of_part), transposed, None, pipeline, dtype, ready) if wants else None
        for part, of_part, wants in zip(values.chunk(len(wanted)), scales, wanted, strict=True)
    ]


def packed(bias: Tensor | None) -> Tensor | None:
    """A bias as the kernels read it."""
    return bias if bias is None or bias.stride(0) == 1 else bias.contiguous()
