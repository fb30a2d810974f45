"""Right blocks as source, with places at which a statement can be inserted, and the modules that such sources make.

A line ``#@ name`` in a source is such a place; ``name`` is the variable that holds what the block computes there.
"""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from torch import nn

WIDTH, HIDDEN, EXPERTS = 16, 32, 4


class Template(NamedTuple):
    """A right block.

    Args:
        children: lines of its ``__init__``.
        methods: its forward, and the methods that the forward calls.
        weight: the path of one of its weights.
        rule: the arguments of an ``FFNRule`` that tells what it computes; empty where there is no such rule.
    """

    children: str
    methods: str
    weight: str
    rule: dict[str, Any] = {}  # noqa: RUF012  a NamedTuple has no other way, and nobody writes to it


_LINEARS = "self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)"
_STACKED = f"""
    self.num_experts, self.has_gate, self.has_bias, self.is_transposed = {EXPERTS}, True, False, False
    self.gate_up_proj = nn.Parameter(torch.randn({EXPERTS}, 64, 16) * 0.2)
    self.down_proj, self.act_fn = nn.Parameter(torch.randn({EXPERTS}, 16, 32) * 0.2), nn.SiLU()
"""

BLOCKS = {
    "Plain": Template(
        _LINEARS,
        """
        def forward(self, x):
            #@ x
            z = self.up(x)
            #@ z
            h = self.act(z)
            #@ h
            y = self.down(h)
            #@ y
            return y
        """,
        "up.weight",
        {"up": "up", "activation": "act", "down": "down"},
    ),
    "Gated": Template(
        f"{_LINEARS}\nself.gate = nn.Linear(16, 32, bias=False)",
        """
        def forward(self, x):
            #@ x
            gate = self.act(self.gate(x))
            #@ gate
            up = self.up(x)
            #@ up
            h = gate * up
            #@ h
            y = self.down(h)
            #@ y
            return y
        """,
        "gate.weight",
        {"up": "up", "gate": "gate", "activation": "act", "down": "down"},
    ),
    "Merged": Template(
        "self.gate_up, self.down = nn.Linear(16, 64), nn.Linear(32, 16)",
        """
        def forward(self, x):
            #@ x
            z = self.gate_up(x)
            #@ z
            gate, up = z.chunk(2, dim=-1)
            #@ up
            h = F.silu(gate) * up
            #@ h
            y = self.down(h)
            #@ y
            return y
        """,
        "gate_up.weight",
        {"up": "gate_up", "gate_rows": "first", "activation": "silu", "down": "down"},
    ),
    "ByMethod": Template(
        _LINEARS,
        """
        def forward(self, x):
            y = self.ffn(x)
            #@ y
            return y

        def ffn(self, x):
            #@ x
            h = self.act(self.up(x))
            #@ h
            return self.down(h)
        """,
        "down.weight",
        {"up": "up", "activation": "act", "down": "down"},
    ),
}

LAYERS = {
    "Layer": Template(
        f"{_LINEARS}\nself.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)\n"
        "self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)",
        """
        def forward(self, x):
            #@ x
            q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
            #@ q
            x = x + self.out(F.scaled_dot_product_attention(q, k, v))
            #@ x
            h = self.norm2(x)
            #@ h
            z = self.up(h)
            #@ z
            h = self.act(z)
            #@ h
            y = self.down(h)
            #@ y
            x = x + y
            #@ x
            return x
        """,
        "up.weight",
    ),
}

NORMS = {
    "RMSNorm": Template(
        "self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-6",
        """
        def forward(self, x):
            #@ x
            dtype = x.dtype
            x = x.to(torch.float32)
            #@ x
            variance = x.pow(2).mean(-1, keepdim=True)
            #@ variance
            x = x * torch.rsqrt(variance + self.eps)
            #@ x
            y = self.weight * x.to(dtype)
            #@ y
            return y
        """,
        "weight",
    ),
    "LayerNorm": Template(
        "self.weight, self.bias = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.rand(16))\nself.eps = 1e-6",
        """
        def forward(self, x):
            dtype, x = x.dtype, x.float()
            #@ x
            mean = x.mean(-1, keepdim=True)
            x = x - mean
            #@ x
            variance = x.pow(2).mean(-1, keepdim=True)
            x = x / (variance + self.eps).sqrt()
            #@ x
            y = self.weight * x.to(dtype) + self.bias
            #@ y
            return y
        """,
        "weight",
    ),
    "NormByMethod": Template(
        "self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-6",
        """
        def forward(self, x):
            y = self.norm(x.float()).type_as(x) * self.weight
            #@ y
            return y

        def norm(self, x):
            #@ x
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        """,
        "weight",
    ),
}

