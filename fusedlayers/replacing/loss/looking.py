"""Whether the forward of a model could tell the stand-ins for the model, its last linear layer and its logits apart."""

from __future__ import annotations

import ast
import builtins
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..reading.sources import tree_of
from ..reading.values import NotUnderstood

# Functions that can tell uncomputed logits from a tensor.
_LOOKING = (isinstance, issubclass, type, vars, dir, id, hash, callable, torch.is_tensor)


class Looks:
    """What a function does that could tell a stand-in from a module, or uncomputed logits from a tensor.

    Args:
        owner: the module whose method it is; None: a plain function.
        function: the function.
        head: the name of the model's last linear layer; None: the function is given the real module, and logits.

    Raises:
        NotUnderstood: its source is not available.
    """

    def __init__(self, owner: Any, function: Any, head: str | None, seen: tuple[Any, ...] = ()) -> None:
        self.owner, self.function, self.head, self.seen = owner, function, head, (*seen, function)
        tree = tree_of(function)
        arguments = [each.arg for each in ast.walk(tree.args) if isinstance(each, ast.arg)]
        self.own = None if owner is None else arguments[0]
        # The variables that may hold the head or logits.
        self.names = {*arguments} - {self.own} if head is None else set()
        nodes = list(ast.walk(tree))
        while found := {name for node in nodes for name in self._assigned(node)} - self.names:
            self.names |= found
        self.reason = next((reason for node in nodes for reason in self._reasons(node)), None)

    def _assigned(self, node: Any) -> Iterator[str]:
        """The variables to which this node assigns logits."""
        value = getattr(node, "iter", getattr(node, "value", None))
        if isinstance(value, ast.expr) and self._holds(value):
            for target in getattr(node, "targets", [getattr(node, "target", ast.Pass())]):
                yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name) and _is_stored(each))

    def _is_own(self, node: ast.AST) -> bool:
        """Whether an expression is the first argument of a method."""
        return isinstance(node, ast.Name) and node.id == self.own

    def _holds(self, node: Any) -> bool:
        """Whether an expression may be the head or uncomputed logits, or hold them."""
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Attribute):
            return self._is_own(node.value) and node.attr == self.head
        if isinstance(node, ast.Subscript):
            return self._holds(node.value)
        if isinstance(node, ast.Call):
            return self._is_theirs(node.func) or (self._given(node) and not self._is_taken(node.func))
        return not isinstance(node, ast.Compare) and any(map(self._holds, ast.iter_child_nodes(node)))

    def _is_theirs(self, function: ast.expr) -> bool:
        """Whether a function is the head, or a method of logits."""
        return self._holds(function) or (isinstance(function, ast.Attribute) and self._holds(function.value))

    def _given(self, node: ast.Call) -> bool:
        """Whether a call is given logits."""
        return any(self._holds(each) for each in (*node.args, *(each.value for each in node.keywords)))

    def _is_taken(self, function: ast.expr) -> bool:
        """Whether a call returns none of the logits that it is given: the loss function, or a class for results."""
        if isinstance(function, ast.Attribute) and self._is_own(function.value) and function.attr == "loss_function":
            return True
        return isinstance(self._found(function), type)

    def _found(self, node: ast.expr) -> Any:
        """What a name or an attribute refers to, in the enclosing functions or the module; None if unknown."""
        if isinstance(node, ast.Attribute):
            return getattr(self.owner if self._is_own(node.value) else self._found(node.value), node.attr, None)
        code = self.function.__code__
        if not isinstance(node, ast.Name) or node.id in (*code.co_varnames, *code.co_cellvars):
            return None
        around = dict(zip(code.co_freevars, self.function.__closure__ or (), strict=True))
        if node.id in around:
            return getattr(around[node.id], "cell_contents", None)
        return self.function.__globals__.get(node.id, getattr(builtins, node.id, None))

    def _reasons(self, node: Any) -> Iterator[str]:
        stands_in = self.head is not None
        if stands_in and not isinstance(node, ast.Attribute) and any(map(self._is_own, ast.iter_child_nodes(node))):
            yield f"its forward looks at the model itself in `{ast.unparse(node)}`"
        if isinstance(node, ast.Attribute) and (self._holds(node.value) or (stands_in and self._is_own(node.value))):
            if node.attr.endswith("__"):
                yield f"its forward reads `{ast.unparse(node)}`, which is another one of a stand-in"
            if node.attr in (self.head, "loss_function") and _is_stored(node):
                yield f"its forward writes to `{ast.unparse(node)}`"
        if isinstance(node, ast.Match) and self._holds(node.subject):
            yield f"its forward looks at its logits in `match {ast.unparse(node.subject)}`"
        if isinstance(node, ast.Call) and not self._is_theirs(node.func) and self._given(node):
            called = self._found(node.func)
            if any(called is each for each in _LOOKING):
                yield f"its forward looks at its logits or their layer in `{ast.unparse(node)}`"
            elif not self._is_taken(node.func) and not _sees_through(called) and self._may_look(called):
                yield f"its forward gives its logits to `{ast.unparse(node.func)}`, which may look at them"

    def _may_look(self, called: Any) -> bool:
        """Whether a user's function that is given logits inspects them, or cannot be read."""
        owner = called if isinstance(called, nn.Module) else getattr(called, "__self__", None)
        function: Any = getattr(called, "__func__", called)
        if isinstance(called, nn.Module):
            function = type(called).forward
        try:
            function = inspect.unwrap(function)
            return function not in self.seen and Looks(owner, function, None, self.seen).reason is not None
        except NotUnderstood:
            return True


def _is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def _sees_through(function: Any) -> bool:
    """Whether a function treats logits like the tensor that they would be, as torch's functions and built-ins do."""
    module = getattr(function, "__module__", None) or ""
    return isinstance(function, types.BuiltinFunctionType) or module.partition(".")[0] == "torch"
