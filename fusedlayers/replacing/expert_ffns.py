"""What the experts of a mixture compute: read from numbers of a small copy, and believed only after proof.

transformers' experts share one interface: a module holds the weights of all experts, stacked, flags say how they lie,
and its forward takes tokens, the experts of each token and their weights. The flags name the layout; activation and
gate are those of ``functional.moe_ffn`` with which a small copy and ``reference.moe_ffn`` agree in the result and in
all gradients, on random numbers, in float64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import reference
from ..kernels.activations import ACTIVATIONS
from ..modules import attributes_of, class_name, why_not_plain_tensor, why_not_read_past
from .activations import torch_module_activation
from .reading.sources import codes_in
from .reading.values import PLAIN
from .small_copies import divisor, small_copy
from .trials import SCALES, alike, gradients, quietly

# Set by the interface on every instance. The last two are missing in older releases, which had neither.
_FLAGS = ("has_gate", "has_bias", "is_transposed")
_CONCATENATED, _NORM = "is_concatenated", "has_post_expert_norm"
# What users may write anew to gate in their own way.
_GATE = "_apply_gate"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Those that compute the forward of the class, each in its own way; others may be the user's.
_IMPLEMENTATIONS = (None, "eager", "batched_mm", "grouped_mm", "fusedlayers")
# Parallelism over experts changes it, and no sum depends on it.
_NOT_OPTIONS = ("training", "num_experts")
# Of a trial: its experts, those of every token, and its tokens for each scale of the input.
_EXPERTS, _TOP_K, _TOKENS = 4, 2, 4


class ExpertsFFN(NamedTuple):
    """The FFN of every expert.

    Args:
        names: arguments of ``functional.moe_ffn``, and the parameters that they are.
        formula: its other arguments, by name.
        activation: the attribute that holds the activation, if one does.
        options: the other attributes that the forward reads, and what they were when it was tried.
    """

    names: tuple[tuple[str, str], ...]
    formula: tuple[tuple[str, Any], ...]
    activation: str | None
    options: tuple[tuple[str, Any], ...]

    def tensors(self, module: nn.Module) -> dict[str, Any]:
        """The parameters as arguments of ``functional.moe_ffn``."""
        return {argument: getattr(module, name) for argument, name in self.names}

    def described(self, module: nn.Module) -> str:
        """The formula and its sizes, for the report."""
        given, found = self.tensors(module), dict(self.formula)
        experts, *down = given["w_down"].shape
        hidden, width = down if found["transposed"] else reversed(down)
        gated = "gated " if "gate_up" in self.names[0][1] else ""
        limit = f" within ±{found['limit']:g}" if "limit" in found else ""
        offset = f", up + {found['up_offset']:g}" if "up_offset" in found else ""
        text = f"{gated}{found['activation']}{limit}{offset}, {experts} experts, {width} -> {hidden} -> {width}"
        return f"{', '.join(name for argument, name in self.names if argument[0] == 'w')}: {text}"


class Unproven(Exception):
    """Why no FFN is known that the experts compute."""


def is_experts(module: nn.Module) -> bool:
    """Whether a module has the interface of transformers' experts."""
    return all(type(vars(module).get(flag)) is bool for flag in _FLAGS)


def eager_forward(kind: type[nn.Module]) -> Callable[..., Tensor]:
    """The forward that the author of the class wrote, behind the one that asks for an implementation."""
    return inspect.unwrap(kind.forward)


def implementation(module: nn.Module) -> str | None:
    """Which implementation of the experts the module's configuration asks for."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def run_eagerly(model: nn.Module) -> None:
    """Let all experts in ``model`` run what their author wrote: transformers' own implementations know no float64."""
    for module in model.modules():
        if is_experts(module) and implementation(module) is not None:
            cast(Any, module).config._experts_implementation = "eager"


