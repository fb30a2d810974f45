"""Reads the forward of transformers' experts: a loop over the experts that were chosen, with one formula for each.

Only one kind of loop is understood. A mask says which token chose which expert in which of its top-k slots; each expert
that was chosen takes its tokens, computes a formula of them, multiplies it by the tokens' weights for it, and adds it
to the result. A statement that does anything else with mask, tokens, slots, weights or result ends the reading.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..reading.polynomials import Polynomial, atom, linear_result
from ..reading.reader import Reader
from ..reading.state import Frame, LinearCall
from ..reading.values import Dtype, Formula, Known, Method, NotUnderstood, Stage

TOKENS, INDEX, WEIGHTS, DEVICE = (Stage(name) for name in ("tokens", "index", "weights", "device"))
# From the mask [experts, slots, tokens] to the experts that have tokens.
ONE_HOT, MASK, COUNTS, CHOSEN, HITS, FLAT_HITS = map(
    Stage, ("one_hot", "mask", "counts", "chosen", "hits", "flat hits")
)
HIT, EXPERT, OF_EXPERT, PLACES, OWN_TOKENS, NUMBER = map(
    Stage, ("hit", "expert", "mask of an expert", "places", "tokens of an expert", "number of tokens")
)
# All experts by number, and which token chose one of them in which slot.
ALL, CHOSE = Stage("all experts"), Stage("choices of an expert")
ROW_WEIGHT, RESULT = Stage("weight of a row"), Stage("result")
_SENTINEL, _EMPTY = Stage("is the sentinel"), Stage("has no tokens")
_FUNCTIONS = (torch.zeros_like, torch.greater, torch.where, F.one_hot, F.linear)
# (method, owner) -> (arguments, result).
_METHODS: dict[tuple[str, Stage], tuple[tuple[Any, ...], Stage]] = {
    ("permute", ONE_HOT): ((2, 1, 0), MASK),
    ("sum", MASK): (((-1, -2),), COUNTS),
    ("nonzero", CHOSEN): ((), HITS),
    ("squeeze", HITS): ((-1,), FLAT_HITS),
    ("item", EXPERT): ((), EXPERT),
    ("numel", OWN_TOKENS): ((), NUMBER),
}


@dataclass(frozen=True)
class Stacked:
    """A parameter with a matrix or a vector per expert, or one expert's part of it."""

    path: str
    dims: int
    of_one: bool = False


@dataclass(frozen=True)
class Weighted:
    """The output of an expert, times the weights of its tokens."""

    value: Formula


@dataclass(frozen=True)
class Expert:
    """What an expert computes of a token, whether its products read their weights transposed, and its biases."""

    value: Polynomial
    transposed: bool
    biases: dict[str, str]


