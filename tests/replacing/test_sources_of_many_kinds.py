"""Blocks whose source is compiled in many ways: by files, notebooks and classes that mangle private names."""

from __future__ import annotations

import ast
import copy
import linecache
import logging
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.replacing.reading.sources import tree_of
from tests.support.written import remembered

WIDTH, UNITS = 8, 32


def defined(source: str, *, statements: bool = False) -> dict[str, Any]:
    """What a file has, or a cell of a notebook, which is compiled statement by statement."""
    name = remembered(source)
    tree = ast.parse(source)
    parts = [ast.Module([each], []) for each in tree.body] if statements else [tree]
    found: dict[str, Any] = {"__name__": "nowhere", "nn": nn, "torch": torch}
    for each in parts:
        exec(compile(each, name, "exec", dont_inherit=True), found)
    return found


def is_fused(kind: Callable[[], nn.Module]) -> bool:
    """Whether the block is fused; then it computes what its author wrote."""
    torch.manual_seed(0)
    original, x = kind(), torch.randn(2, 3, WIDTH)
    block = copy.deepcopy(original)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing was replaced")
        found = bool(fl.replace(block).replaced)
    torch.testing.assert_close(block(x), original(x))
    return found


BLOCK = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        'What it does.

        It computes an FFN.'
        return self.down(F.gelu(self.up(x)))
""".replace("'", '"""')
NAMED = {
    "imported": "import torch.nn.functional as F",
    "imported from": "from torch.nn import functional as F",
    "assigned": "F = nn.functional",
    "with a star": "from star import *",
    "on a condition": "if torch:\n    import torch.nn.functional as F\nelse:\n    F = None",
    "if it is there": "try:\n    import nowhere as F\nexcept ImportError:\n    import torch.nn.functional as F",
    "in a function": "def get():\n    global F\n    import torch.nn.functional as F\nget()",
    "in a function for itself": "def get():\n    import torch.nn.functional as F\n    return F\nF = get()",
    "in a class": "class Get:\n    import torch.nn.functional as F\nF = Get.F",
    "with dots": "import torch.nn.functional\nF = torch.nn.functional",
    "in the future": "from __future__ import annotations\nimport torch.nn.functional as F",
}


@pytest.mark.parametrize("statements", [False, True], ids=["file", "notebook"])
@pytest.mark.parametrize("head", NAMED.values(), ids=NAMED)
def test_names_come_from_anywhere(head: str, statements: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    star: Any = types.ModuleType("star")
    star.F = F
    monkeypatch.setitem(sys.modules, "star", star)
    assert is_fused(defined(f"{head}\n{BLOCK}", statements=statements)["Block"])


IMPORT = "import torch.nn.functional as F\n"
INDENTED = textwrap.indent(BLOCK, "    ")
OTHERWISE = {
    "before the import": f"F = nn.functional\n{BLOCK}\n{IMPORT}",
    "of a whole module": "import torch.nn\n" + BLOCK.replace("F.gelu", "torch.nn.functional.gelu"),
    "with a variable like an import": IMPORT
    + BLOCK.replace("return", "nn = x.view(x.shape)\n        return").replace("up(x)", "up(nn.view(nn.shape))")
    + "from torch import nn\n",
    "in a function": f"{IMPORT}def made():\n{INDENTED}\n    return Block\nBlock = made()",
    "with its import": f"if torch:\n    {IMPORT}{INDENTED}",
    "decorated": f"{IMPORT}def same(f): return f\n"
    + BLOCK.replace("    def forward", "    @same\n    @(lambda f: f)\n    def forward"),
    "a lambda": IMPORT + BLOCK.replace("F.gelu", "self.act") + "    act = staticmethod(lambda z: F.gelu(z))\n",
    "a method named like a module": BLOCK.replace("F.gelu", "self.nn") + """
    def nn(self, z):
        return nn.functional.gelu(z)
""",
    "strings of many lines": IMPORT + BLOCK.replace("return", "assert True, \"\"\"\n  a\n b\"\"\"\n        return"),
}  # fmt: skip


@pytest.mark.parametrize("statements", [False, True], ids=["file", "notebook"])
@pytest.mark.parametrize("source", OTHERWISE.values(), ids=OTHERWISE)
def test_blocks_stand_anywhere(source: str, statements: bool) -> None:
    assert is_fused(defined(source, statements=statements)["Block"])


def test_a_method_of_an_imported_object_is_called() -> None:
    source = "from logging import root\n" + BLOCK.replace("return", "root.debug('x')\n        return x +")
    assert is_fused(defined(f"import torch.nn.functional as F\n{source}")["Block"])
    assert logging.root is not None


@pytest.mark.parametrize("head", ["import torch.nn.functional as F", "F = nn.functional"])
@pytest.mark.parametrize("change", [("gelu", "relu"), ("(x)))", "(x) + 1))"), ("x)))", "y)))")])
def test_source_that_was_edited_since_is_not_believed(head: str, change: tuple[str, str]) -> None:
    found = defined(f"{head}\n{BLOCK}")["Block"]
    path = found.forward.__code__.co_filename
    text = "".join(linecache.cache[path][2]).replace(*change)
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    assert not is_fused(found)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.__up, self.__down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)
        self.__scale__ = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.__down(F.gelu(self.__up(x)))