def find_experts(module: nn.Module) -> ExpertsFFN | str:
    """The FFN of a module with the interface of experts, or why it cannot be fused."""
    if implementation(module) not in _IMPLEMENTATIONS:
        return f"its configuration asks for experts_implementation={implementation(module)!r}"
    if getattr(module, _NORM, False):
        return "a norm follows every expert"
    names = _names(module)
    for holder in (module._parameters, module._buffers):
        for name in holder:
            if holder[name] is not None and name not in dict(names).values():
                return f"it has a tensor {name!r} that is no part of the experts' FFN"
    if reason := why_other_tensors(module, names):
        return reason
    try:
        with quietly():
            return _proven(module, names)
    except Unproven as reason:
        return str(reason)
    except Exception as error:
        # The forward is the user's, and the numbers are ours: whatever it raises, it could not be tried.
        return f"a trial of it ended in {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _names(module: Any) -> tuple[tuple[str, str], ...]:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = (("w_up", up), ("w_down", "down_proj"))
    return (*names, ("b_up", f"{up}_bias"), ("b_down", "down_proj_bias")) if module.has_bias else names


def why_other_tensors(module: nn.Module, names: Sequence[tuple[str, str]]) -> str | None:
    """Why the parameters are not those that ``functional.moe_ffn`` can read, or None."""
    first: Tensor | None = None
    for argument, name in names:
        tensor = getattr(module, name, None)
        if not isinstance(tensor, Tensor):
            return f"it has no parameter {name!r}"
        if reason := why_not_plain_tensor(tensor):
            return f"its {name} {reason}"
        if tensor.dim() != (3 if argument[0] == "w" else 2):
            return f"its {name} has the shape {list(tensor.shape)}"
        first = tensor if first is None else first
        if tensor.dtype not in _DTYPES or tensor.dtype is not first.dtype or tensor.device != first.device:
            return f"its {name} is of {tensor.dtype} on {tensor.device}"
    return None


def why_not_as_found(module: nn.Module, found: ExpertsFFN) -> str | None:
    """What has changed since the FFN of the experts was found, or None."""
    own = module.__dict__
    if _GATE in own:
        return f"has an {_GATE} of its own, set on the instance"
    for name, value in found.options:
        if getattr(module, name, None) != value:
            return f"its {name} was {value!r} when it was replaced"
    if found.activation is not None:
        activation = getattr(module, found.activation, None)
        if torch_module_activation(activation) != found.formula[0][1]:
            return f"its {found.activation} is another one than when it was replaced"
        if isinstance(activation, nn.Module) and (reason := why_not_read_past(activation)):
            return f"its {found.activation} {reason}"
    return why_other_tensors(module, found.names)


