"""The logits that a model returns beside a loss computed without them: a tensor that is computed on first use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_iter

from .logits import TO_FLOAT, Logits

_ATEN = torch.ops.aten
# Attributes of a tensor that do not need its values.
_FACTS = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized", "output_nr", "_base",
    "_version", "_backward_hooks",
)  # fmt: skip
_ASKED = (
    "dim", "size", "numel", "stride", "storage_offset", "element_size", "is_contiguous", "is_floating_point",
    "is_complex", "is_inference", "__len__", "requires_grad_",
)  # fmt: skip
# Casts, which `__torch_dispatch__` keeps lazy where it can.
_CASTS = ("float", "to", "contiguous")
_WITHOUT_NUMBERS = frozenset(
    [getattr(Tensor, name).__get__ for name in _FACTS]
    + [getattr(Tensor, name) for name in (*_ASKED, *_CASTS)]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
    + [Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad, torch.autograd.backward]
)
_ARGMAX = (Tensor.argmax, torch.argmax)
# How autograd Functions such as DDP's pass a tensor through. Outside of a Function, a caller of these wants the current
# values.
_HANDED_ON = frozenset([Tensor.detach, Tensor.clone, Tensor.view_as])
# These put a hook on every output of a model to learn when its backward pass begins; the loss has one, too.
_WATCHERS = ("torch.distributed.", "lightning.", "pytorch_lightning.")


class LazyLogits(Tensor):
    """Logits that nobody has used yet, as a tensor.

    Everything that a tensor knows without its values is right from the beginning, and autograd knows its inputs. The
    first use of its values computes them into its own memory. ``__torch_function__`` sees uses in Python,
    ``__torch_dispatch__`` those inside of torch: vmap, collectives, derivatives.
    """

    # None once they are computed.
    _logits: Logits | None
    # Whether the loss would have been computed from it.
    _of_loss: bool

    @staticmethod
    def __new__(cls: type[LazyLogits], logits: Logits) -> LazyLogits:
        dtype, device = logits.dtype, logits.device
        made: Any = Tensor._make_wrapper_subclass(cls, logits.shape, dtype=dtype, device=device)
        made._logits, made._of_loss = logits, False
        return made

    @staticmethod
    def of_loss(logits: Logits) -> LazyLogits:
        """What a model returns for ``logits`` beside the loss that was computed without them."""
        with nullcontext() if torch.is_grad_enabled() is logits._modes[0] else torch.set_grad_enabled(logits._modes[0]):
            found: LazyLogits = _Late.apply(logits, logits._x, logits._weight, logits._bias)
        found._of_loss = True
        return found

    def _compute(self, use: str) -> None:
        logits = self._logits
        if logits is None:
            return
        # Not under the modes and transforms of the first user: later users may have others.
        with temporarily_clear_interpreter_stack(), torch.inference_mode(False), torch.no_grad():
            values = logits._without_gradient(use)
            with _bypassing_protocols():
                self.data = values
        self._logits = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        _check_gradients(function, args, options)
        if function in _ARGMAX and (classes := _argmax(*args, **options)) is not None:
            return classes
        passed_through = function in _HANDED_ON and not torch._C._is_fwd_grad_enabled()
        if not passed_through and function not in _WITHOUT_NUMBERS:
            _compute_all((args, options), getattr(function, "__name__", str(function)))
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        step = _LAZILY.get(function)
        if step is not None and isinstance(args[0], LazyLogits) and args[0]._logits is not None:
            after = step(args[0]._logits, *args[1:], **options)
            if after is not None:
                return LazyLogits(after)
        _compute_all((args, options), str(function))
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with _bypassing_protocols():
            return function(*args, **options)

    def _plain(self, use: str) -> Tensor:
        """The values, in the same memory, as a plain leaf tensor."""
        self._compute(use)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            plain = self.detach()
        return plain.requires_grad_(self.requires_grad)

    # torch refuses these two for subclasses.
    def numpy(self, **options: Any) -> Any:
        """``Tensor.numpy``."""
        return self._plain("in numpy").numpy(**options)

    def tolist(self) -> Any:
        """``Tensor.tolist``."""
        return self._plain("in tolist").tolist()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch's stub has a keyword named Any
        try:
            self._compute("in print")
        except RuntimeError as error:
            return f"<logits {list(self.shape)}, {self.dtype}: {error}>"
        return super().__repr__(**options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.grad_fn is not None:
            return super().__deepcopy__(memo)
        made = memo[id(self)] = copy.deepcopy(self._plain("in a copy"), memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or pickle does not carry the logits' inputs along.
        return self._plain("in a copy").__reduce_ex__(protocol)


class _Late(torch.autograd.Function):
    """Logits of x and a weight: only their gradients are computed here."""

    @staticmethod
    def forward(ctx: Any, logits: Logits, x: Tensor, weight: Tensor, bias: Tensor | None) -> LazyLogits:
        ctx.save_for_backward(x, weight, bias)
        ctx.logits = logits
        return LazyLogits(logits)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        tokens = x.shape[:-1].numel()
        with ctx.logits._autocast():
            dy = ctx.logits._gradient_before_steps(dy, x, weight, bias)
            rows = dy.reshape(tokens, weight.shape[0])
            dx = (dy @ weight).to(x.dtype) if needs_x else None
            dw = (rows.mT @ x.reshape(tokens, x.shape[-1])).to(weight.dtype) if needs_weight else None
            db = rows.sum(0).to(bias.dtype) if needs_bias else None
        return None, dx, dw, db


@contextmanager
def _bypassing_protocols() -> Iterator[None]:
    """Calls that bypass both protocols."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        yield