class Method(Block):
    def __init__(self) -> None:
        super().__init__()
        self.__up, self.__down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)
        del self._Block__up, self._Block__down

    def forward(self, x: Tensor) -> Tensor:
        return self.__ffn(x)

    def __ffn(self, __x: Tensor) -> Tensor:
        __h = self.__up(__x)
        return self.__down(F.gelu(__h) * self.__scale__)


class Inside(Block):
    def __init__(self) -> None:
        super().__init__()
        self.__up, self.__down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)
        del self._Block__up, self._Block__down

    def forward(self, __x: Tensor, *, __mask: Tensor | None = None) -> Tensor:
        __h = self.__up(__x)
        return self.__down(F.gelu(__h)) + __x.flip(1)


class ___Underscored(Block):
    def __init__(self) -> None:
        super().__init__()
        self.__up, self.__down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)
        del self._Block__up, self._Block__down

    def forward(self, x: Tensor) -> Tensor:
        return self.__down(F.gelu(self.__up(x)))


class ___(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.__up, self.__down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.__down(F.gelu(self.__up(x)))


class Outer:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.__up, self.__down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.__down(F.gelu(self.__up(x)))

    def make(self) -> nn.Module:
        def forward(block: Any, x: Tensor) -> Tensor:
            return block.__down(F.gelu(block.__up(x)))  # type: ignore[no-any-return]

        block = type("Made", (nn.Module,), {"forward": forward})()
        block.__up, block.__down = nn.Linear(WIDTH, UNITS), nn.Linear(UNITS, WIDTH)
        return block  # type: ignore[no-any-return]


PRIVATE = [Block, Method, Inside, ___Underscored, ___, Outer.Inner, Outer().make]


@pytest.mark.parametrize("kind", PRIVATE, ids=lambda kind: kind.__name__)
def test_private_names_are_those_that_the_compiler_writes(kind: Callable[[], nn.Module]) -> None:
    assert is_fused(kind)


def test_a_class_within_a_method_has_private_names_of_its_own() -> None:
    class Named(Block):
        def forward(self, x: Tensor) -> Tensor:
            class Other:
                __up = 2.0

                def up(self) -> float:
                    return self.__up

            return x.flip(1) + self._Block__down(F.gelu(self._Block__up(x))) * Other().up()  # type: ignore[attr-defined, no-any-return]

    assert is_fused(Named)


def test_the_private_name_of_another_class_is_another_attribute() -> None:
    class Derived(Block):
        def __init__(self) -> None:
            super().__init__()
            self.__up, self.__down = nn.Linear(WIDTH, 2 * UNITS), nn.Linear(2 * UNITS, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.__down(F.gelu(self.__up(x)))

    [entry] = fl.replace(Derived()).replaced
    assert "_Derived__up, _Derived__down: gelu, 8 -> 64 -> 8" in str(entry.reason)


class Names:
    def of_all_kinds(self, __a: Any, *__b: Any, __c: int = 1, **__d: Any) -> Any:
        global __g
        from os import path as __path

        __v = [__i for __i in __b if (__w := __i)]

        def inner(__x: Any) -> Any:
            nonlocal __v
            __v = __x, __a, __g
            return lambda __y: (__y, __v)

        class Inner(type(__a)):  # type: ignore[misc]
            __own: Any = __v

            def get(self) -> Any:
                return self.__own, __v

        try:
            del self.__attribute
        except ValueError as __error:
            raise __error from None
        match __a:
            case [__first, *__others]:
                return inner(__c=__first, others=__others)
            case {"a": __value, **__rest}:
                return __value, __rest, self.__dunder__, self._single, f"{self.__attribute}", __w
            case Inner(__own=__e):
                return __e, __path, __c, __d, inner


def test_private_names_of_all_kinds() -> None:
    tree = tree_of(Names.of_all_kinds)
    written = set(re.findall(r"\w*__\w+", ast.unparse(tree)))
    ours = "a b c d g path v i w x y attribute error first others value rest e"
    keywords = {"__c", "__own"}
    assert written - keywords == {
        "__dunder__",
        "_Inner__own",
        "_Inner__v",
        *(f"_Names__{each}" for each in ours.split()),
    }
