"""Small copies of a block, on the CPU and in float64, on which can be tried what the block computes.

A copy has the classes and options of the block, and parameters of its own: random ones, whose sizes are those of the
block over a common divisor, so that sums and ratios of sizes stay. Nothing of the block is called or changed, and it
may lie on any device, "meta" included.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..modules import KEPT, is_transposed

# Smaller sizes would let what differs look alike.
_SMALLEST = 8
# What is put on an instance to run around its class; and what a replaced block keeps.
_OF_THE_INSTANCE = ("forward", "_compiled_call_impl", KEPT)
# Elements of a copy whose sizes cannot be divided: 32 MiB.
LARGEST = 1 << 22
# A block may refer to a trainer, and so to everything.
_MOST_OBJECTS = 1000


def widths(module: nn.Module) -> tuple[int, int] | None:
    """(in_features, out_features) of a linear layer of any making; None for anything else."""
    return _integers(module, "in_features", "out_features")


def sizes_of_linear(module: nn.Module) -> tuple[int, int] | None:
    """The same, for transformers' ``Conv1D``, too."""
    return widths(module) or _integers(module, "nx", "nf")


def _integers(module: nn.Module, *names: str) -> tuple[int, int] | None:
    inputs, outputs = (getattr(module, name, None) for name in names)
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


def sizes_in(block: nn.Module) -> set[int]:
    """The sizes of a block's linears."""
    return {size for module in block.modules() for size in sizes_of_linear(module) or ()}


