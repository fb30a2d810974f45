"""Inputs for the tests of late interaction, in every layout, and how they are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, planning, reference
from fusedlayers.closeness import assert_all_close
from tests.support.operands import DEVICE, PATHS, Tensors, in_float64, leaves, on_path

WAYS = [PATHS[0], PATHS[2]]
# Of queries and documents: none, one, around half a tile and a whole one.
RAGGED = ([2, 0, 31, 1, 33], [33, 1, 0, 2, 31])
Sequences = dict[str, list[Tensor]]


def sequences(
    queries: Sequence[int],
    documents: Sequence[int],
    width: int,
    dtype: torch.dtype = torch.float32,
    draw: Callable[..., Tensor] = torch.randn,
) -> Sequences:
    """Queries and documents of these lengths."""
    return {
        name: [draw(length, width, dtype=torch.float64).to(DEVICE, dtype) for length in lengths]
        for name, lengths in (("queries", queries), ("documents", documents))
    }


def padded(tensors: Sequence[Tensor], value: float = math.nan, extra: int = 0) -> tuple[Tensor, Tensor]:
    """``[n, longest + extra, d]`` with ``value`` in place of missing tokens, and the mask."""
    longest = max(len(tensor) for tensor in tensors) + extra
    result = tensors[0].new_full((len(tensors), longest, tensors[0].shape[-1]), value)
    mask = torch.zeros(result.shape[:2], dtype=torch.bool, device=result.device)
    for place, tensor in enumerate(tensors):
        result[place, : len(tensor)] = tensor
        mask[place, : len(tensor)] = True
    return result, mask


def packed(tensors: Sequence[Tensor], dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    """``[total, d]`` and the offsets."""
    ends = torch.tensor([0, *[len(tensor) for tensor in tensors]]).cumsum(0)
    return torch.cat(list(tensors)), ends.to(DEVICE, dtype)


def laid_out(ragged: Sequences, queries: str, documents: str) -> dict[str, Tensor]:
    """The arguments of ``maxsim``, each side "padded" with a mask or "packed"."""
    arguments: dict[str, Tensor] = {}
    for name, layout in (("queries", queries), ("documents", documents)):
        tensor, extra = (padded if layout == "padded" else packed)(ragged[name])
        arguments[name] = tensor
        arguments[
            f"{'query' if name == 'queries' else 'document'}_mask" if layout == "padded" else f"cu_seqlens_{name}"
        ] = extra
    return arguments


LAYOUTS = [("padded", "padded"), ("padded", "packed"), ("packed", "padded"), ("packed", "packed")]


def results(
    call: Callable[..., Tensor], arguments: Tensors, upstream: Tensor | None = None, frozen: tuple[str, ...] = ()
) -> dict[str, Tensor | None]:
    """Scores and gradients of the call; infinite scores count nothing in the upstream gradient."""
    inputs = {name: arguments[name] for name in ("queries", "documents")}
    extras = {name: tensor for name, tensor in arguments.items() if name not in inputs}
    graph = leaves(inputs, frozen)
    scores = call(**graph, **extras)
    scores.backward(torch.ones_like(scores) if upstream is None else upstream)
    return {"scores": scores.detach()} | {
        f"d{name}": tensor.grad for name, tensor in graph.items() if tensor is not None
    }


def upstream_for(arguments: Tensors, draw: Callable[..., Tensor] = torch.randn) -> Tensor:
    scores = reference.maxsim(**arguments)
    return draw(*scores.shape, dtype=torch.float64).to(scores)


def double(arguments: Tensors) -> dict[str, Tensor | None]:
    return {**arguments, **in_float64({name: arguments[name] for name in ("queries", "documents")})}


def assert_close_to_torch(arguments: Tensors, frozen: tuple[str, ...] = ()) -> None:
    upstream = upstream_for(arguments)
    with on_path("kernels"):
        ours = results(functional.maxsim, arguments, upstream, frozen)
    theirs = results(reference.maxsim, arguments, upstream, frozen)
    truth = results(reference.maxsim, double(arguments), upstream.double(), frozen)
    assert_all_close(ours, theirs, truth)


@contextmanager
def planned(**changes: Any) -> Iterator[None]:
    """Kernels with these fields of the plan changed."""
    made = planning.maxsim.plan

    def changed(problem: planning.MaxSimProblem, device: planning.Device, wish: str) -> planning.MaxSimPlan:
        return replace(made(problem, device, wish), **changes)

    with pytest.MonkeyPatch.context() as patch, on_path("kernels"):
        patch.setattr(planning.maxsim, "plan", changed)
        yield
