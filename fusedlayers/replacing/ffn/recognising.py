"""Reads what a block computes from the source of its methods: a rule for its FFN, or why there is none.

If the whole forward computes an FFN of its input, the rule is for the whole block: it holds for every input, mode and
dtype, as the input was a symbol. Of a longer method only the part from one linear to another is read, and the method
gets one call in place of its FFN.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any, NamedTuple

from torch import nn

from ...modules import class_path, why_not_plain
from ...modules.children import base_linear
from ..activations import torch_module_activation
from ..conditions import Conditions, attribute, without
from ..reading.formulas import FFN, OtherFormula, ffn_before, ffn_of
from ..reading.polynomials import Polynomial, as_input, linears_in
from ..reading.reader import Reader, functions_of
from ..reading.rewriting import edited, edits_for, reads_for
from ..reading.sizes import linears, sizes_of_linear
from ..reading.sources import codes_in
from ..reading.values import ABSENT, Formula, NotUnderstood
from ..rules import FFNRule, FoundRule
from .by_rule import FusedInside
from .finding import next_children, why_not_held, why_not_whole

_SEVERAL = "does not take exactly one tensor"
_OTHER_INPUT = "computes the FFN of something else than its input"


class FFNLeft(str):
    """Why an FFN that was read in a method stays as it is; other reasons are of methods in which none was read."""


class Site(NamedTuple):
    """A linear of a block by its path: the block's own, or a child's."""

    path: str
    inputs: int
    outputs: int


def candidates(block: nn.Module, taken: set[nn.Module]) -> list[Site]:
    """The linears of a block, and of its direct children, that may form an FFN; none if in ``taken``."""
    found: list[Site] = []
    for name, child in block.named_children():
        inside = [("", child)] if sizes_of_linear(child) else list(linears(child))
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            fused = {path.partition(".")[0] for path, linear in inside if linear in taken}
            inside = [(path, linear) for path, linear in inside if path.partition(".")[0] not in fused]
        elif any(linear in taken for _, linear in inside):
            continue
        else:
            # What the child's own children hold is theirs.
            inside = [(path, linear) for path, linear in inside if "." not in path]
        found += [Site(f"{name}.{path}".rstrip("."), *sizes_of_linear(linear)) for path, linear in inside]  # type: ignore[misc]
    return found


def _fit(up: Site, down: Site) -> bool:
    """Whether ``down`` can take the output of ``up``, or half of it."""
    return up.outputs in (down.inputs, 2 * down.inputs)


def recognise(block: nn.Module, taken: set[nn.Module]) -> FoundRule | str | None:
    """The rule of the FFN that a block computes; why it is not fused, if it may have one; None if no linears fit
    together.

    ``taken`` are the linears of FFNs inside of the block.
    """
    found = candidates(block, taken)
    widths = [up.inputs for pair in permutations(found, 2) for up, down in [pair] if _fit(up, down)]
    if not widths:
        return None
    reasons: list[str] = []
    with _noting("forward", reasons):
        return _whole_block(block, widths[0])
    allowed = {site.path for site in found}
    heads = {path.partition(".")[0] for path in allowed}
    methods = list(_methods(block))
    # First those that name a linear, or a module that holds one: others may call them with the index of one.
    for name, method, _ in sorted(methods, key=lambda each: heads.isdisjoint(each[2])):
        for rule in _rules_inside(block, name, method, allowed, reasons):
            return rule
    # A layer that is more than an FFN may still hold one: report these reasons only if there is no other.
    return min(
        reasons,
        default=None,
        key=lambda each: (not isinstance(each, FFNLeft), _SEVERAL in each or _OTHER_INPUT in each),
    )


@contextmanager
def _noting(method: str, reasons: list[str]) -> Iterator[None]:
    """Note why no rule was found, and go on."""
    try:
        yield
    except OtherFormula as reason:
        # str() would turn an FFNLeft into a plain string.
        reasons.append(reason.args[0])
    except NotUnderstood as reason:
        reasons.append(f"its {method} {reason}")


def _whole_block(block: nn.Module, width: int) -> FoundRule:
    """The rule of a block whose forward is an FFN and nothing else."""
    method = type(block).forward
    if _required(method) != 1:
        raise NotUnderstood(_SEVERAL)
    reader = Reader(block)
    x = reader.input(width)
    result = reader.read(method, x)
    if not isinstance(result, Formula):
        raise NotUnderstood("returns no tensor")
    ffn = ffn_of(result.value, reader.lines)
    if result.wide or not result.shaped:
        raise NotUnderstood("returns a tensor of another dtype or shape than that of its FFN")
    if ffn.input != x.value or reader.casts:
        raise OtherFormula(FFNLeft(f"{ffn.up}, {ffn.down}: its forward {_OTHER_INPUT}"))
    rule = _rule(block, ffn, reader, None)
    if reason := why_not_whole(block, rule):
        raise OtherFormula(reason)
    conditions = Conditions.of(reader, _asked(rule), rule.activation_path)
    methods = (*conditions.methods, *_forwards(block, rule))
    return dataclasses.replace(rule, conditions=conditions._replace(methods=methods))


def _forwards(block: nn.Module, rule: FoundRule) -> list[tuple[type[nn.Module], str]]:
    """The forwards of the children that hold parts of the FFN, or compute something in between."""
    return [(type(attribute(block, path)), "forward") for path, _ in rule.holders]


def checked(block: nn.Module, rule: FFNRule) -> FoundRule | str:
    """A user's rule with the conditions that were read for it, or how the source of the block differs."""
    up, method = attribute(block, rule.up), rule.inside or "forward"
    sizes = sizes_of_linear(up) if isinstance(up, nn.Module) else None
    functions = dict(functions_of(type(block)))
    several = rule.inside is None and _required(type(block).forward) != 1
    parts = [attribute(block, name) for name in (rule.up, rule.gate, rule.down) if name is not None]
    plain = all(isinstance(part, nn.Module) and why_not_plain(base_linear(part)) is None for part in parts if part)
    known = torch_module_activation(attribute(block, rule.activation, rule.activation)) is not None
    values: dict[str, Any] = {name: getattr(rule, name) for name in FFNRule.__dataclass_fields__}
    if sizes is None or several or method not in functions or not plain or not known or why_not_held(block, rule):
        # The error is reported when its parts are looked up.
        return FoundRule(**values)
    reasons: list[str] = []
    found: list[FoundRule] = []
    if rule.inside is None:
        with _noting("forward", reasons):
            found.append(_whole_block(block, sizes[0]))
    else:
        paths = {path for path, _ in linears(block)}
        found += _rules_inside(block, method, functions[method], paths, reasons)
    said = _parts_of(block, rule)
    for each in found:
        read = _parts_of(block, each)
        if rule.inside is not None:
            # The method applies the dropout of the result; it is no part of the FFN that is read.
            read["output_dropout"] = said["output_dropout"]
        # A trusted rule may describe the hidden differently.
        if read == said or (rule.trusted and all(read[name] == said[name] for name in ("up", "gate", "down"))):
            is_formula = each.is_formula and attribute(block, rule.activation) is None
            named = FoundRule(**values, conditions=each.conditions, edits=each.edits, is_formula=is_formula)
            return each if rule.trusted else named
        differing = next(name for name in said if said[name] != read[name])
        reasons.append(f"its source says {differing}={read[differing]!r}, the rule {said[differing]!r}")
    return next(iter(reasons), "no FFN is seen in its source")