class _Trial:
    """The forward of small copies of a module, on random tokens that a few of its experts get."""

    def __init__(self, module: nn.Module, names: Sequence[tuple[str, str]]) -> None:
        self.module, self.names = module, names
        self.method = eager_forward(type(module))
        tensors = [getattr(module, name) for _, name in names]
        self.sizes = {size for tensor in tensors if tensor.dim() == 3 for size in tensor.shape[1:]}
        self.by = divisor(self.sizes)
        self.experts = min(_EXPERTS, tensors[0].shape[0])
        self.width = tensors[1].shape[2 if getattr(module, "is_transposed", False) else 1] // self.by
        self._drawn: list[Tensor] = []

    def copy(self, training: bool = False) -> nn.Module:
        copied = small_copy(self.module, self.by, self._drawn, self.sizes)
        for each in copied.modules():
            each.__dict__["training"] = training
        return copied

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, experts, weights."""
        generator = torch.Generator().manual_seed(1)
        scales = SCALES.flatten().repeat(_TOKENS)
        x = torch.randn(len(scales), self.width, generator=generator, dtype=torch.float64) * scales.unsqueeze(-1)
        top_k = min(_TOP_K, self.experts)
        chosen = torch.rand(len(scales), self.experts, generator=generator).argsort(-1)[:, :top_k]
        weights = torch.randn(len(scales), top_k, generator=generator, dtype=torch.float64)
        return x.requires_grad_(), chosen, weights.requires_grad_()

    def truth(self, copied: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, index, weights = inputs
        return self.method(copied, x * 1, index, weights * 1)

    def oracle(self, copied: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], formula: dict[str, Any]) -> Tensor:
        # A model may have hundreds of experts; the tokens go to the first ones.
        given = {argument: getattr(copied, name)[: self.experts] for argument, name in self.names}
        x, index, weights = inputs
        return reference.moe_ffn(x, index, weights, **given, **formula)


def _proven(module: nn.Module, names: tuple[tuple[str, str], ...]) -> ExpertsFFN:
    trial = _Trial(module, names)
    own, inputs = trial.copy(), trial.inputs()
    truth = trial.truth(own, inputs)
    if not alike(trial.truth(trial.copy(training=True), inputs), truth):
        raise Unproven("its experts compute something else in training")
    if _multiplies_in_float32(trial):
        raise Unproven("its experts multiply in float32, whatever their dtype")
    activation, options = _options(module, trial.method)
    formula = _matching(trial, activation, options, inputs, truth)
    other, again = trial.copy(), trial.inputs()
    expected = gradients((truth,), (inputs[0], inputs[2]), own)
    found = gradients((trial.oracle(other, again, formula),), (again[0], again[2]), other)
    if None in (*found, *expected) or not all(map(alike, found, expected)):  # type: ignore[arg-type]
        raise Unproven("the gradients of its experts are not those of an FFN")
    return ExpertsFFN(names, tuple(formula.items()), activation, tuple(options.items()))


def _options(module: nn.Module, method: Callable[..., Any]) -> tuple[str | None, dict[str, Any]]:
    """The attribute that holds the activation, and the others that the forward and the gate read, with their values."""
    functions = (method, getattr(type(module), _GATE, None))
    read = {
        name
        for function in functions
        if hasattr(function, "__code__")
        for code in codes_in(function.__code__)  # type: ignore[union-attr]
        for name in code.co_names
    }
    activation: str | None = None
    options: dict[str, Any] = {}
    for name, value in {**module._modules, **attributes_of(module)}.items():
        if name not in read or name in _NOT_OPTIONS:
            continue
        if type(value) in PLAIN:
            options[name] = value
        elif torch_module_activation(value) is not None and activation is None:
            activation = name
        else:
            raise Unproven(f"its {name} is {f'a {class_name(value)}' if callable(value) else repr(value)}")
    return activation, options


def _matching(
    trial: _Trial,
    activation: str | None,
    options: dict[str, Any],
    inputs: tuple[Tensor, Tensor, Tensor],
    truth: Tensor,
) -> dict[str, Any]:
    """The arguments of ``functional.moe_ffn`` with which it gives this result."""
    with torch.no_grad():
        for formula in _formulas(trial.module, activation, options):
            if alike(trial.oracle(trial.copy(), inputs, formula), truth):
                return formula
    raise Unproven("the results of its experts are those of no known activation and gate")


def _formulas(module: Any, activation: str | None, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The activation is the first argument of each."""
    known = [name for name in ACTIVATIONS if name != "identity"]
    held = torch_module_activation(getattr(module, activation)) if activation is not None else None
    flag = getattr(module, _CONCATENATED, None)
    layouts = [name for name, said in (("concatenated", True), ("interleaved", False)) if flag in (said, None)]
    limits = [value for value in options.values() if type(value) in (int, float) and 0 < value < float("inf")]
    clamped = [{"limit": float(limit)} for limit in dict.fromkeys(limits)] if module.has_gate else []
    for gate in ({}, *clamped, *({**each, "up_offset": 1.0} for each in clamped)):
        for layout in layouts if module.has_gate else ["separate"]:
            for name in known if held is None else [held]:
                yield {"activation": name, "gate_and_up": layout, "transposed": module.is_transposed} | gate


class _Products(TorchDispatchMode):
    """Notes the dtypes of what products of matrices are given."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "mm" in str(func):
            self.dtypes |= {each.dtype for each in args if isinstance(each, Tensor)}
        return func(*args, **(kwargs or {}))


def _multiplies_in_float32(trial: _Trial) -> bool:
    """Whether the forward casts what it multiplies: in 16 bits the hidden would be rounded that it does not round."""
    # Past the mode that makes float64 of float32.
    with torch._C.DisableTorchFunction(), torch.no_grad(), _Products() as products:
        copied = trial.copy().bfloat16()
        x, index, weights = trial.inputs()
        trial.method(copied, x.bfloat16(), index, weights.bfloat16())
    return products.dtypes != {torch.bfloat16}
