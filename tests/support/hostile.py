"""Statements that a right block does not survive, each with the call that shows it; and harmless ones.

In a statement ``$v`` is the variable that holds what the block computes at the place of the statement, and ``$w`` the
path of one of the block's weights. Most change nothing until a trigger prepares the block, its input, or the world
around both, so that no trial with random numbers meets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.hostile_calls import LONG, RARE, Call


class Hostile(NamedTuple):
    """A statement, and what makes it show.

    Args:
        statement: what is inserted.
        trigger: called with a call before it is made.
        setup, members: what the statement needs in ``__init__`` and in the class.
        decorator: of the forward.
        but: the kinds of blocks in which it can have no effect.
    """

    statement: str
    trigger: Callable[[Call], object]
    setup: str = ""
    members: str = ""
    decorator: str = ""
    but: tuple[str, ...] = ()


def always(call: Call) -> None:
    """The statement shows at every call."""


def _set(**attributes: Any) -> Callable[[Call], None]:
    return lambda call: vars(call.block).update(attributes)


def _fill(name: str) -> Callable[[Call], None]:
    return lambda call: getattr(call.block, name).data.fill_(200.0)


def _unlikely(call: Call) -> None:
    call.seed = RARE


def _unlikely_in_training(call: Call) -> None:
    call.block.train()
    call.seed = RARE


def _leaf(call: Call) -> None:
    call.as_given = True


def _parameter(call: Call) -> None:
    call.as_given = True
    call.patch.setattr(call, "_arguments", _with_parameter(call._arguments))


def _with_parameter(arguments: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    def given() -> tuple[Tensor, ...]:
        _, x, *others = arguments()
        made = nn.Parameter(x.detach())
        return made, made, *others

    return given


def _infinite(call: Call) -> None:
    call.value(float("inf"))
    # The slopes of activations there are NaN or not, as their formulas are written.
    call.freeze()


def _option(call: Call) -> None:
    block: Any = call.block
    block.options["factor"] = 2.0


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def _if(condition: str, then: str = "$v = $v * 2 + 1") -> str:
    return f"if {condition}:\n    {then}"


_grow, _no_grad, _freeze = Call.grow, (lambda call: call.enter(torch.no_grad())), Call.freeze
_inference: Callable[[Call], None] = lambda call: call.enter(torch.inference_mode())  # noqa: E731
_long: Callable[[Call], None] = lambda call: call.rows(LONG)  # noqa: E731
_factor: Callable[[Call], None] = lambda call: call.globally("FACTOR", 2.0)  # noqa: E731
_own_factor = "self.factor = 1.0"
_step = 'self.register_buffer("step", torch.zeros(()))'

HOSTILE: dict[str, Hostile] = {
    # What shows for some values alone.
    "clamp": Hostile("$v = $v.clamp(-20, 20)", _grow),
    "clamp far away": Hostile("$v = torch.clamp($v, -1e9, 1e9)", _grow),
    "minimum": Hostile("$v = torch.minimum($v, torch.full_like($v, 1e4))", _grow),
    "hardtanh": Hostile("$v = F.hardtanh($v, -1e4, 1e4)", _grow),
    "threshold": Hostile("$v = F.threshold($v, -1e4, 0.0)", _grow),
    "soft cap": Hostile("$v = 1e4 * torch.tanh($v / 1e4)", _grow),
    "nan_to_num": Hostile("$v = torch.nan_to_num($v)", lambda call: call.value(float("nan"))),
    "where": Hostile("$v = torch.where($v.isnan(), 0.0, $v)", lambda call: call.value(float("nan"))),
    "masked_fill": Hostile("$v = $v.masked_fill($v.isinf(), 0.0)", _infinite),
    "float16 between": Hostile("$v = $v.half().to($v.dtype)", always),
    "assert of values": Hostile("assert $v.isfinite().all()", lambda call: call.value(float("nan"))),
    "any": Hostile(_if("$v.isnan().any()", "$v = torch.zeros_like($v)"), lambda call: call.value(float("nan"))),
    "float of a mean": Hostile(_if("float($v.abs().mean()) > 1e4"), _grow),
    "item": Hostile(_if("$v.abs().max().item() > 1e4"), _grow),
    "walrus": Hostile(_if("(largest := $v.abs().max()) > 1e4", "$v = $v / largest"), _grow),
    "while": Hostile("while $v.abs().max() > 1e4:\n    $v = $v / 2", _grow),
    "value of a weight": Hostile(_if("self.$w.abs().max() > 100"), _grow),
    # What shows for some shapes and layouts alone.
    "return of the input": Hostile(_if("$v.shape[0] > 64", "return x"), _long),
    "short": Hostile("if $v.shape[0] < 512:\n    pass\nelse:\n    $v = $v * 0", _long),
    "raise": Hostile(_if("$v.shape[0] > 64", "raise ValueError($v.shape)"), _long),
    "one row": Hostile(_if("$v.size(0) == 1"), lambda call: call.rows(1)),
    "odd rows": Hostile("$v = $v * (1 + $v.shape[0] % 2)", lambda call: call.rows(7)),
    "numel": Hostile(_if("$v.numel() > 3000"), _long),
    "dim": Hostile(_if("$v.dim() > 3"), lambda call: call.rows(2, 2, 2, 2), but=("experts", "layer")),
    "len": Hostile(_if("len($v) > 64"), _long),
    "capacity": Hostile("$v = torch.cat([$v[:64], $v[64:] * 0])", _long),
    "capacity in place": Hostile("$v[64:] = 0", _long),
    "is_contiguous": Hostile(_if("not $v.is_contiguous()"), Call.transpose),
    # What shows in some modes alone.
    "grad mode": Hostile("$v = $v * (1.0 if torch.is_grad_enabled() else 2.0)", _no_grad),
    "inference mode": Hostile("$v = $v * (2.0 if torch.is_inference_mode_enabled() else 1.0)", _inference),
    "is_inference": Hostile(_if("$v.is_inference()"), _inference),
    "deterministic": Hostile(_if("torch.are_deterministic_algorithms_enabled()"), Call.deterministic),
    "anomaly mode": Hostile(
        _if("torch.is_anomaly_enabled()"), lambda call: call.enter(torch.autograd.set_detect_anomaly(True))
    ),
    "default dtype": Hostile(_if("torch.get_default_dtype() == torch.float16"), Call.default_dtype),
    "autocast": Hostile(
        _if('torch.is_autocast_enabled("cpu")'), lambda call: call.enter(torch.autocast("cpu", torch.bfloat16))
    ),
    "dtype": Hostile(_if("x.dtype == torch.float16"), Call.half),
    "training": Hostile(_if("self.training"), lambda call: call.block.train()),
    "requires_grad": Hostile(_if("not $v.requires_grad"), _freeze),
    "requires_grad of a weight": Hostile(_if("not self.$w.requires_grad"), _freeze),
    "gradient of a weight": Hostile(_if("self.$w.grad is not None"), Call.with_gradients),
    "is_leaf": Hostile(_if("$v.is_leaf and $v.requires_grad"), _leaf),
    "grad_fn": Hostile(_if("$v.grad_fn is None"), _freeze),
    "isinstance": Hostile(_if("isinstance($v, nn.Parameter)"), _parameter),
    "type": Hostile(_if("type($v) is not Tensor"), _parameter),
    # What is drawn, read or found outside of the block.
    "random": Hostile(_if("random.random() < 0.1", "$v = $v * 0"), _unlikely),
    "random in training": Hostile(
        _if("self.training and random.random() < self.layerdrop", "return x * 0"),
        _unlikely_in_training,
        "self.layerdrop = 0.1",
    ),
    "numpy": Hostile(_if("np.random.rand() < 0.1", "$v = $v * 0"), _unlikely),
    "numpy generator": Hostile(_if("RNG.random() < 0.1", "$v = $v * 0"), _unlikely),
    "torch.rand": Hostile("$v = $v * (1.0 if torch.rand(()) > 0.1 else 0.0)", _unlikely),
    "noise": Hostile("$v = $v + torch.randn_like($v) * NOISE", lambda call: call.globally("NOISE", 1.0)),
    "environment": Hostile(_if('os.environ.get("OF_MINE")'), lambda call: call.patch.setenv("OF_MINE", "1")),
    "clock": Hostile(_if("time.time() > DEADLINE"), lambda call: call.globally("DEADLINE", 0.0)),
    "global": Hostile("$v = $v * FACTOR", _factor),
    "global dictionary": Hostile(
        '$v = $v * SETTINGS["factor"]', lambda call: call.put(call.source.SETTINGS, "factor", 2.0)
    ),
    "global of a helper": Hostile("$v = scaled($v)", _factor),
    "patched function": Hostile("$v = adjusted($v)", lambda call: call.globally("adjusted", _doubled)),
    "list of functions": Hostile(
        "for change in CHANGES:\n    $v = change($v)", lambda call: call.globally("CHANGES", [_doubled])
    ),
    "lambda": Hostile("$v = (lambda x: x * FACTOR)($v)", _factor),
    "globals()": Hostile('$v = $v * globals()["FACTOR"]', _factor),
    "locals()": Hostile('$v = $v * (2 if "$v" in locals() else 1)', always),
    "eval": Hostile('$v = $v * eval("FACTOR")', _factor),
    "counter": Hostile(
        f"COUNT[0] += 1\n{_if('COUNT[0] > 50')}", lambda call: call.put(call.source.COUNT, 0, 100)
    ),
    # What the block holds.
    "closure": Hostile(
        "$v = self.method($v)",
        lambda call: call.put(call.written.method.__closure__[0].cell_contents, 0, 2.0),
        members="method = remembering([1.0])",
    ),
    "mutable default": Hostile(
        "$v = self.method($v)",
        lambda call: call.put(call.written.method.__defaults__[0], 0, 2.0),
        members="def method(self, x, factors=[1.0]):\n    return x * factors[0]",
    ),
    "patched method": Hostile(
        "$v = self.method($v)",
        lambda call: call.on_class("method", lambda self, x: x * 2),
        members="def method(self, x):\n    return x",
    ),
    "attribute of the class": Hostile(
        "$v = $v * self.factor", lambda call: call.on_class("factor", 2.0), members="factor = 1.0"
    ),
    "property": Hostile(
        "$v = $v * self.factor", _factor, members="@property\ndef factor(self):\n    return FACTOR"
    ),
    "attribute": Hostile("$v = $v * self.factor", _set(factor=2.0), _own_factor),
    "getattr": Hostile('$v = $v * getattr(self, "fac" + "tor")', _set(factor=2.0), _own_factor),
    "dictionary of options": Hostile(
        '$v = $v * self.options["factor"]',
        _option,
        'self.options = {"factor": 1.0}',
    ),
    "callback": Hostile(
        _if("self.callback is not None", "$v = self.callback($v)"), _set(callback=_doubled), "self.callback = None"
    ),
    "hasattr": Hostile(_if('hasattr(self, "extra")'), _set(extra=True)),
    "try": Hostile("try:\n    $v = $v * self.extra\nexcept AttributeError:\n    pass", _set(extra=2.0)),
    "counter of its own": Hostile(f"self.seen += 1\n{_if('self.seen > 50')}", _set(seen=100), "self.seen = 0"),
    "buffer": Hostile(_if("self.step > 100"), _fill("step"), _step),
    "buffer written": Hostile("self.step += 1", always, _step),
    "parameter's value": Hostile(_if("self.k.item() > 5"), _fill("k"), "self.k = nn.Parameter(torch.ones(()))"),
    "setattr": Hostile('setattr(self, "seen", len($v))', always, "self.seen = 0"),
    "__getattr__": Hostile(
        "$v = $v * self.factor",
        _factor,
        members='def __getattr__(self, name):\n    return FACTOR if name == "factor" else super().__getattr__(name)',
    ),
    "__call__": Hostile(
        "pass", _factor, members="def __call__(self, *given):\n    return super().__call__(*given) * FACTOR"
    ),
    "patched forward": Hostile("pass", lambda call: call.on_class("forward", lambda self, x, *_: x * 2)),
    "decorated": Hostile("pass", _factor, decorator="@scaling"),
    "decorated without a trace": Hostile("pass", _factor, decorator="@scaling_unnamed"),
    "decorated by torch": Hostile("pass", always, decorator="@torch.no_grad()"),
    "kept": Hostile("self.kept = $v.detach()", always, "self.kept = None"),
    # What others see of it.
    "print": Hostile("print($v.shape)", always),
    "warning": Hostile('warnings.warn("hostile")', always),
    "event": Hostile("EVENTS.append(tuple($v.shape))", always),
    "input overwritten": Hostile("x.data.fill_(7.0)", always),
    "in place": Hostile("$v.mul_(2)", always),
    "reseeded": Hostile("torch.manual_seed(7)", always),
    "augmented": Hostile("$v *= 2", always),
    "one element": Hostile("$v[0] = 0", always),
    # What changes gradients and no result.
    "detach": Hostile("$v = $v.detach()", always),
    "data": Hostile("$v = $v.data", always),
    "no_grad": Hostile("with torch.no_grad():\n    $v = $v * 1", always),
    "set_grad_enabled": Hostile("torch.set_grad_enabled(False)", always),
    "difference": Hostile("$v = 2 * $v - $v.detach()", always),
    "hook": Hostile(_if("$v.requires_grad", "$v.register_hook(lambda gradient: gradient * 2)"), always),
    "function of autograd": Hostile("$v = DoubledGradient.apply($v)", always),
    # What is no part of the formula at all.
    "rows flipped": Hostile("$v = $v.flip(0)", always),
    "rows moved": Hostile("$v = $v.roll(1, 0)", always),
    "mean taken": Hostile("$v = $v - $v.mean()", always),
    "small number": Hostile("$v = $v + 1e-3", always),
}  # fmt: skip

# Those that change nothing, whatever happens: statement and what it needs in __init__.
HARMLESS: dict[str, tuple[str, str]] = {
    "nothing": ("pass", ""),
    "text": ('"""What this holds."""', ""),
    "alias": ("same = $v\n$v = same", ""),
    "annotated": ("$v: Tensor = $v", ""),
    "pair": ("$v, unused = $v, None", ""),
    "number": ("unused = 16", ""),
    "name of a function": ("gelu = F.gelu", ""),
    "assert of a constant": ("assert self.width > 0", "self.width = 16"),
    "branch on a constant": ("if self.width != 16:\n    raise ValueError(self.width)", "self.width = 16"),
    "branch on an option": (
        "if self.callback is not None:\n    $v = self.callback($v)",
        "self.callback = None",
    ),
}
