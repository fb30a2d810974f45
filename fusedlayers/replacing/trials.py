"""Trials of a loss function that is known by its name: what it gives for some numbers, undisturbed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

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


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, up to the rounding of float64."""
    if one.shape != other.shape:
        return False
    largest = torch.maximum(one.detach().abs(), other.detach().abs()).amax(-1, keepdim=True) if one.dim() else one.abs()
    return bool(((one - other).detach().abs() <= _TOLERANCE * largest).all())
