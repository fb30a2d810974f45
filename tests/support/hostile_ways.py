"""Statements on the way to an FFN where a careless reading would take an old value, or miss one that is written.

A factor is 1 before the statement and another number after it, and the statement multiplies by it; the words of
``tests/support/hostile.py`` apply. Most need no trigger: they show at every call.
"""

from __future__ import annotations

from tests.support.hostile import Hostile, always
from tests.support.hostile_calls import Call

_OWN = "self.factor = 1.0"
_BY_OWN = "\n$v = $v * self.factor"
_HELD = "self.own = self.Own()"
_OBJECT = "class Own:\n    factor = 1.0\n    def step(self):\n        self.factor = self.factor * 2"
_CONTEXT = """
import contextlib
@contextlib.contextmanager
def scaled(self, factor):
    old, self.factor = self.factor, factor
    yield factor
    self.factor = old
"""
_ROUTER = """
class Router(nn.Module):
    gain = 1.0
    def forward(self, x):
        self.gain = 2.0
        return x
"""


def _once_more(call: Call) -> None:
    vars(call.block)["rounds"] = 1


HOSTILE_WAYS: dict[str, Hostile] = {
    # Variables of the method.
    "walrus before": Hostile("factor = 1.0\nif (factor := 2.0) > 1:\n    pass\n$v = $v * factor", always),
    "item written": Hostile('given = {"factor": 1.0}\ngiven["factor"] = 2.0\n$v = $v * given["factor"]', always),
    "appended": Hostile("factors = [1.0]\nfactors.append(2.0)\n$v = $v * factors[-1]", always),
    "filled by a method": Hostile(
        "factors = [1.0]\nself.fill(factors)\n$v = $v * factors[0]",
        always,
        members="def fill(self, factors):\n    factors[0] = 3.0",
    ),
    "handed on": Hostile(
        "$v = self.method($v, factor=2.0)", always, members="def method(self, x, factor=1.0):\n    return x * factor"
    ),
    "rounds": Hostile(
        "factor, step = 1.0, 0\n"
        "while step < 3:\n    $v = $v * factor\n    factor = factor * 0.5\n    step += 1",
        always,
    ),
    "another function in the next round": Hostile(
        "act = F.gelu\nwhile True:\n    $v = act($v)\n    if act is F.relu:\n        break\n    act = F.relu", always
    ),
    "entered": Hostile(
        "factor = 1.0\nwith self.scaled(2.0) as factor:\n    $v = $v * factor", always, _OWN, _CONTEXT
    ),
    "defined on a condition": Hostile(
        "def act(x):\n    return x\nif len($v):\n    def act(x):\n        return x * 2\n$v = act($v)", always
    ),
    "matched": Hostile(
        'factor = 1.0\nmatch ("scaled", 2.0):\n    case ("scaled", factor):\n        pass\n$v = $v * factor', always
    ),
    "imported": Hostile("e = 1.0\nfrom math import e\n$v = $v * e", always),
    "nonlocal": Hostile(
        "def double():\n    nonlocal factor\n    factor = factor * 2\nfactor = 1.0\ndouble()\n$v = $v * factor", always
    ),
    "loop that returns": Hostile("for _ in range(self.rounds):\n    return x", _once_more, "self.rounds = 0"),
    # Errors that are caught, and what runs in any case.
    "caught": Hostile("try:\n    $v = $v.view(7, 7)\nexcept RuntimeError:\n    $v = $v * 2", always),
    "suppressed": Hostile(
        "from contextlib import suppress\nwith suppress(RuntimeError):\n    $v = $v * 2\n    $v.view(7, 7)", always
    ),
    "input overwritten finally": Hostile("try:\n    $v = $v + 1\nfinally:\n    x.data.fill_(7.0)", always),
    # What the method writes into the block.
    "written where an error is caught": Hostile(
        f"try:\n    $v.view(7, 7)\nexcept RuntimeError:\n    self.factor = 2.0{_BY_OWN}", always, _OWN
    ),
    "written finally": Hostile(f"try:\n    pass\nfinally:\n    self.factor = self.factor / 2{_BY_OWN}", always, _OWN),
    "written behind a loop": Hostile(f"for _ in ():\n    pass\nelse:\n    self.factor = 2.0{_BY_OWN}", always, _OWN),
    "written where it matches": Hostile(
        f"match $v.dim():\n    case 1 | 2 | 3 | 4:\n        self.factor = 2.0{_BY_OWN}", always, _OWN
    ),
    "written by super": Hostile(f'super().__setattr__("factor", 2.0){_BY_OWN}', always, _OWN),
    "written into __dict__": Hostile(f'self.__dict__["factor"] = 2.0{_BY_OWN}', always, _OWN),
    "written by vars": Hostile(
        "for _ in range(2):\n    $v = $v * self.factor\n    vars(self).update(factor=0.5)", always, _OWN
    ),
    "written by setattr": Hostile(f'setattr(self, "factor", 2.0){_BY_OWN}', always, _OWN),
    "written by a mode of its own": Hostile(
        "with self.scaled(2.0):\n    $v = $v * self.factor", always, _OWN, _CONTEXT
    ),
    "deleted": Hostile(
        'if "factor" in vars(self):\n    del self.factor\n$v = $v * self.factor', always, _OWN, "factor = 2.0"
    ),
    # What it writes into objects, and what its children write into themselves.
    "object written": Hostile("self.own.factor = 2.0\n$v = $v * self.own.factor", always, _HELD, _OBJECT),
    "object that steps": Hostile("self.own.step()\n$v = $v * self.own.factor", always, _HELD, _OBJECT),
    "object with two names": Hostile(
        "self.same.factor = 2.0\n$v = $v * self.own.factor", always, f"{_HELD}\nself.same = self.own", _OBJECT
    ),
    "child that writes": Hostile(
        "$v = self.router($v) * self.router.gain", always, "self.router = self.Router()", _ROUTER
    ),
    # What it asks the block.
    "empty list of modules": Hostile("$v = $v if self.extra else $v * 2", always, "self.extra = nn.ModuleList()"),
}  # fmt: skip