def _check_gradients(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise an error if somebody asks for the gradient of the loss with respect to the logits."""
    if function is Tensor.register_hook:
        hook = args[1] if len(args) > 1 else options.get("hook")
        defined_in = getattr(getattr(hook, "func", hook), "__module__", None) or ""
        asked = () if defined_in.startswith(_WATCHERS) else args[:1]
    elif function is Tensor.retain_grad:
        asked = args[:1]
    elif function is torch.autograd.grad:
        asked = args[1]
    else:
        asked = options.get("inputs") or () if function is torch.autograd.backward else ()
    if any(isinstance(each, LazyLogits) and each._of_loss and each.grad_fn is not None for each in asked):
        raise RuntimeError(
            f"{function.__name__}: the loss of this model was computed without its logits, so no gradient of the loss "
            "reaches outputs.logits: replace the model with loss=False. Of what you compute from the logits yourself, "
            "take the gradient at a copy of them: logits = outputs.logits.clone()"
        )


def _compute_all(given: Any, use: str) -> None:
    for each in tree_iter(given):
        if isinstance(each, LazyLogits):
            each._compute(f"in {use}")


def _argmax(input: Any, dim: Any = None, keepdim: Any = False, **others: Any) -> Tensor | None:
    """The arg-max of every token without logits, or None: as for an accuracy, whose logits nobody else needs."""
    logits = input._logits if isinstance(input, LazyLogits) else None
    last = logits is not None and dim in (-1, len(logits.shape) - 1)
    return logits._argmax() if logits is not None and last and keepdim is False and not others else None


def _like(logits: Logits, **options: Any) -> Logits | None:
    """A copy, possibly cast to float32."""
    wanted = {name: value for name, value in options.items() if value is not None and value is not False}
    if wanted.pop("memory_format", torch.preserve_format) not in (torch.preserve_format, torch.contiguous_format):
        return None
    if not wanted:
        return logits._after()
    return logits._after(TO_FLOAT) if wanted == {"dtype": torch.float32} else None


# Operations whose results stay lazy; None if not. Results that share the memory share the logits.
_LAZILY: dict[Any, Callable[..., Logits | None]] = {
    _ATEN.detach.default: lambda logits: logits,
    _ATEN.alias.default: lambda logits: logits,
    _ATEN.view.default: lambda logits, shape: logits if torch.Size(shape) == logits.shape else None,
    _ATEN.clone.default: _like,
    _ATEN._to_copy.default: _like,
}
