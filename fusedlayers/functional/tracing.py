"""Whether a call is run, or written down as operations for later, and what is known of it then."""

import sys
from dataclasses import fields, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import _FlopCounterMode

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
# The tensors that stand for plain ones while a call is traced.
TRACED_TENSORS = (FakeTensor, FunctionalTensor)
_READERS = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode, _FlopCounterMode)


def traced() -> bool:
    """Whether somebody reads the operations of this call: torch.compile, torch.export, make_fx, a FLOP counter.

    A kernel that is launched past torch's dispatcher would be lost to all of them.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, _READERS) for mode in _get_current_dispatch_mode_stack())


def transformed() -> bool:
    """Whether this call happens inside a transform of torch.func: ``vmap``, ``grad``, ``jvp``."""
    return torch._C._are_functorch_transforms_active()


def recorded_later() -> bool:
    """Whether torch.compile records what it compiles now into CUDA graphs (``mode="reduce-overhead"``)."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.triton.cudagraphs)


def with_known_sizes(problem: Any) -> Any:
    """``problem`` with the sizes of the example that is traced in place of symbols, which stay free of guards.

    A size that only data knows has no example: the problem is then one for torch.
    """
    symbols = {f.name: getattr(problem, f.name) for f in fields(problem)}
    sizes = {name: value.node for name, value in symbols.items() if isinstance(value, torch.SymInt)}
    if not sizes:
        return problem
    if not all(node.has_hint() for node in sizes.values()):
        return replace(problem, **dict.fromkeys(sizes, 1), subclass="tensor whose size depends on data")
    return replace(problem, **{name: node.hint for name, node in sizes.items()})
