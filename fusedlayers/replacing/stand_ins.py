"""Stand-ins for a block, and for what it holds, while a method of it runs with its FFN fused.

The method is the original one: only the parts of the FFN are others. ``up``, the activation and the dropout compute
nothing yet: they give a :class:`Pending` hidden, from which ``down`` computes the whole FFN; so does the product of an
activated gate with ``up``. Whatever else the method
does with it (a factor, a norm, a second activation) first gets its values from the original parts, so the numbers are
those of the method whether or not it is what the rule says. A part that is called with anything but a pending hidden
in its turn runs as it is: a dropout that serves the attention, too, drops there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.activations import ACTIVATIONS
from .reading.activation_modules import TORCH_FUNCTIONS
from .uncomputed import Uncomputed, computed

# Paths of up, activation, down, gate and the child that computes act(up(x)) in their block, name by name, None where
# there is none; and of the children that hold some, innermost first.
Places = tuple[tuple["tuple[str, ...] | None", ...], tuple[tuple[str, ...], ...]]


def why_no_stand_in(name: str, function: Callable[..., Any]) -> str | None:
    """Why a method cannot run on a stand-in, or None: it refers to its class without a name, as ``super()`` does."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or "__class__" not in code.co_freevars:
        return None
    return f"its {name} uses super(), which the stand-in for a module does not have"


