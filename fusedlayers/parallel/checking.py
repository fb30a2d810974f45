"""What a model that was split would train otherwise than one process does, without an error: found by looking at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..modules import FusedFFN
from .experts import ExpertParallelMoE, InParts
from .ffn import TensorParallelFFN
from .loss import VocabularyParallelLoss
from .shards import were_one

# So many paths are written out.
_MOST_PATHS = 3


@dataclass(frozen=True)
class Finding:
    """One thing that trains otherwise than on one process, without an error.

    ``kind`` is "untied", "expert gradients", "partial gradients", "dropout", "left out of DDP" or "optimizer".
    ``paths`` are the modules or parameters that it is about, by their paths in the model. ``what`` says what happens,
    and ``how`` what to do about it.
    """

    kind: str
    paths: tuple[str, ...]
    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} {self.how}"


class Findings(list[Finding]):
    """The findings of :func:`check`; prints one after the other."""

    def __str__(self) -> str:
        if not self:
            return "fusedlayers.parallel.check: nothing was found"
        title = f"fusedlayers.parallel.check: {len(self)} finding{'s' * (len(self) > 1)}"
        return "\n".join([title, *(f"  {finding}" for finding in self)])

    __repr__ = __str__


class _Split(NamedTuple):
    """A module that one of the styles of this package has split over ``mesh``, by its path in the model."""

    path: str
    module: nn.Module
    mesh: DeviceMesh
    # Its DTensors, by their paths.
    parameters: dict[str, DTensor]


def check(model: nn.Module, *optimizers: Optimizer) -> Findings:
    """What ``model``, split by the styles of this package, trains otherwise than one process would, without an error.

    Call it last, on what the loop trains: the model inside DDP or FSDP, if it is, with its optimizers. Nothing runs,
    nothing is sent to other processes, and nothing changes. Found are

    - "untied": a parameter was split that another module of the model has, too, such as the weight of a loss head that
      was tied to the embedding. From then on the two are trained apart. A loss is also compared by values, as a copy
      of a model does not know what was tied.
    - "expert gradients": gradients of split experts are sums over the tokens of all processes, where DDP and FSDP
      average those of all other parameters. Parameters with a hook on their gradient are taken to be divided by it.
    - "partial gradients": between blocks that split tokens (``Shard`` layouts), plain parameters have only the gradient
      of this process's tokens. Parameters with a hook on their gradient are taken to be summed by it.
    - "dropout": between blocks that are split over their hidden, each process must draw the same masks.
    - "left out of DDP": DDP was told to ignore parameters that are not split, so each process trains its own.
    - "optimizer": none of the optimizers has a split parameter, as one that was made before splitting has none.

    Args:
        model: any module; without anything that was split over more than one process there is nothing to find.
        optimizers: those that step; without any they are not looked at.

    Returns:
        A list that prints as plain sentences, empty if nothing was found.

    Raises:
        TypeError: the model is no module, or an optimizer is none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got a {type(model).__name__}")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizers must be optimizers of torch, got a {type(optimizer).__name__}")
    split = [each for each in _split_modules(model) if each.mesh.size() > 1]
    found = Findings()
    if not split:
        return found
    found += _untied(model, split)
    found += _expert_gradients(model, split)
    found += _partial_gradients(model, split)
    found += _dropout(model, split)
    found += _left_out_of_ddp(model)
    found += _optimizers(split, optimizers)
    return found


def _split_modules(model: nn.Module) -> Iterator[_Split]:
    for path, module in model.named_modules():
        if not isinstance(module, (InParts, TensorParallelFFN, VocabularyParallelLoss)):
            continue
        holder: nn.Module = module
        inside = path
        if isinstance(module, ExpertParallelMoE):
            holder, inside = module.experts, _joined(path, "experts")
        parameters: dict[str, DTensor] = {
            _joined(inside, name): each
            # Of experts only their own: a router or a shared expert is whole.
            for name, each in holder.named_parameters(recurse=not isinstance(module, InParts))
            if isinstance(each, DTensor)
        }
        if parameters:
            yield _Split(path, module, next(iter(parameters.values())).device_mesh, parameters)


def _untied(model: nn.Module, split: list[_Split]) -> Iterator[Finding]:
    others: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for owner in split:
        # Layers that are clones of each other begin with equal values; a loss and an embedding do only where tied.
        by_values = isinstance(owner.module, VocabularyParallelLoss)
        for path, part in owner.parameters.items():
            tied = [
                name
                for name, other in others.items()
                if other is not part and (were_one(part, other) or (by_values and _same_values(part, other)))
            ]
            if tied:
                yield Finding(
                    "untied", (path, *tied),
                    f"{path} was split and is a parameter of its own, but it was tied to {_listed(tied)}: they are "
                    "trained apart.",
                    "Do not split it, or make the model without tied weights.",
                )  # fmt: skip


def _same_values(part: DTensor, other: Tensor) -> bool:
    """Whether this process's part of a matrix has the values that ``other`` has there; False where that is unknown."""
    if part.dim() < 2 or part.shape != other.shape or part.dtype != other.dtype:
        return False
    if isinstance(other, DTensor):
        if other.placements != part.placements or other.device_mesh != part.device_mesh:
            return False
        theirs = other.to_local()
    else:
        [placement] = part.placements
        theirs = other.detach()
        if isinstance(placement, Shard):
            theirs = theirs.chunk(part.device_mesh.size(), placement.dim)[part.device_mesh.get_local_rank()]
    mine = part.to_local()
    return mine.device == theirs.device and not mine.is_meta and torch.equal(mine, theirs)


