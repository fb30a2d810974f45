"""Code of the user's, run to see what it computes: on the CPU, and without a trace in torch's global state."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _InFloat64(TorchFunctionMode):
    """Casts to float32 become casts to float64: norms and gates ask for float32, whatever comes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*map(_wider, args), **{name: _wider(value) for name, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def quietly() -> Iterator[None]:
    """What runs inside has gradients and no autocast, makes its tensors on the CPU, stays in float64, and draws from
    a generator that is set back; its warnings, which are about no call of the user's, are not shown."""
    state = random.getstate()
    with ExitStack() as stack:
        stack.callback(random.setstate, state)
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
