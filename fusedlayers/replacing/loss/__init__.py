"""The class that `replace` gives to a language model whose loss can be computed without logits.

Its forward is the original one, run on a stand-in for the model: the last linear layer returns uncomputed
:class:`Logits`, and the loss function computes the loss from their inputs, if they are still uncomputed. Anything else
that the forward does with logits computes them. Only code that inspects their class, or the model's, sees another one:
so the source of the forward is searched for that.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ...functional.call import traced, transformed
from ...functional.linear_cross_entropy import LINEAR_CROSS_ENTROPY, linear_cross_entropy
from ...functional.operands import compute_dtype
from ...modules import (
    LinearCrossEntropyLoss,
    class_name,
    class_path,
    outside_of_traces,
    say_once,
    why_not_now,
    why_not_plain,
)
from ...planning import Device
from ...planning.linear_cross_entropy import saved_bytes as kept_for_loss
from ..reading.sources import codes_in
from ..reading.values import NotUnderstood
from ..report import ALREADY_FUSED, Changes
from ..saving import TOKENS, Facts, of_tokens, planned
from ..swapping import OWN_FORWARD, ReplacedModule, fused_class
from .causal_loss import IGNORED, PARAMETERS, divided, shifted, why_other_loss
from .lazy_logits import LazyLogits
from .logits import NO_LOGITS, Logits, computed
from .looking import Looks

# What a model does when it cannot leave its logits uncomputed, and why.
_COMPUTES = "computes its logits"
_MORE = "its forward does more with them than scale, cap and cast them before the loss"


def find_head(model: nn.Module) -> str | None:
    """The name of the last linear layer of a model whose forward calls it and ``self.loss_function``, or None."""
    if isinstance(model, torch.jit.ScriptModule):
        return None
    forward = type(model).forward
    code = getattr(inspect.unwrap(forward), "__code__", None)
    embeddings = getattr(model, "get_output_embeddings", None)
    if code is None or embeddings is None or "labels" not in inspect.signature(forward).parameters:
        return None
    read = {name for each in codes_in(code) for name in each.co_names}
    if "loss_function" not in read or not hasattr(type(model), "loss_function"):
        return None
    try:
        head = embeddings()
    except Exception:  # user code
        return None
    return next((name for name, child in model._modules.items() if child is head and name in read), None)


# What models call the linear layer that makes their logits.
_HEADS = ("lm_head", "head", "embed_out", "output_projection", "classifier", "score")


def heads_of(model: nn.Module) -> set[nn.Module]:
    """The linear layers of ``model`` that make logits: by their name, or because they share the embedding's weight."""
    embedded = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    found: set[nn.Module] = set()
    for path, module in model.named_modules():
        if (name := find_head(module)) is not None:
            found.update(cast(nn.Module, getattr(module, name)).modules())
        # peft's wrappers hold the layer, or several of them.
        if (isinstance(module, nn.Linear) or class_path(type(module)).startswith("peft.")) and (
            path.rpartition(".")[2] in _HEADS or id(module._parameters.get("weight")) in embedded
        ):
            found.update(module.modules())
        if isinstance(module, LinearCrossEntropyLoss):
            found.add(module.linear)
    return found


def why_head_left(model: nn.Module, name: str) -> str | None:
    """Why the loss of a model with this head needs logits, or None."""
    head: Any = getattr(model, name)
    if type(head) is not nn.Linear:
        return f"{name} is a {class_name(head)}, not exactly nn.Linear"
    if reason := why_not_plain(head):
        return f"{name} {reason}"
    if getattr(model, "_is_replica", False):
        return "it is a replica of nn.DataParallel, which gathers logits"
    return why_other_loss(cast(Any, model).loss_function)


def why_class_stays(model: nn.Module) -> str | None:
    """What else keeps a model with a head from getting another class, or None."""
    if "forward" in vars(model):
        return "has a forward of its own, set on the instance"
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is not None and "__class__" in code.co_freevars:
        return "its forward uses super(), which the stand-in for a module does not have"
    try:
        return Looks(model, inspect.unwrap(type(model).forward), find_head(model)).reason
    except NotUnderstood as reason:
        return f"its forward {reason}"


