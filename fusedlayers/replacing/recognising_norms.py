"""Which modules compute an RMSNorm or a LayerNorm over the last dimension, read from trials and not from names.

A copy of the module runs on random numbers in float64, and the norm that gives the same results and gradients is what
it computes. Between casts and products norms differ, and float64 does not show that. So the same is done in each dtype
in which a norm may be called, and judged as everything else is: torch's fused norm must be as close to float64 as the
module's own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ..closeness import compare
from .formulas import names_read, options_read
from .small_copies import small_copy
from .trials import alike, gradients, quietly

_FUSED = (F.rms_norm, F.layer_norm, torch.rms_norm, torch.layer_norm)
# One of these every norm calls; without parameters a module that calls none is not tried.
_SUMS = {"mean", "sum", "var", "var_mean", "std", "std_mean", "norm", "vector_norm", "layer_norm", "rms_norm"}
# What some norms have written in their forward.
_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Measured on an H200: their gradient of x is up to four roundings off, where two are the limit of what is close. Under
# autocast, whose products round 65,536 times as coarsely, that does not show.
WHY_NOT_FLOAT32 = "torch's fused norms round float32 more often than its own forward, and so run under autocast alone"
# Of the rows of an input: from where eps is all that counts to where float16 is near its end.
_SCALES = (1e-6, 1e-4, 1e-2, 1.0, 30.0, 1000.0)
_SHAPES = ((6,), (6, 3), (6, 1, 2))
# Narrower ones would let what differs look alike.
_NARROWEST = 8
_USUAL_WIDTH = 64
_ROWS = 64


class Norm(NamedTuple):
    """A norm over the last dimension: ``operation`` of ``torch.nn.functional``, and where its numbers come from.

    ``weight`` and ``bias`` are names of parameters; with ``one_plus`` the weight is 1 + parameter. ``options`` are the
    attributes that the forward reads, with the values for which this is what it computes; ``dtypes`` are those in which
    it is close to what the forward gives, and ``others`` those in which it is not, with the reasons.
    """

    operation: str
    weight: str | None
    bias: str | None
    one_plus: bool
    eps: float
    options: tuple[tuple[str, Any], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    others: tuple[tuple[torch.dtype, str], ...] = ()

    def run(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm of x, in its dtype, by torch's fused operation."""
        # On a GPU the fused operations compute in float32 and round once, on a CPU they sum gradients in sixteen bits.
        # And 1 + weight, rounded to sixteen bits, would cost as much precision again as the result itself.
        if x.is_cuda and not self.one_plus:
            return self._fused(x, weight, bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        if weight is not None:
            weight = weight.to(wide) + 1 if self.one_plus else weight.to(wide)
        return self._fused(x.to(wide), weight, None if bias is None else bias.to(wide)).to(x.dtype)

    def _fused(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.operation == "rms_norm":
            return F.rms_norm(x, x.shape[-1:], weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)

    def of(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias of a module."""
        own = module._parameters
        return own.get(self.weight or ""), own.get(self.bias or "")

    def __str__(self) -> str:
        weight = "no weight" if self.weight is None else "weight + 1" if self.one_plus else "weight"
        return f"{self.operation}, {weight}{'' if self.bias is None else ' and bias'}, eps={self.eps:g}"


def recognise_norm(module: nn.Module) -> Norm | str | None:
    """The norm that a module computes; why none is seen in it although it is one; None: it is none, or torch's own."""
    if not _may_be_norm(module):
        return None
    with quietly():
        norm = _in_float64(module)
        if not isinstance(norm, Norm):
            return norm
        # Past the mode that makes float64 of float32.
        with torch._C.DisableTorchFunction():
            reasons = {dtype: _why_not_close(module, norm, dtype) for dtype in DTYPES}
    close = tuple(dtype for dtype, reason in reasons.items() if reason is None)
    others = tuple((dtype, reason) for dtype, reason in reasons.items() if reason is not None)
    return norm._replace(dtypes=close, others=others)


def _may_be_norm(module: nn.Module) -> bool:
    """Whether a module has nothing but up to two vectors of one size, and a forward of its own for one tensor."""
    kind = type(module)
    own = [each for each in module._parameters.values() if each is not None]
    if isinstance(module, torch.jit.ScriptModule) or kind.__module__.startswith("torch.") or any(map(is_lazy, own)):
        return False
    if kind.forward is nn.Module.forward or module._modules or module._buffers or len(own) > 2:
        return False
    if not own and not _SUMS & names_read(kind, "forward"):
        return False
    if any(each.dim() != 1 or each.shape != own[0].shape or not each.is_floating_point() for each in own):
        return False
    parameters = [*inspect.signature(kind.forward).parameters.values()][1:]
    only = [(each.kind, each.default) for each in parameters]
    one = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)
    return only == [one] and width_of_norm(module) >= _NARROWEST


def width_of_norm(module: nn.Module) -> int:
    """The size of what is normalised: that of the parameters, or what an attribute says."""
    for each in module._parameters.values():
        if each is not None:
            return each.shape[0]
    for value in vars(module).values():
        size = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        if type(size) is int and size >= _NARROWEST:
            return size
    return _USUAL_WIDTH


class _Fused(TorchFunctionMode):
    """Notes the dtypes in which torch's fused norms are called."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _FUSED and args:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _in_float64(module: nn.Module) -> Norm | str | None:
    """The norm that a copy computes in float64, if it does so by itself."""
    forward = type(module).forward
    copies = [copy_of_norm(module, training) for training in (False, True)]
    inputs = _inputs(width_of_norm(module))
    before = [{name: id(value) for name, value in vars(each).items()} for each in copies]
    try:
        results = [[forward(each, x) for x in inputs] for each in copies]
    except Exception:
        # The method is the user's, and the numbers are ours: whatever it raises, it takes other inputs.
        return None
    if before != [{name: id(value) for name, value in vars(each).items()} for each in copies]:
        return None
    own, other = copies
    norm = next((each for each in _candidates(own) if _gives(each, own, inputs, results[0])), None)
    if norm is None:
        return None
    if not _gives(norm, other, inputs, results[1]):
        return "it computes something else in training"
    ours = [norm.run(x, *norm.of(other)) for x in inputs]
    pairs = zip(gradients(results[0], inputs, own), gradients(ours, inputs, other), strict=True)
    if not all(one is not None and two is not None and alike(one, two) for one, two in pairs):
        return "its results are those of a norm, but not its gradients"
    if _runs_fused(module):
        return None
    options = options_read(module, "forward", [name for name in (norm.weight, norm.bias) if name is not None])
    return "its forward reads a variable that may change" if options is None else norm._replace(options=options)


def copy_of_norm(module: nn.Module, training: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    copied = small_copy(module, 1)
    copied.__dict__["training"] = training
    for name, each in copied._parameters.items():
        copied._parameters[name] = None if each is None else nn.Parameter(each.detach().to(dtype))
    return copied


def _inputs(width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    scales = torch.tensor(_SCALES, dtype=torch.float64, device="cpu")
    return [
        (
            torch.randn(*shape, width, generator=generator, dtype=torch.float64, device="cpu")
            * scales.reshape(-1, *(1,) * len(shape))
        ).requires_grad_()
        for shape in _SHAPES
    ]


def _candidates(module: nn.Module) -> Iterator[Norm]:
    names = [name for name, each in module._parameters.items() if each is not None]
    given = [value for value in vars(module).values() if type(value) is float and 0 < value < 1]
    for eps in dict.fromkeys((*given, *_EPSILONS)):
        if len(names) < 2:
            weight = names[0] if names else None
            for operation in ("rms_norm", "layer_norm"):
                yield Norm(operation, weight, None, False, eps)
                if weight is not None:
                    yield Norm(operation, weight, None, True, eps)
        else:
            for weight, bias in (names, names[::-1]):
                yield Norm("layer_norm", weight, bias, False, eps)
                yield Norm("layer_norm", weight, bias, True, eps)


def _gives(norm: Norm, module: nn.Module, inputs: list[Tensor], results: list[Any]) -> bool:
    """Whether the norm of each input is the result."""
    return all(
        type(y) is Tensor and y.dtype is x.dtype and alike(norm.run(x, *norm.of(module)), y)
        for x, y in zip(inputs, results, strict=True)
    )


def _runs_fused(module: nn.Module) -> bool:
    """Whether the forward hands its input to one of torch's fused norms as it is: nothing would be gained."""
    x = torch.randn(2, width_of_norm(module), dtype=torch.bfloat16, device="cpu")
    with _Fused() as noted:
        try:
            type(module).forward(copy_of_norm(module, dtype=torch.bfloat16), x)
        except Exception:
            # It takes no such dtype: in float32 it is fused, or it is not fused at all.
            return bool(noted.dtypes)
    return x.dtype in noted.dtypes


def _why_not_close(module: nn.Module, norm: Norm, dtype: torch.dtype) -> str | None:
    """Why the fused norm is not as good as the module's own forward in this dtype, or None."""
    name = str(dtype).removeprefix("torch.")
    generator = torch.Generator().manual_seed(2)
    width = width_of_norm(module)
    scales = torch.tensor(_SCALES, device="cpu").repeat(_ROWS)[:_ROWS, None]
    x, dy = (torch.randn(_ROWS, width, generator=generator, device="cpu") for _ in range(2))
    x, dy = (x * scales).to(dtype).requires_grad_(), dy.to(dtype)
    found: list[dict[str, Tensor | None]] = []
    for wide in (False, False, True):
        copied = copy_of_norm(module, dtype=dtype)
        own = torch.float64 if wide else dtype
        leaf = x.detach().to(own).requires_grad_()
        for each, parameter in copied._parameters.items():
            copied._parameters[each] = None if parameter is None else nn.Parameter(parameter.detach().to(own))
        try:
            y = norm.run(leaf, *norm.of(copied)) if found else type(module).forward(copied, leaf)
        except Exception as error:
            return f"its own forward raises {type(error).__name__} in {name}"
        if y.dtype is not own:
            return f"its own forward gives {str(y.dtype).removeprefix('torch.')} for {name}"
        leaves = {"dx": leaf, **{f"d{each}": p for each, p in copied._parameters.items() if p is not None}}
        slopes = torch.autograd.grad(y, list(leaves.values()), dy.to(own))
        found.append({"y": y.detach(), **dict(zip(leaves, slopes, strict=True))})
    theirs, ours, truth = found
    for each in truth:
        verdict = compare(ours[each], theirs[each], truth[each], name=each)  # type: ignore[arg-type]
        if not verdict.ok:
            return f"in {name} torch's fused norm is not as close to float64 as its own forward: {verdict.message}"
    return None