class InsideFFN:
    """The FFN inside a method, during one call: its original parts, and how its block runs it in one piece.

    Dynamo guards every global that it meets, and nothing of an object that is made while it traces. So the functions
    that take the place of the parts are methods here.

    Args:
        block: whose method it is.
        places: of its rule, ``FFNRule.inside_places``.
        inplace: whether the activation overwrites its input.
        run: computes the FFN of x with a probability of the hidden's dropout; None where the parts must be called.
        say: is told how the method uses the hidden otherwise than its rule says.
        function: the name of the activation where no part of the block is it: the method calls torch's function.
        gate_rows: of its rule.
    """

    def __init__(
        self,
        block: nn.Module,
        places: Places,
        inplace: bool,
        run: Callable[[Tensor, float], Tensor | None],
        say: Callable[[str], None],
        function: str | None = None,
        gate_rows: str | None = None,
    ) -> None:
        self.block, self.places, self.inplace, self.run, self.say = block, places, inplace, run, say
        self.function, self.gate_rows = function, gate_rows
        up, activation, down, gate, into = places[0]
        self.into = None if into is None else self.part(into)
        self.up, self.down, self.gate = self.part(up), self.part(down), None if gate is None else self.part(gate)
        self.activation = self.part(activation) if function is None else ACTIVATIONS[function].torch

    def again(self) -> InsideFFN:
        """The same, but for what was said already."""
        return InsideFFN(self.block, self.places, self.inplace, self.run, _say_nothing, self.function, self.gate_rows)

    def linear(self, role: str, x: Tensor) -> Tensor:
        """What the method got from the linear in this role, computed."""
        if self.gate_rows is None or role == "both":
            linear: Any = self.gate if role == "gate" else self.up
            return cast(Tensor, linear(x))
        halves = self.up(x).chunk(2, -1)
        return cast(Tensor, halves[(role == "up") == (self.gate_rows == "first")])

    def part(self, path: tuple[str, ...] | None) -> Any:
        """What lies at this path in the block."""
        found: Any = self.block
        for name in path or ():
            found = getattr(found, name)
        return found

    def stand_in(self) -> StandIn:
        """The block as the method is to see it, with this FFN in the place of the one that it holds."""
        paths, holders = self.places
        others: dict[tuple[str, ...], dict[str, Any]] = {(): {}}
        for path in holders:
            others[path] = {}
        activation = None if self.function is not None else paths[1]
        originals = (self.up, self.activation, self.down, self.gate)
        functions = (self.call_up, self.activate, self.call_down, self.call_gate)
        for place, part, function in zip((paths[0], activation, *paths[2:4]), originals, functions, strict=True):
            if place is not None:
                other = StandIn(part, function, {}) if isinstance(part, nn.Module) else function
                others[place[:-1]][place[-1]] = other
        for path in holders:
            child = self.part(path)
            forward = self.call_into if child is self.into else type(child).forward
            others[path[:-1]][path[-1]] = StandIn(child, forward, others[path])
        return StandIn(self.block, type(self.block).forward, others[()])

    def call_up(self, *args: Any, **options: Any) -> Any:
        """What the method gets from ``up``."""
        return self._call_into_hidden(self.up, "up" if self.gate_rows is None else "both", args, options)

    def call_gate(self, *args: Any, **options: Any) -> Any:
        """What the method gets from the gate."""
        return self._call_into_hidden(self.gate, "gate", args, options)

    def call_into(self, *args: Any, **options: Any) -> Any:
        """What the method gets from the child that computes ``act(up(x))``."""
        args, x = self.only(args, options)
        if isinstance(x, Tensor):
            return Pending(self, x, "up", True)
        args, options = computed((args, options), "in the child that holds the up linear")
        assert self.into is not None
        return self.into(*args, **options)

    def _call_into_hidden(self, linear: Any, role: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        args, x = self.only(args, options)
        if isinstance(x, Tensor):
            return Pending(self, x, role)
        args, options = computed((args, options), f"in the {role} linear")
        return linear(*args, **options)

    def activate(self, *args: Any, **options: Any) -> Any:
        """What the method gets from the activation."""
        args, hidden = self.only(args, options)
        if isinstance(hidden, Pending) and hidden._is_next(activated=False):
            return hidden._with(True, None, self.inplace)
        args, options = computed((args, options), "in an activation that is not the one after the up linear")
        return self.activation(*args, **options)

    def call_down(self, *args: Any, **options: Any) -> Any:
        """What the method gets from ``down``."""
        args, hidden = self.only(args, options)
        if isinstance(hidden, Pending):
            return hidden._down()
        args, options = computed((args, options), "in the down linear")
        return self.down(*args, **options)

    @staticmethod
    def only(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The arguments without the stand-in that was called, and the only one of them; None where there are others.

        torch's modules and functions name it ``input``.
        """
        if args and isinstance(args[0], StandIn):
            args = args[1:]
        given = (*args, *options.values())
        return args, given[0] if len(given) == 1 and (args or "input" in options) else None


class Pending(Uncomputed):
    """A hidden that nobody has computed yet: ``up`` of x, then the activation, then the dropout, as far as they came.

    With a gate the activation is the gate's, and the product of both is the hidden. So the role of a pending hidden is
    "up" or "gate", what this linear gives, "both", what one linear for both gives, or their "product"; as a global name
    each of these would cost Dynamo a guard.

    It is computed by the original parts; a hidden that was seen is the one that ``down`` gets.
    """

    _named = "the hidden"
    _advice = "leave this class out of the rules"

    def __init__(
        self, ffn: InsideFFN, x: Tensor, role: str, activated: bool = False, dropout_p: float | None = None
    ) -> None:
        super().__init__(x)
        self._ffn, self._role, self._activated, self._dropout_p = ffn, role, activated, dropout_p
        # How often somebody has written into x; None where nobody counts.
        self._version = None if torch.compiler.is_compiling() or x.is_inference() else x._version
        self._gone = False

    def _is_next(self, *, activated: bool) -> bool:
        """Whether a part that follows the activation, or precedes it, is to be called with this hidden now."""
        as_up = self._values is None and self._modes_now() == self._modes
        return as_up and self._role == self._role_when(activated) and self._activated is activated and (
            self._dropout_p is None
        )  # fmt: skip

    def _role_when(self, activated: bool) -> str:
        """What the hidden is before and after the activation."""
        if self._ffn.gate is None and self._ffn.gate_rows is None:
            return "up"
        return "product" if activated else "gate"

    def _times(self, other: object) -> Pending | None:
        """The hidden of a gated FFN, if this is one of its factors and ``other`` the other one."""
        if not isinstance(other, Pending) or other._ffn is not self._ffn or other._x is not self._x:
            return None
        gate, up = (self, other) if self._role == "gate" else (other, self)
        ready = gate._values is None and up._values is None and gate._modes == up._modes == self._modes_now()
        if not ready or gate._role != "gate" or up._role != "up" or not gate._activated:
            return None
        product = Pending(self._ffn, self._x, "product", True)
        product._version = gate._version if gate._version == up._version else -1
        return product

    def _activates(self, function: Any, options: dict[str, Any]) -> bool:
        """Whether this function of torch's, with these options, is the activation of the FFN."""
        name = self._ffn.function
        if name is None or not self._is_next(activated=False) or options.get("inplace", False):
            return False
        if function is F.gelu:
            return name == {"none": "gelu", "tanh": "gelu_tanh"}.get(options.get("approximate", "none"))
        return function in TORCH_FUNCTIONS.get(name, ()) and not set(options) - {"inplace"}

    def _with(self, activated: bool, dropout_p: float | None, inplace: bool) -> Pending:
        """The hidden after one more part."""
        if inplace:
            self._activated, self._dropout_p = activated, dropout_p
            return self
        hidden = Pending(self._ffn, self._x, self._role, activated, dropout_p)
        hidden._version = self._version
        return hidden

    def _before(self, use: str) -> None:
        self._check("its hidden")
        if self._again():
            raise RuntimeError(
                f"the hidden was dropped out inside of the FFN and is used again ({use}), which no FFNRule describes: "
                f"{self._advice}"
            )

    def _compute(self, use: str) -> Tensor:
        self._ffn.say(f"the method uses the hidden otherwise than its rule says ({use})")
        if self._ffn.into is not None:
            values: Tensor = self._ffn.into(self._x)
        else:
            values = self._ffn.linear("gate" if self._role == "product" else self._role, self._x)
            if self._activated:
                values = self._ffn.activation(values)
        if self._role == "product":
            values = values * self._ffn.linear("up", self._x)
        return F.dropout(values, self._dropout_p) if self._dropout_p else values

    def _down(self) -> Tensor:
        """The FFN of x, as far as the parts were called."""
        ffn = self._ffn
        whole = self._activated and self._role == self._role_when(True)
        if self._values is None and whole and not self._again() and self._modes_now() == self._modes:
            self._check("the FFN")
            y = ffn.run(self._x, self._dropout_p or 0.0)
            if y is not None:
                self._gone = True
                return y
            # It has said why.
            self._ffn = ffn.again()
        return ffn.down(self._tensor("in the down linear"))

    def _again(self) -> bool:
        """Whether another use would need the values of a hidden that was dropped inside of the FFN."""
        return self._gone and bool(self._dropout_p)

    def _check(self, what: str) -> None:
        if self._version is not None and self._x._version != self._version:
            raise RuntimeError(
                f"the method writes into the input of the FFN before {what} is computed from it, which no FFNRule "
                "describes: leave this class out of the rules"
            )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if function is F.dropout and isinstance(hidden := (*args, options.get("input"))[0], Pending):
            return _dropped(hidden, *args[1:], **{name: each for name, each in options.items() if name != "input"})
        if len(args) == 1 and isinstance(hidden := args[0], Pending) and hidden._activates(function, options):
            return hidden._with(True, None, False)
        if function is torch.chunk and isinstance(args[0], Pending):
            return args[0].chunk(*args[1:], **options)
        if function is torch.mul and len(args) == 2 and not options and isinstance(args[0], Pending):
            product = args[0]._times(args[1])
            if product is not None:
                return product
        return super().__torch_function__(function, types, args, options)

    def _operated(self, name: str, others: tuple[Any, ...]) -> Any:
        return self._times(others[0]) if name == "__mul__" else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._values is None and name in ("dtype", "device"):
            return self._own_dtype() if name == "dtype" else self._x.device
        return getattr(self._tensor(f"its {name}"), name)

    def chunk(self, chunks: int, dim: int = 0) -> Any:
        """``Tensor.chunk``, which parts the gate from the up projection where one linear gives both."""
        rows = self._ffn.gate_rows
        whole = self._role == "both" and self._values is None and self._modes_now() == self._modes
        if not whole or rows not in ("first", "last") or chunks != 2 or dim not in (-1, self._x.dim() - 1):
            return self._tensor("in chunk").chunk(chunks, dim)
        halves = [Pending(self._ffn, self._x, role) for role in ("gate", "up")]
        return tuple(halves if rows == "first" else halves[::-1])

    def _own_dtype(self) -> torch.dtype:
        """The dtype that the hidden will have; autocast leaves float64 as it is."""
        dtype = self._x.dtype
        return dtype if dtype is torch.float64 else self._modes[1] or dtype

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """``Tensor.to``, which changes nothing where it asks for the dtype that the hidden will have."""
        if self._values is None and not kwargs and args == (self._own_dtype(),):
            return self
        return self._tensor("its to").to(*args, **kwargs)


def _dropped(hidden: Pending, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """``F.dropout`` of a pending hidden."""
    if 0 <= p < 1 and hidden._is_next(activated=True):
        return hidden._with(True, float(p), inplace) if training and p else hidden
    return F.dropout(hidden._tensor("in a dropout that is not the one after the activation"), p, training, inplace)


def _say_nothing(reason: str) -> None:
    """Somebody has said why already."""


class StandIn:
    """A module as the method sees it: its attributes, but for ``others``; calls go to ``function``, with it as self."""

    def __init__(self, module: nn.Module, function: Callable[..., Any], others: dict[str, Any]) -> None:
        # Past __setattr__, and not by __dict__.update, which Dynamo of torch 2.11 does not trace.
        for name, value in {"_fused_module": module, "_fused_function": function, **others}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_fused_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_fused_module"], name, computed(value, f"kept as {name}"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fused_function(self, *args, **kwargs)

    __call__ = forward