class FusedLossHead(ReplacedModule):
    """Mixin of the classes of models whose loss is computed without logits."""

    fused_head: ClassVar[str]
    fused_place_of_labels: ClassVar[int]
    fused_keeps_name = True

    def why_called(self, *tensors: Tensor | None) -> str | None:
        """Why a call with labels would run the original forward, or None."""
        changed = self.why_fused_class_changed()
        return changed or why_head_left(self, self.fused_head) or why_not_now(*tensors)

    def run_fused(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the original forward returns; with labels the logits are computed only when they are read."""
        place = self.fused_place_of_labels
        labels = args[place] if len(args) > place else kwargs.get("labels")
        if labels is None:
            return method(self, *args, **kwargs)
        head, function = getattr(self, self.fused_head), cast(Any, self).loss_function
        if is_dynamo_compiling():
            # In evaluation the logits are the result, and a compiled model computes all of its results.
            if not self.leaves_logits_in_traces():
                return method(self, *args, **kwargs)
            # Dynamo guards what is read here.
            if head.forward is None or function is None:
                return method(self, *args, **kwargs)
        else:
            reason = self.why_called()
            # Not in inference mode, which has no version counters, nor in the forward pass of an autograd Function,
            # such as a reentrant checkpoint, outside of which the logits would have no gradient.
            if reason is not None or traced() or transformed() or not torch._C._is_fwd_grad_enabled():
                if reason is not None:
                    say_once(self, reason, OWN_FORWARD)
                return method(self, *args, **kwargs)
        inside = HeadInside(self, self.fused_head, head, function)
        return inside.for_caller(method(inside.stand_in(method), *args, **kwargs))

    def leaves_logits_in_traces(self) -> bool:
        """Whether a traced call leaves the logits uncomputed, for Dynamo to trace."""
        return self.training and torch.is_grad_enabled() and self.may_leave_logits_in_traces()

    @outside_of_traces
    def may_leave_logits_in_traces(self) -> bool:
        """Whether a traced call may leave the logits uncomputed: not if torch computes the loss from them at any batch
        size."""
        if self.why_called() is not None:
            return False
        _, _, path = _facts(getattr(self, self.fused_head))
        return path not in LINEAR_CROSS_ENTROPY.torch_paths


class HeadInside:
    """The last linear layer and the loss function of a model, during one call of its forward.

    Dynamo guards every global that it reads, but nothing of an object that is created while it traces: so the
    replacements for both are methods.
    """

    def __init__(self, model: nn.Module, name: str, head: nn.Linear, function: Callable[..., Tensor]) -> None:
        self.model, self.name, self.head, self.function = model, name, head, function

    def stand_in(self, method: Callable[..., Any]) -> StandIn:
        """The model as its forward sees it."""
        head = StandIn(self.head, self.call_head, {})
        return StandIn(self.model, method, {self.name: head, "loss_function": self.call_loss})

    def call_head(self, stand_in: StandIn, *args: Any, **options: Any) -> Any:
        """What the forward gets from the linear layer."""
        given = (*args, *options.values())
        x = given[0] if len(given) == 1 and isinstance(given[0], Tensor) else None
        # Dynamo itself recognises tensor subclasses.
        if x is not None and (is_dynamo_compiling() or (why_not_now(x) is None and not x.is_inference())):
            return Logits(x, self.head.weight, self.head.bias)
        return self.head(*args, **options)

    def call_loss(self, *args: Any, **options: Any) -> Tensor:
        """What the forward gets from the loss function."""
        found = self.loss(**(dict(zip(PARAMETERS, args, strict=False)) | options))
        if found is not None:
            return found
        args, options = computed((args, options), "in the loss function")
        return self.function(*args, **options)

    def loss(
        self,
        logits: Any = None,
        labels: Any = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor | None:
        """The loss without logits; None if the loss function must be given logits, as when torch computes both."""
        arithmetic = logits._arithmetic() if isinstance(logits, Logits) and logits._values is None else None
        if arithmetic is None:
            say_once(self.model, _MORE, _COMPUTES)
        if arithmetic is None or not isinstance(labels, Tensor):
            return None
        x, weight, bias = logits._x, logits._weight, logits._bias
        if logits._modes_now() != logits._modes or vocab_size != weight.shape[0] or type(ignore_index) is not int:
            return None
        target = shifted(labels, shift_labels, ignore_index)
        if target.dtype is not torch.int64 or target.numel() != x.shape[:-1].numel():
            return None
        target = target.reshape(x.shape[:-1]).to(x.device)
        logits._check_unchanged("in the loss")
        softcap, scale = arithmetic
        items = num_items_in_batch
        given: dict[str, Any] = {
            "linear_bias": bias, "reduction": "mean" if items is None else "sum", "ignore_index": ignore_index,
            "softcap": softcap, "logit_scale": scale,
        }  # fmt: skip
        if is_dynamo_compiling():
            return divided(linear_cross_entropy(x, weight, target, **given), items)
        tensors, options = LINEAR_CROSS_ENTROPY.bound(x, weight, target, **given)
        call = LINEAR_CROSS_ENTROPY.prepared(tensors, options)
        return None if call.runs_eager else divided(LINEAR_CROSS_ENTROPY.run(call, tensors), items)

    def for_caller(self, outputs: Any) -> Any:
        """The outputs of the forward, with uncomputed logits replaced by what the caller may use."""
        if not isinstance(outputs, (Logits, dict, list, tuple)) and dataclasses.is_dataclass(outputs):
            for field in dataclasses.fields(outputs):
                value = getattr(outputs, field.name, None)
                if (given := self.value_for_caller(value)) is not value:
                    # Works for a frozen dataclass, too.
                    object.__setattr__(outputs, field.name, given)
            return outputs
        return self.value_for_caller(outputs)

    def value_for_caller(self, value: Any) -> Any:
        """One output, or a container of them: the same object if it contains no logits."""
        if isinstance(value, Logits):
            return self.logits_for_caller(value)
        if isinstance(value, (dict, list)):
            for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (given := self.value_for_caller(each)) is not each:
                    value[key] = given
        elif isinstance(value, tuple):
            items = [self.value_for_caller(each) for each in value]
            for place in range(len(items)):
                if items[place] is not value[place]:
                    return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
        return value

    def logits_for_caller(self, logits: Logits) -> Any:
        """Logits that the forward computed; else a tensor that computes them on use, or an object that says why it
        cannot."""
        if logits._values is not None:
            return logits._values
        if is_dynamo_compiling():
            # After a graph break in the model's call, the eager rule decided that, not this one.
            left = cast(FusedLossHead, self.model).leaves_logits_in_traces()
            return NO_LOGITS if left else logits._tensor("in a compiled model")
        # Dynamo must not trace, frame by frame, the code that makes a tensor without memory.
        callback = torch._C._dynamo.eval_frame.set_eval_frame(None)
        try:
            return LazyLogits.of_loss(logits)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(callback)


class StandIn:
    """A module as the method sees it: its attributes, except for ``others``; calls go to ``function``, with it as
    self."""

    def __init__(self, module: nn.Module, function: Callable[..., Any], others: dict[str, Any]) -> None:
        # Bypasses __setattr__; not __dict__.update, which torch 2.11's Dynamo cannot trace.
        for name, value in {"_fused_module": module, "_fused_function": function, **others}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_fused_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_fused_module"], name, computed(value, f"kept as {name}"))

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_fused_module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fused_function(self, *args, **kwargs)

    __call__ = forward


@torch.enable_grad()
def _facts(head: nn.Linear, on: Device | None = None) -> Facts:
    """What the report says of the loss of a model's last linear layer: the mean over a training batch's tokens."""
    weight = head.weight
    x, target = of_tokens(weight.shape[1], compute_dtype(weight)), of_tokens(1, torch.int64, requires_grad=False)
    found = planned(LINEAR_CROSS_ENTROPY, on, weight.device, x, weight, target[:, 0], linear_bias=head.bias)
    theirs = kept_for_loss(found.plan.problem, chunked=False)
    return found.facts((theirs // TOKENS, found.plan.saved_bytes // TOKENS))


def replace_heads(model: nn.Module, changes: Changes) -> None:
    """Find the models whose loss can be computed without logits."""
    for path, module in model.named_modules():
        if isinstance(module, FusedLossHead):
            changes.skip(path, module, ALREADY_FUSED)
        if isinstance(module, ReplacedModule) or module in changes.classes or (name := find_head(module)) is None:
            continue
        reason = why_class_stays(module) or why_head_left(module, name)
        if getattr(module, name) in changes.classes:
            reason = f"a rule takes {name}"
        if reason is not None:
            changes.skip(path, module, f"its loss makes logits: {reason}")
            continue
        head = getattr(module, name)
        text = f"{name}, loss_function: {head.in_features} -> {head.out_features} classes, without logits"
        _, *arguments = inspect.signature(type(module).forward).parameters
        place = arguments.index("labels")
        fused = fused_class(FusedLossHead, type(module), fused_head=name, fused_place_of_labels=place)
        changes.change(path, module, fused, text, *_facts(head, changes.on), became=FusedLossHead.__name__)