EXPERTS_MODULES = {
    "Loop": Template(
        _STACKED,
        """
        def forward(self, x, index, weights):
            #@ x
            y = torch.zeros_like(x)
            with torch.no_grad():
                mask = F.one_hot(index, num_classes=self.num_experts).permute(2, 1, 0)
                hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
            for number in hit:
                number = number[0]
                slots, rows = torch.where(mask[number])
                h = x[rows]
                #@ h
                gate, up = F.linear(h, self.gate_up_proj[number]).chunk(2, dim=-1)
                #@ gate
                h = self.act_fn(gate) * up
                #@ h
                h = F.linear(h, self.down_proj[number])
                h = h * weights[rows, slots, None]
                #@ h
                y.index_add_(0, rows, h.to(y.dtype))
            #@ y
            return y
        """,
        "down_proj",
    ),
    "ExpertsByMethod": Template(
        _STACKED,
        """
        def one(self, x, number):
            gate, up = F.linear(x, self.gate_up_proj[number]).chunk(2, -1)
            #@ up
            return F.linear(F.silu(gate) * up, self.down_proj[number])

        def forward(self, x, index, weights):
            y = torch.zeros_like(x)
            for number in range(self.num_experts):
                rows, slots = torch.where(index == number)
                h = self.one(x[rows], number) * weights[rows, slots, None]
                #@ h
                y = y.index_add(0, rows, h)
            #@ y
            return y
        """,
        "gate_up_proj",
    ),
}
KINDS = {"block": BLOCKS, "layer": LAYERS, "norm": NORMS, "experts": EXPERTS_MODULES}

# What statements refer to, in every module: factors that change nothing until somebody changes them.
_HEAD = """
import functools, os, random, time, warnings
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FACTOR, NOISE, DEADLINE = 1.0, 0.0, float("inf")
SETTINGS, COUNT, EVENTS, CHANGES = {"factor": 1.0}, [0], [], []
RNG = np.random.default_rng(0)

def seed(number):
    global RNG
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)
    RNG = np.random.default_rng(number)

def scaled(x):
    return x * FACTOR

def adjusted(x):
    return x

def scaling(method):
    @functools.wraps(method)
    def scaled_method(self, *given):
        return method(self, *given) * FACTOR
    return scaled_method

def scaling_unnamed(method):
    return lambda self, *given: method(self, *given) * FACTOR

def remembering(factors):
    def method(self, x):
        return x * factors[0]
    return method

class DoubledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * 2
"""


def _inserted(methods: str, place: int, statement: str, weight: str) -> str | None:
    """The methods with a statement at a place, or None where there is no such place; -1 is none of them."""
    lines, count = [], -1
    for line in textwrap.dedent(methods).strip("\n").splitlines():
        before, is_place, variable = line.partition("#@ ")
        if not is_place:
            lines.append(line)
            continue
        count += 1
        if count == place:
            lines.append(textwrap.indent(statement.replace("$v", variable).replace("$w", weight), before))
    return "\n".join(lines) if place <= count else None


def _class(name: str, template: Template, methods: str, setup: str, members: str) -> str:
    init = "\n".join(["super().__init__()", textwrap.dedent(template.children).strip("\n"), setup])
    body = ["def __init__(self):", textwrap.indent(init, "    "), members, methods]
    return f"class {name}(nn.Module):\n{textwrap.indent(chr(10).join(body), '    ')}\n"


def sources(
    templates: dict[str, Template], statement: str, setup: str = "", members: str = "", decorator: str = ""
) -> Iterator[tuple[str, str, str]]:
    """(class, its template, source) for every template and every place of it."""
    for name, template in templates.items():
        place = 0
        while (methods := _inserted(template.methods, place, statement, template.weight)) is not None:
            methods = methods.replace("def forward", f"{decorator}\ndef forward") if decorator else methods
            yield f"{name}{place}", name, _class(f"{name}{place}", template, methods, setup, members)
            place += 1


def untouched(templates: dict[str, Template]) -> Iterator[tuple[str, str, str]]:
    """The same without any statement: one class for each template."""
    for name, template in templates.items():
        methods = _inserted(template.methods, -1, "", "")
        assert methods is not None
        yield name, name, _class(name, template, methods, "", "")


def imported(file: Path, classes: list[tuple[str, str, str]], patch: pytest.MonkeyPatch) -> ModuleType:
    """A module with these classes, from a file, where Python finds the source of each."""
    file.write_text("\n\n".join([_HEAD, *(source for _, _, source in classes)]))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module: Any = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    return module


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was replaced."""
    kind: type[nn.Module] = getattr(type(module), "fused_from", type(module))
    return kind