def divisor(sizes: set[int]) -> int:
    """The largest common divisor of these sizes that leaves none of them too small."""
    common = math.gcd(*sizes)
    if not common:
        return 1
    largest = max(1, min(sizes) // _SMALLEST)
    return max(each for each in range(1, min(common, largest) + 1) if common % each == 0)


def elements(block: nn.Module) -> int:
    """How many numbers the parameters and buffers of a block hold."""
    return sum(tensor.numel() for tensor in (*block.parameters(), *block.buffers()))


def _is_object(value: Any) -> bool:
    """Whether a value is an instance of a class of the user's that nothing but attributes tell apart."""
    kind = type(value)
    reduced: Any = kind.__reduce_ex__
    plain = reduced is object.__reduce_ex__ and kind.__module__ not in ("builtins", "types", "functools")
    return (
        plain
        and not callable(value)
        and not isinstance(value, nn.Module)
        and type(getattr(value, "__dict__", None)) is dict
    )


class _Copier:
    def __init__(self, sizes: set[int], by: int, drawn: list[Tensor]) -> None:
        self.by, self.drawn, self.used = by, drawn, 0
        self.sizes = sizes - {0}
        self.generator = torch.Generator().manual_seed(0)
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[int, Tensor] = {}
        self.objects: dict[int, Any] = {}

    def size(self, size: int) -> int:
        # Packed projections have a multiple of a size.
        return size // self.by if any(size % each == 0 for each in self.sizes) and size else size

    def value(self, value: Any) -> Any:
        """An attribute: sizes are divided, and what a method might write into is no longer the block's."""
        if isinstance(value, Tensor):
            return self.constant(value)
        if type(value) in (list, dict, set) or _is_object(value):
            return self.copied(value)
        if type(value) is int:
            return self.size(value)
        if type(value) in (tuple, torch.Size) and all(type(each) is int for each in value):
            return type(value)(self.size(each) for each in value)
        return value

    def copied(self, value: Any) -> Any:
        """A container, an object, and what lies in them, once each."""
        if id(value) not in self.objects:
            if len(self.objects) >= _MOST_OBJECTS:
                return value
            try:
                made = copy.copy(value)
            except Exception:
                # A lock, say: the method gets the user's.
                return value
            self.objects[id(value)] = made
            if isinstance(made, (list, dict)) and len(made) > _MOST_OBJECTS:
                return made
            if isinstance(made, list):
                made[:] = [self.inner(each) for each in value]
            elif isinstance(made, dict):
                made.update((name, self.inner(each)) for name, each in value.items())
            elif _is_object(value):
                vars(made).update((name, self.inner(each)) for name, each in vars(value).items())
        return self.objects[id(value)]

    def inner(self, value: Any) -> Any:
        """What lies in a container or in an object: sizes stay."""
        if isinstance(value, Tensor):
            return self.constant(value)
        return self.copied(value) if type(value) in (list, dict, set) or _is_object(value) else value

    def random(self, *shape: int, scale: float) -> Tensor:
        # Drawing is the most of the work for large blocks, and every copy has the same numbers.
        if self.used == len(self.drawn):
            self.drawn.append(torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu") * scale)
        self.used += 1
        return self.drawn[self.used - 1].clone()

    def constant(self, tensor: Tensor) -> Tensor:
        """A tensor that is no parameter, with its values if it has any."""
        if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
            return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        return tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)

    def tensor(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = self._tensor(tensor)
        return self.tensors[id(tensor)]

    def _tensor(self, tensor: Tensor) -> Tensor:
        shape = [self.size(size) for size in tensor.shape]
        if not isinstance(tensor, nn.Parameter) and shape == list(tensor.shape):
            return self.constant(tensor)
        if tensor.is_floating_point():
            copied = self.random(*shape, scale=1.0 if len(shape) < 2 else 2 / math.sqrt(max(1, shape[-1])))
        else:
            copied = torch.zeros(shape, dtype=tensor.dtype, device="cpu")
        return nn.Parameter(copied, copied.is_floating_point()) if isinstance(tensor, nn.Parameter) else copied

    def linear(self, module: nn.Module, inputs: int, outputs: int) -> nn.Module:
        """A linear of any making as a plain one, but where its class is a plain one already."""
        inputs, outputs = self.size(inputs), self.size(outputs)
        copied: nn.Module = nn.Linear(1, 1, device="meta")
        transposed = is_transposed(module)
        if transposed:
            copied = object.__new__(type(module))
            copied.__dict__ = self.attributes(module)
        else:
            vars(copied).update(in_features=inputs, out_features=outputs)
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        weight = self.random(*shape, scale=2 / math.sqrt(inputs))
        bias = None if getattr(module, "bias", None) is None else self.random(outputs, scale=0.5)
        copied._parameters = {
            "weight": nn.Parameter(weight),
            "bias": None if bias is None else nn.Parameter(bias),
        }
        return copied

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        fresh = vars(nn.Module())
        left = (*fresh, *_OF_THE_INSTANCE)
        own = {name: self.value(value) for name, value in vars(module).items() if name not in left}
        return fresh | own

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) in self.modules:
            return self.modules[id(module)]
        if sizes := sizes_of_linear(module):
            copied = self.modules[id(module)] = self.linear(module, *sizes)
            return copied
        copied = self.modules[id(module)] = object.__new__(type(module))
        # Past the module's own __setattr__.
        object.__setattr__(copied, "__dict__", self.attributes(module))
        copied.__dict__["training"] = module.training
        for place in ("_parameters", "_buffers"):
            copied.__dict__[place] = {name: self.tensor(each) for name, each in vars(module)[place].items()}
        copied.__dict__["_modules"] = {
            name: None if each is None else self.module(each) for name, each in vars(module)["_modules"].items()
        }
        return copied


def small_copy(
    block: nn.Module, by: int, drawn: list[Tensor] | None = None, sizes: set[int] | None = None
) -> nn.Module:
    """A copy of ``block`` whose sizes are divided ``by`` this; every copy has the same numbers.

    ``drawn`` keeps the numbers of one copy for the next ones; ``sizes`` are those to divide, by default the linears'.
    """
    return _Copier(sizes_in(block) if sizes is None else sizes, by, [] if drawn is None else drawn).module(block)


def linears(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers of any making in a block, and their paths; not what such a layer consists of."""
    for name, child in block.named_children():
        if sizes_of_linear(child) is not None:
            yield name, child
        else:
            yield from ((f"{name}.{path}", linear) for path, linear in linears(child))