class ExpertsReader(Reader):
    """Reads the forward of a module with the interface of transformers' experts."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__(block)
        self._width = width
        self._added: list[Formula] = []
        self._transposed: set[bool] = set()
        self._biases: dict[str, str] = {}

    def expert(self, forward: Callable[..., Tensor]) -> Expert:
        """What each expert computes.

        Raises:
            NotUnderstood: the forward is not such a loop; the message quotes the line.
        """
        result = self.read(forward, TOKENS, INDEX, WEIGHTS)
        if result != RESULT or len(self._added) != 1 or len(self._transposed) != 1:
            raise NotUnderstood("returns something else than the sum of what its experts give")
        return Expert(self._added[0].value, self._transposed.pop(), self._biases)

    def _statement(self, node: ast.stmt, frame: Frame) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            # index_add without _ would be discarded.
            called = node.value.func
            if (
                isinstance(called, ast.Attribute)
                and called.attr == "index_add_"
                and self.value(node.value, frame) == RESULT
            ):
                return
            raise NotUnderstood("does something besides computing")
        if isinstance(node, ast.With) and ast.unparse(node.items[0]) == "torch.no_grad()" and len(node.items) == 1:
            # Allowed for the mask only: a formula would lose its gradients.
            before = len(self.linears)
            self._body(node.body, frame)
            values = [frame.locals.get(each.id) for each in ast.walk(node) if isinstance(each, ast.Name)]
            if len(self.linears) != before or any(isinstance(each, (Formula, Weighted)) for each in values):
                raise NotUnderstood("computes without gradients")
            return
        super()._statement(node, frame)

    def _branch(self, node: ast.If, frame: Frame) -> None:
        if len(node.body) == 1 and isinstance(node.body[0], ast.Continue) and not node.orelse:
            if self.value(node.test, frame) not in (_SENTINEL, _EMPTY):
                raise NotUnderstood("leaves some experts out")
            return
        super()._branch(node, frame)

    def _loop(self, node: ast.For, frame: Frame) -> None:
        over = self.value(node.iter, frame)
        if over not in (HITS, FLAT_HITS, ALL):
            super()._loop(node, frame)
            return
        if node.orelse or self._added:
            raise NotUnderstood("loops over its experts twice")
        self._assign(node.target, HIT if over == HITS else EXPERT, frame)
        before = dict(frame.locals)
        self._body(node.body, frame)
        changed = {name for name, value in frame.locals.items() if name in before and before[name] is not value}
        target = node.target.id if isinstance(node.target, ast.Name) else ""
        if changed - {target}:
            # An expert would depend on what another one left there.
            raise NotUnderstood(f"writes {', '.join(sorted(changed))} for each expert anew")

    def attribute(self, owner: Any, name: str) -> Any:
        """The attribute of a value."""
        if owner == TOKENS and name in ("dtype", "device"):
            return Dtype(False) if name == "dtype" else DEVICE
        if owner in (RESULT, WEIGHTS) and name == "dtype":
            return Dtype(False)
        found = (
            getattr(owner.value, name, None)
            if isinstance(owner, Known) and isinstance(owner.value, ModuleType)
            else None
        )
        if found in _FUNCTIONS:
            return Known(found)
        if isinstance(owner, Stacked) and name == "float":
            raise NotUnderstood("multiplies in float32, whatever its dtype")
        if isinstance(owner, (Stage, Weighted)):
            return Method(owner, name)  # type: ignore[arg-type]
        return super().attribute(owner, name)

    def _parameter(self, path: str, parameter: Tensor | None) -> Any:
        if parameter is not None and parameter.dim() in (2, 3):
            return Stacked(path, parameter.dim())
        return super()._parameter(path, parameter)

    def _of_subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        owner = self.value(node.value, frame)
        if not isinstance(owner, (Stage, Stacked)):
            return super()._of_subscript(node, frame)
        if isinstance(node.slice, ast.Slice):
            raise NotUnderstood("takes a part of something")
        place = self.value(node.slice, frame)
        if owner == HIT and place == Known(0):
            return EXPERT
        if owner == MASK and place == EXPERT:
            return OF_EXPERT
        if owner == TOKENS and place == OWN_TOKENS:
            return Formula(atom("input", "x"), self._width, borrowed=True)
        if owner == WEIGHTS and place == (OWN_TOKENS, PLACES, Known(None)):
            return ROW_WEIGHT
        if isinstance(owner, Stacked) and not owner.of_one and place == EXPERT:
            return dataclasses.replace(owner, of_one=True)
        raise NotUnderstood("takes a part of something")

    def _of_compare(self, node: ast.Compare, frame: Frame) -> Any:
        one, two = self.value(node.left, frame), self.value(node.comparators[0], frame)
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            if one == EXPERT and isinstance(two, Known) and two.path == "num_experts":
                return _SENTINEL
            if one == NUMBER and two == Known(0):
                return _EMPTY
            if (one, two) == (INDEX, EXPERT):
                return CHOSE
        return super()._of_compare(node, frame)

    def _of_binop(self, node: ast.BinOp, frame: Frame) -> Any:
        if isinstance(node.op, ast.MatMult):
            return self._product(self.value(node.left, frame), self.value(node.right, frame), transposed=True)
        return super()._of_binop(node, frame)

    def _binary(self, kind: type[ast.AST], one: Any, two: Any) -> Any:
        if isinstance(two, Stacked) and kind is ast.Add:
            return self._with_bias(one, two)
        if ROW_WEIGHT in (one, two) and kind is ast.Mult:
            value = two if one == ROW_WEIGHT else one
            if isinstance(value, Formula):
                return Weighted(value)
        return super()._binary(kind, one, two)

    def call(self, called: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """The result of a call."""
        target = called.value if isinstance(called, Known) else None
        if target is torch.zeros_like and list(args) == [TOKENS] and set(options) <= {"dtype", "device"}:
            if options.get("dtype", Dtype(False)) != Dtype(False):
                raise NotUnderstood("sums its experts in another dtype than that of the tokens")
            return RESULT
        if target is F.one_hot and list(args) == [INDEX] and set(options) == {"num_classes"}:
            # With or without one extra class for tokens that chose no expert.
            classes, experts = options["num_classes"], getattr(self.block, "num_experts", None)
            if isinstance(classes, Known) and isinstance(experts, int) and classes.value in (experts, experts + 1):
                return ONE_HOT
        if target is torch.greater and list(args) == [COUNTS, Known(0)] and not options:
            return CHOSEN
        if target is torch.where and list(args) == [OF_EXPERT] and not options:
            return PLACES, OWN_TOKENS
        if target is torch.where and list(args) == [CHOSE] and not options:
            return OWN_TOKENS, PLACES
        if target is range and len(args) == 1 and isinstance(args[0], Known) and args[0].path == "num_experts":
            return ALL
        if target is F.linear and len(args) in (2, 3) and not options:
            result = self._product(args[0], args[1], transposed=False)
            return result if len(args) == 2 else self._with_bias(result, args[2])
        if isinstance(called, Method) and isinstance(called.owner, (Stage, Weighted)):
            return self._method(called.owner, called.name, args, options)
        if isinstance(called, Method) and isinstance(called.owner, Formula) and called.name == "clamp":
            return self._clamped(called.owner, args, options)
        return super().call(called, args, options)

    def _method(self, owner: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        given = (*args, *options.values())
        values = tuple(_plain(each) for each in given)
        if owner == RESULT and name in ("index_add", "index_add_") and len(given) == 3 and not options:
            dim, tokens, value = given
            if dim == Known(0) and tokens == OWN_TOKENS and isinstance(value, Weighted):
                self._added.append(value.value)
                return RESULT
        if (
            name == "to"
            and len(given) == 1
            and isinstance(given[0], Dtype)
            and (owner == RESULT or isinstance(owner, Weighted))
        ):
            return owner
        takes = _METHODS.get((name, owner)) if isinstance(owner, Stage) else None
        if takes is not None and takes[0] == values and set(options) <= {"dim"}:
            return takes[1]
        raise NotUnderstood(f"calls {name} of the {getattr(owner, 'name', 'result of an expert')}")

    def _product(self, x: Any, weight: Any, *, transposed: bool) -> Formula:
        if not isinstance(x, Formula) or not isinstance(weight, Stacked) or not weight.of_one or weight.dims != 3:
            raise NotUnderstood("multiplies something else than tokens and the weights of an expert")
        if x.wide:
            raise NotUnderstood("multiplies in float32, whatever its dtype")
        self._transposed.add(transposed)
        sizes = getattr(self.block, weight.path).shape[1:]
        inputs, outputs = sizes if transposed else sizes[::-1]
        if x.width != inputs:
            raise NotUnderstood(f"multiplies {x.width} columns by {weight.path}")
        output = linear_result(weight.path, x.value)
        self.linears.append(LinearCall(weight.path, x.value, output, 0))
        return dataclasses.replace(x, value=output, width=outputs, borrowed=False)

    def _with_bias(self, product: Any, bias: Any) -> Formula:
        found = product.value.single if isinstance(product, Formula) else None
        of_one = isinstance(bias, Stacked) and bias.of_one and bias.dims == 2
        if found is None or not of_one or found[0] != "linear" or str(found[1]) in self._biases:
            raise NotUnderstood("adds something else than the bias of a product")
        self._biases[str(found[1])] = bias.path
        return product

    def _clamped(self, x: Formula, args: Sequence[Any], options: dict[str, Any]) -> Formula:
        """A clamp: of a gate from above, of an up projection from both sides."""
        given = dict(zip(("min", "max"), map(_plain, args), strict=False))
        given |= {name: _plain(value) for name, value in options.items()}
        low, high = given.get("min"), given.get("max")
        if set(given) - {"min", "max"} or not isinstance(high, (int, float)) or low not in (None, -high):
            raise NotUnderstood("cuts values off by clamp otherwise than within a limit")
        side = "at most" if low is None else "within"
        return x.with_value(limited(x.value, side, float(high)))


def limited(value: Polynomial, side: str, limit: float) -> Polynomial:
    """A clamped value: ``at most`` the limit, or ``within`` it on both sides."""
    return atom("function", f"{side} {limit:g}", value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.value if isinstance(value, Known) else value
