"""The loss function of transformers' causal models: how to recognise it, and the steps around its cross entropy."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...modules import class_path
from ..reading.reader import Reader
from ..reading.state import Frame
from ..reading.values import Known, Method, NotUnderstood, Stage, Undecided
from ..remembering import Remembered

# By name, so that transformers is not imported.
_KNOWN = ("transformers.loss.loss_utils", "ForCausalLMLoss")
# The function's parameters, in order.
PARAMETERS = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
# Its default ignore_index.
IGNORED = -100
_read: Remembered[bool] = Remembered()


def shifted(labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """The target of each token, ``[*B, tokens]``: the next token; the last one has none."""
    if shift_labels is not None:
        return shift_labels
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def divided(loss: Tensor, items: Tensor | int | None) -> Tensor:
    """A sum of losses divided by the number of items in the whole batch, of which this may be a part; a mean
    unchanged."""
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


def why_other_loss(function: Any) -> str | None:
    """Why a loss function is not transformers' causal loss, or None."""
    if (getattr(function, "__module__", None), getattr(function, "__qualname__", None)) != _KNOWN:
        name = getattr(function, "__qualname__", None) or class_path(type(function))
        return f"its loss function is {name}, not transformers' {_KNOWN[1]}"
    # The function that it calls may have been patched.
    around = getattr(function, "__globals__", {}).get("fixed_cross_entropy")
    known = _read.get((function, around), lambda: _is_known(function))
    return None if known else f"its loss function {_KNOWN[1]} computes something else"


def _is_known(function: Callable[..., Tensor]) -> bool:
    """Whether the source computes exactly these steps, for each combination of items, shifted labels and
    ignore_index."""
    cases = itertools.product((Known(None), ITEMS), (Known(None), TARGET), (Known(IGNORED), IGNORE))
    try:
        return all(
            _LossReader(ignored).loss(function, items, target) == (MEAN if items == Known(None) else QUOTIENT)
            for items, target, ignored in cases
        )
    except NotUnderstood:
        return False


LOGITS, LABELS, CLASSES, ITEMS, IGNORE = map(Stage, ("logits", "labels", "classes", "items", "what to ignore"))
PADDED, TARGET, DEVICE = map(Stage, ("padded labels", "target", "device"))
SUM, MEAN, QUOTIENT = map(Stage, ("sum", "mean", "sum by items"))
# Tensor methods that change nothing here, with the arguments that they must be called with.
_METHODS: dict[str, dict[Stage, tuple[Any, ...]]] = {
    "float": {LOGITS: ()},
    "contiguous": {TARGET: ()},
    "view": {LOGITS: (Known(-1), CLASSES), TARGET: (Known(-1),)},
    "to": {TARGET: (DEVICE,), ITEMS: (DEVICE,)},
}


class _LossReader(Reader):
    """Reads a loss function: each intermediate of logits and labels has a name."""

    def __init__(self, ignored: Any) -> None:
        super().__init__(nn.Module())
        self._ignored = ignored

    def loss(self, function: Callable[..., Tensor], items: Any, target: Any) -> Any:
        """What the function returns; without the IGNORE symbol it uses its own ignore_index."""
        options = {"num_items_in_batch": items, "shift_labels": target}
        options |= {"ignore_index": IGNORE} if self._ignored == IGNORE else {}
        return self.inlined(function, (LOGITS, LABELS, CLASSES), options)

    def _bound(
        self, function: Any, tree: ast.FunctionDef, args: Sequence[Any], options: dict[str, Any]
    ) -> dict[str, Any]:
        named, others = copy.copy(tree), tree.args.kwarg
        named.args = copy.copy(tree.args)
        named.args.kwarg = None
        bound = super()._bound(function, named, args, options)
        return bound if others is None else bound | {others.arg: {}}

    def _of_call(self, node: ast.Call, frame: Frame) -> Any:
        # `**kwargs` is empty.
        named = [each for each in node.keywords if each.arg is not None or self.value(each.value, frame) != {}]
        return super()._of_call(ast.copy_location(ast.Call(node.func, node.args, named), node), frame)

    def _of_subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        if self.value(node.value, frame) == PADDED and ast.unparse(node.slice).strip("()") == "..., 1:":
            return TARGET
        return super()._of_subscript(node, frame)

    def _binary(self, kind: type[ast.AST], one: Any, two: Any) -> Any:
        return QUOTIENT if (kind, one, two) == (ast.Div, SUM, ITEMS) else super()._binary(kind, one, two)

    def attribute(self, owner: Any, name: str) -> Any:
        """The attribute of a value."""
        if isinstance(owner, Stage):
            return DEVICE if name == "device" else Method(owner, name)  # type: ignore[arg-type]
        found = getattr(owner.value, name, None) if isinstance(owner, Known) else None
        return Known(found) if found in (F.cross_entropy, F.pad, torch.is_tensor) else super().attribute(owner, name)

    def call(self, called: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """The result of a call."""
        target = called.value if isinstance(called, Known) else None
        if target is F.pad and [*args] == [LABELS, (Known(0), Known(1))] and options == {"value": self._ignored}:
            return PADDED
        if target is torch.is_tensor and [*args] == [ITEMS]:
            return Undecided()
        if target is F.cross_entropy and [*args] == [LOGITS, TARGET]:
            reduction = options.pop("reduction", None)
            if options == {"ignore_index": self._ignored} and reduction in (Known("sum"), Known("mean")):
                return SUM if reduction == Known("sum") else MEAN
        if isinstance(called, Method) and isinstance(called.owner, Stage):
            if _METHODS.get(called.name, {}).get(called.owner) == tuple(args) and not options:
                return called.owner
            raise NotUnderstood(f"calls {called.name} of the {called.owner.name}")
        return super().call(called, args, options)
