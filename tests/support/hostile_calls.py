"""A call of a block, what a trigger may change before it, and everything that the call is seen to do."""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from types import ModuleType, TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.hostile_blocks import EXPERTS, WIDTH

LONG, LARGE = 600, 1e5
# The first number of every generator is below 0.09 after this seed, and above 0.1 after the usual one.
RARE, USUAL = 1630, 0
Observed = dict[str, Any]


class Call:
    """One call of a block, and what its trigger changes before it; everything but the block is as before afterwards."""

    def __init__(self, source: ModuleType, written: str, block: nn.Module, kind: str) -> None:
        self.source, self.block, self.kind = source, block, kind
        # The class with the statement, which is the block's own, or that from which it was made.
        self.written: Any = getattr(source, written)
        self.patch, self.stack = pytest.MonkeyPatch(), contextlib.ExitStack()
        self.generator = torch.Generator().manual_seed(3)
        self.x = self._draw(4) if kind == "experts" else self._draw(4, 5)
        self.seed, self.as_given, self.requires_grad = USUAL, False, True

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stack.close()
        self.patch.undo()

    def _draw(self, *rows: int) -> Tensor:
        dtype = next(self.block.parameters()).dtype
        return torch.randn(*rows, WIDTH, generator=self.generator, dtype=torch.float64).to(dtype)

    def rows(self, *count: int) -> None:
        """Another number of rows, or with more numbers, of dimensions."""
        self.x = self._draw(*(count if self.kind == "experts" or len(count) > 1 else (*count, 1)))

    def value(self, value: float) -> None:
        """One number of the input."""
        self.x.view(-1)[0] = value

    def grow(self) -> None:
        """Input and parameters become large."""
        self.x = self.x * LARGE
        with torch.no_grad():
            for parameter in self.block.parameters():
                parameter.mul_(LARGE)

    def freeze(self) -> None:
        """Nothing requires a gradient."""
        self.requires_grad = False
        self.block.requires_grad_(False)

    def transpose(self) -> None:
        """The input keeps its values, and is not contiguous."""
        self.x = self.x.transpose(0, 1).contiguous().transpose(0, 1)

    def globally(self, name: str, value: Any) -> None:
        self.patch.setattr(self.source, name, value)

    def on_class(self, name: str, value: Any) -> None:
        self.patch.setattr(self.written, name, value)

    def put(self, into: Any, key: Any, value: Any) -> None:
        """An element of a list or of a dictionary."""
        self.stack.callback(into.__setitem__, key, into[key])
        into[key] = value

    def enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        self.stack.enter_context(context)

    def deterministic(self) -> None:
        self.stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True)

    def default_dtype(self) -> None:
        self.stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float16)

    def half(self) -> None:
        self.block.half()
        self.x = self.x.half()

    def with_gradients(self) -> None:
        for parameter in self.block.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def _arguments(self) -> tuple[Tensor, ...]:
        leaf = self.x.detach().clone().requires_grad_(self.requires_grad)
        # A result of another operation, as inside a model, which a block may write to.
        x = leaf if self.as_given else leaf * 1
        if self.kind != "experts":
            return leaf, x
        chosen = torch.rand(len(leaf), EXPERTS, generator=torch.Generator().manual_seed(4)).argsort(-1)[:, :2]
        return leaf, x, chosen, torch.linspace(0.5, 1.5, chosen.numel(), dtype=leaf.dtype).view(chosen.shape)

    def observe(self) -> Observed:
        """Everything that the call does: result, gradients, what it writes, prints and raises."""
        self.source.EVENTS.clear()
        self.source.seed(self.seed)
        own: Any = self.block
        printed = io.StringIO()
        seen: Observed = {}
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(printed):
            warnings.simplefilter("always")
            # In the trigger's mode, and back in it afterwards.
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                leaf, *given = self._arguments()
                try:
                    y = own(*given)
                    seen |= {"y": y.detach().clone(), "grad mode": torch.is_grad_enabled(), "x": given[0].detach()}
                    if y.requires_grad:
                        with torch.enable_grad():
                            known = [("x", leaf), *own.named_parameters()]
                            wanted = [(name, tensor) for name, tensor in known if tensor.requires_grad]
                            # No sum of these over rows or columns nearly cancels.
                            factor = (torch.arange(y.numel()).sin() + 0.5).view(y.shape).to(y.dtype)
                            found = torch.autograd.grad(y, [each for _, each in wanted], factor, allow_unused=True)
                        seen |= {f"d {name}": each for (name, _), each in zip(wanted, found, strict=True)}
                except Exception as error:
                    seen["raised"] = type(error)
        seen |= {"printed": printed.getvalue(), "events": list(self.source.EVENTS)}
        seen["next"] = (random.random(), float(torch.rand(())), self.source.RNG.random())
        seen["warned"] = [str(each.message) for each in warned if "hostile" in str(each.message)]
        state = {**dict(own.named_buffers()), **vars(own)}
        return seen | {f"self.{name}": each for name, each in state.items() if type(each) in (int, float, Tensor)}


def alike(ours: Observed, theirs: Observed) -> bool:
    """Whether two calls did the same, tensors up to rounding."""
    return ours.keys() == theirs.keys() and all(_alike(ours[name], theirs[name]) for name in ours)


def _alike(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return type(ours) is type(theirs) and ours == theirs
    if ours.dtype == theirs.dtype and torch.equal(ours, theirs):
        return True
    # The largest number becomes 1, so that tolerances are relative to it. Sixteen bits are rounded at other places.
    finite = theirs[theirs.isfinite()].abs()
    by = finite.max() if finite.numel() and finite.max() > 0 else 1.0
    limits = {"rtol": 0.0, "atol": 16 * torch.finfo(theirs.dtype).eps} if theirs.dtype == torch.float16 else {}
    try:
        torch.testing.assert_close(ours / by, theirs / by, equal_nan=True, **limits)
    except AssertionError:
        return False
    return True