def _parts_of(block: nn.Module, rule: FFNRule) -> dict[str, str | None]:
    """The parts that a rule names, without those that the block does not have."""
    names = {name: getattr(rule, name) for name in ("up", "gate", "down", "gate_rows", "dropout", "output_dropout")}
    for name in ("gate", "dropout", "output_dropout"):
        if names[name] is not None and isinstance(attribute(block, names[name]), (type(None), nn.Identity)):
            names[name] = None
    return names | {"activation": torch_module_activation(rule.activation_of(block))}


def _required(function: Callable[..., Any]) -> int:
    """The number of parameters without a default, besides self."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(each.default is each.empty and each.kind not in variadic for each in parameters)


def _methods(block: nn.Module) -> Iterator[tuple[str, Callable[..., Any], set[str]]]:
    """The forward of a block and the methods that it may call, each with the names in its code."""
    methods = dict(functions_of(type(block)))
    left, seen = ["forward"], {"forward"}
    while left:
        name = left.pop(0)
        code = getattr(inspect.unwrap(methods[name]), "__code__", None) if name in methods else None
        if code is None:
            continue
        names = {each for inner in codes_in(code) for each in inner.co_names}
        yield name, methods[name], names
        left += sorted(names - seen)
        seen |= names


def _check_class_is_not_asked_for(block: nn.Module, reader: Reader, method: str) -> None:
    """Neither in this method, which ``reader`` has read, nor in another one on the way to it.

    Raises NotUnderstood with the statement that inspects the class of the block.
    """
    statements = [reader.asks_class]
    for name, function, names in _methods(block):
        if name != method and not names.isdisjoint(("type", "__class__")):
            other = Reader(block, lenient=True)
            # What is not understood there is no matter here: nothing of it is replaced.
            with _noting(name, []):
                other.read(inspect.unwrap(function))
            statements.append(other.asks_class)
    for each in statements:
        if each is not None:
            raise NotUnderstood(f"asks for its own class in `{each}`, which is another one where it is fused")


def _rules_inside(
    block: nn.Module, name: str, method: Callable[..., Any], allowed: set[str], reasons: list[str]
) -> Iterator[FoundRule]:
    """The rules of the FFNs of these linears that a method computes anywhere."""
    reader = Reader(block, lenient=True)
    with _noting(name, reasons):
        reader.read(inspect.unwrap(method))
        for ffn in _ffns_in(name, reader, allowed, reasons):
            try:
                yield _inside(block, name, ffn, reader)
            except NotUnderstood as reason:
                reasons.append(FFNLeft(f"{ffn.up}, {ffn.down}: its {name} {reason}"))


def _ffns_in(method: str, reader: Reader, allowed: set[str], reasons: list[str]) -> Iterator[FFN]:
    """The FFNs of these linears that a method computes, if the linears are called for nothing else."""
    called = [call.path for call in reader.linears]
    found: dict[tuple[str | None, ...], list[FFN]] = {}
    for call in reader.linears:
        if not linears_in(call.input):
            continue
        with _noting(method, reasons):
            ffn = ffn_before(call.path, call.input, reader.lines)
            calls = [each for each in reader.linears if each.path in (ffn.up, ffn.gate)]
            into = [each for each in calls if as_input(each.input) == ffn.input]
            if min((each.misses for each in into), default=None) != call.misses:
                raise NotUnderstood(f"does something between {ffn.up} and {ffn.down} that is not understood")
            parts = (ffn.up, ffn.down, ffn.gate, ffn.gate_rows, ffn.activation, ffn.dropout)
            found.setdefault(parts, []).append(ffn)
    for (up, down, gate, *_), ffns in found.items():
        paths = {path for path in (up, down, gate) if path is not None}
        if not paths <= allowed:
            continue
        # A method may run its FFN several times, and call its last linear for something else, too.
        hiddens = sum(_is_from((up, gate), call.input) for call in reader.linears if call.path == down)
        if used := (paths - {down}) & reader.escaped:
            reasons.append(f"its {' and '.join(sorted(used))} gives a hidden that is used for something else, too")
        elif hiddens > len(ffns):
            reasons.append(FFNLeft(f"{up}, {down}: its {method} gives {down} another hidden of {up}, too"))
        elif all(called.count(path) == len(ffns) for path in paths - {down}):
            yield ffns[0]


def _is_from(paths: tuple[str | None, ...], value: Polynomial) -> bool:
    """Whether a value is computed of what one of these linears gives."""
    return any(found[1] in paths for found in linears_in(value))


def _inside(block: nn.Module, method: str, ffn: FFN, reader: Reader) -> FoundRule:
    """The rule of an FFN inside a method."""
    if ffn.gate_rows in ("even", "odd"):
        raise NotUnderstood("computes more than an FFN with interleaved gate and up projections")
    _check_class_is_not_asked_for(block, reader, method)
    rule = _rule(block, ffn, reader, method)
    for path, _ in rule.holders:
        if isinstance(attribute(block, path), nn.Sequential):
            # Other modules may be put into it later.
            raise NotUnderstood(f"finds its linears in {path}, a row of modules")
    within, into = {*rule.parts(), *dict(rule.holders)}, (ffn.up, ffn.gate)
    for path, given in reader.handed:
        hidden = _is_from(into, given)
        before = given == ffn.input and any(path.startswith(f"{name}.") for name in dict(rule.holders))
        if (hidden or before) and path not in within and not path.startswith(f"{rule.activation_path}."):
            raise NotUnderstood(f"hands its hidden to {path}, whose hooks nobody would ask for")
    edits = edits_for(reader, ffn, type(block), method)
    if edited(edits, getattr(type(block), method), FusedInside.run_inside) is None:
        raise NotUnderstood("is decorated by what is not known")
    read = reads_for(reader, ffn)
    watched = {path: reader.watched[path] for path in read["watched"]}
    # A negative index finds another module when one is appended.
    watched |= dict.fromkeys(next_children(block, rule), ABSENT)
    conditions = Conditions(
        without(watched, _asked(rule), rule.activation_path),
        (*read["methods"], *_forwards(block, rule)),
        tuple((*name, reader.functions[name]) for name in read["functions"]),
    )
    return dataclasses.replace(rule, conditions=conditions, edits=edits)


def _asked(rule: FFNRule) -> tuple[str | None, ...]:
    """The attributes that are looked up at every call: the parts of the FFN."""
    return (*rule.parts(), rule.output_dropout)


def _rule(block: nn.Module, ffn: FFN, reader: Reader, inside: str | None) -> FoundRule:
    path = reader.path_of(ffn.activation, ffn.activated)
    activation = ffn.activation if path is None else path
    names = [ffn.up, ffn.gate, ffn.down, path, ffn.dropout, ffn.output_dropout]
    above = dict.fromkeys(name.rpartition(".")[0] for name in names if name is not None and "." in name)
    if inside is None:
        # Children that compute something in between, such as GLUs: their forwards were read.
        above |= dict.fromkeys(
            each for each, _ in reader.handed
            if each not in names and not each.startswith(f"{path}.") and type(attribute(block, each)) is not nn.Identity
        )  # fmt: skip
    # An object with options, such as a configuration, is not a module: there is nothing to call.
    holders = [(each, attribute(block, each)) for each in above]
    return FoundRule(
        type(block), up=ffn.up, gate=ffn.gate, gate_rows=ffn.gate_rows, down=ffn.down, activation=activation,
        dropout=ffn.dropout, output_dropout=ffn.output_dropout, inside=inside, is_formula=path is None,
        holders=tuple((each, class_path(type(holder))) for each, holder in holders if isinstance(holder, nn.Module)),
    )  # fmt: skip
