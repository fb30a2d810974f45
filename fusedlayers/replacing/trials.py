"""A trial: a method of a small copy of a block runs on random numbers, and its linears note what they are given.

It is code of the user's, run to see what it computes: on the CPU, and without a trace in torch's global state.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from .small_copies import linears, small_copy

# A method of a block, bound to nothing: it takes the block, then tensors.
Method = Callable[..., Any]
# Of the rows of an input: what is cut off, saturates or is compared with a constant shows at one of these.
SCALES = torch.tensor([[[0.05], [1.0], [1.0]], [[8.0], [60.0], [1000.0]]], dtype=torch.float64, device="cpu")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# Of the largest number of a row.
_TOLERANCE = 1e-8


class _InFloat64(TorchFunctionMode):
    """Casts to float32 become casts to float64: norms and gates ask for float32, whatever comes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*map(_wider, args), **{name: _wider(value) for name, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def quietly() -> Iterator[None]:
    """What runs inside has gradients and no autocast, makes its tensors on the CPU, stays in float64, and draws from
    a generator that is set back; its warnings, which are about no call of the user's, are not shown.

    Neither dispatch modes nor hooks of saved tensors see it: a first call may be made under a checkpoint, which would
    take what it saves, and what it computes, for the model's. Nor do transforms of torch.func, which forbid leaves.
    """
    state = random.getstate()
    with ExitStack() as stack:
        stack.callback(random.setstate, state)
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            # Only the innermost hooks are called.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(_InFloat64())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # Not torch.manual_seed, which would set the generators of all devices.
        torch.default_generator.manual_seed(0)
        random.seed(0)
        yield


class LinearCall(NamedTuple):
    """A call of the linear layer at this path."""

    path: str
    input: Tensor
    output: Tensor


class Trial(NamedTuple):
    """What a method gave for these inputs, and the calls of linears on the way, in their order."""

    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    calls: tuple[LinearCall, ...]


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, up to the rounding of float64."""
    if one.shape != other.shape:
        return False
    largest = torch.maximum(one.detach().abs(), other.detach().abs()).amax(-1, keepdim=True) if one.dim() else one.abs()
    return bool(((one - other).detach().abs() <= _TOLERANCE * largest).all())


def tensors_in(result: Any) -> tuple[Tensor, ...]:
    """The tensors of floating point numbers in a result, however nested."""
    return tuple(each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_floating_point())


class Bench:
    """Where trials of one method are made.

    Args:
        block: the user's; it is neither called nor changed.
        by: the divisor of the sizes of its copies.
        method: what is tried.
        widths: of the tensors that the method takes, in the block; each gets ``[2, 3, width]``.
    """

    def __init__(self, block: nn.Module, by: int, method: Method, widths: Sequence[int]) -> None:
        self.block, self.by, self.method, self.widths = block, by, method, widths
        self._drawn: list[Tensor] = []

    def copy(self, training: bool = False) -> nn.Module:
        """A copy of the block, whose modules train or not."""
        copied = small_copy(self.block, self.by, self._drawn)
        for module in copied.modules():
            # Past train(), which may be the user's.
            module.__dict__["training"] = training
        return copied

    def inputs(self) -> tuple[Tensor, ...]:
        """The random inputs, the same ones every time."""
        generator = torch.Generator().manual_seed(1)
        options: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
        return tuple(
            (torch.randn(2, 3, width // self.by, **options) * SCALES).requires_grad_() for width in self.widths
        )

    def run(self, copied: nn.Module) -> Trial:
        """The trial of a copy, whose linears are watched from now on.

        Raises:
            Exception: whatever the method raises.
        """
        calls: list[LinearCall] = []

        def watched(path: str, linear: nn.Module, x: Tensor) -> Tensor:
            output = type(linear).forward(linear, x)
            calls.append(LinearCall(path, x, output))
            return output

        seen: set[int] = set()
        for path, linear in linears(copied):
            if id(linear) not in seen:
                linear.__dict__["forward"] = functools.partial(watched, path, linear)
                seen.add(id(linear))
        inputs = self.inputs()
        # What a method overwrites is not what it was given.
        result = self.method(copied, *(x * 1 for x in inputs))
        hidden = [each for each in tree_leaves(result) if not isinstance(each, (Tensor, *_PLAIN))]
        if hidden:
            raise TypeError(f"a result of type {type(hidden[0]).__name__}, into which nobody can look")
        return Trial(inputs, tensors_in(result), tuple(calls))


def gradients(results: Sequence[Tensor], inputs: Sequence[Tensor], block: nn.Module) -> tuple[Tensor | None, ...]:
    """The gradients of inputs and parameters, of a sum of the results with fixed random weights."""
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(y.shape, generator=generator, dtype=y.dtype, device="cpu") for y in results]
    wanted = [y for y in results if y.requires_grad]
    leaves = [*inputs, *(p for p in block.parameters() if p.requires_grad)]
    chosen = [weight for y, weight in zip(results, weights, strict=True) if y.requires_grad]
    if not wanted:
        return (None,) * len(leaves)
    return torch.autograd.grad(wanted, leaves, chosen, allow_unused=True)