def _expert_gradients(model: nn.Module, split: list[_Split]) -> Iterator[Finding]:
    experts = [each for each in split if isinstance(each.module, InParts)]
    summed = [
        path for each in experts for path, part in each.parameters.items() if part.requires_grad and not _hooked(part)
    ]
    if not experts:
        return
    count = experts[0].mesh.size()
    paths = tuple(each.path for each in experts)
    wrapper = _averaging(model)
    if wrapper and summed:
        yield Finding(
            "expert gradients", paths,
            f"{wrapper} averages gradients over processes, but those of the experts in {_listed(paths)} are sums over "
            f"the tokens of all {count} processes.",
            f"Divide them by {count} after the backward pass, or in a hook: "
            f"parameter.register_hook(lambda gradient: gradient / {count}).",
        )  # fmt: skip
    elif not wrapper:
        yield Finding(
            "expert gradients", paths,
            f"The experts in {_listed(paths)} are split over {count} processes with tokens of their own, but the model "
            "is neither in DDP nor in FSDP, which would average the gradients of its other parameters.",
            f"Wrap it, or average these gradients in the loop, and divide those of the experts by {count}.",
        )  # fmt: skip


def _partial_gradients(model: nn.Module, split: list[_Split]) -> Iterator[Finding]:
    by_tokens = [each for each in split if _splits_tokens(each.module)]
    if not by_tokens:
        return
    mesh = by_tokens[0].mesh
    partial = tuple(
        path
        for path, each in model.named_parameters()
        if each.requires_grad and not _hooked(each) and not (isinstance(each, DTensor) and _covers(each, mesh))
    )
    if partial:
        yield Finding(
            "partial gradients", partial,
            f"Tokens are split over {mesh.size()} processes outside of {_listed([each.path for each in by_tokens])}, "
            f"so the gradients of {_listed(partial)} are those of this process's tokens alone.",
            "Lay these parameters out on the mesh (torch's SequenceParallel does it for norms), or sum their gradients "
            "over the processes.",
        )  # fmt: skip


def _splits_tokens(module: nn.Module) -> bool:
    if isinstance(module, TensorParallelFFN):
        return isinstance(module.style.input_layouts, Shard) or isinstance(module.style.output_layouts, Shard)
    return isinstance(module, VocabularyParallelLoss) and isinstance(module.style.input_layouts, Shard)


def _dropout(model: nn.Module, split: list[_Split]) -> Iterator[Finding]:
    by_hidden = [each for each in split if isinstance(each.module, TensorParallelFFN)]
    if not by_hidden or any(_splits_tokens(each.module) for each in by_hidden):
        return
    inside = tuple(f"{each.path}." for each in by_hidden)
    masks = tuple(
        path
        for path, module in model.named_modules()
        if not f"{path}.".startswith(inside)
        and ((isinstance(module, _DropoutNd) and module.p) or (type(module) is FusedFFN and module.dropout))
    )
    if masks:
        yield Finding(
            "dropout", masks,
            f"{_listed(masks)} must draw the same mask in all {by_hidden[0].mesh.size()} processes, between which "
            f"{_listed([each.path for each in by_hidden])} expect equal inputs.",
            "Call torch.manual_seed with the same number in all of them.",
        )  # fmt: skip


def _left_out_of_ddp(model: nn.Module) -> Iterator[Finding]:
    for path, module in model.named_modules():
        if not isinstance(module, DistributedDataParallel):
            continue
        ignored = module.parameters_to_ignore
        plain = tuple(
            _joined(path, f"module.{name}")
            for name, each in module.module.named_parameters()
            if name in ignored and each.requires_grad and not isinstance(each, DTensor) and not _hooked(each)
        )
        if plain:
            yield Finding(
                "left out of DDP", plain,
                f"DDP was told to ignore {_listed(plain)}, which no process shares with another: each trains its own.",
                "Let it ignore DTensors only.",
            )  # fmt: skip


def _optimizers(split: list[_Split], optimizers: tuple[Optimizer, ...]) -> Iterator[Finding]:
    if not optimizers:
        return
    held = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    missing = tuple(
        path for each in split for path, part in each.parameters.items() if part.requires_grad and id(part) not in held
    )
    if missing:
        yield Finding(
            "optimizer", missing,
            f"No optimizer has {_listed(missing)}, which splitting made anew.",
            "Make the optimizer after parallelize_module.",
        )  # fmt: skip


def _averaging(model: nn.Module) -> str | None:
    """What averages gradients over processes, or None."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return "DDP"
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            return "FSDP"
    return None


def _hooked(parameter: Tensor) -> bool:
    """Whether something of the user's changes its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _covers(parameter: DTensor, mesh: DeviceMesh) -> bool:
    """Whether a parameter is laid out on ``mesh``, alone or among others, so that its gradient is complete."""
    names, own = mesh.mesh_dim_names, parameter.device_mesh.mesh_dim_names
    return parameter.device_mesh == mesh or (names is not None and own is not None and set(names) <= set(own))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _listed(paths: tuple[str, ...] | list[str]) -> str:
    """The first paths, and how many more there are."""
    shown = [path or "the model itself" for path in paths[:_MOST_PATHS]]
    if len(paths) > len(shown):
        return f"{', '.join(shown)} and {len(paths) - len(shown)} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
