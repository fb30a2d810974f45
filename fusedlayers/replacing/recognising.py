"""What a block computes, read from a trial: which of its linears make an FFN, believed only after proof.

A small copy of the block runs on random numbers. The linear whose input is an activation of what another one gave is
the second of an FFN, and which activation it is the numbers tell; dropouts are set one after the other, and where they
drop tells what they are. What was read becomes an ``FFNRule``, and is believed where the block and the FFN of the rule
agree in all results and gradients (``proving``).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..kernels.activations import ACTIVATIONS
from ..modules import attributes_of, class_path, split_gate
from .activations import torch_module_activation
from .finding import attribute
from .formulas import is_formula_of_linears, options_read
from .proving import why_not_proven
from .rules import GATE_ROWS, FFNRule, FoundRule
from .segments import Segment, segments
from .small_copies import LARGEST, divisor, elements, linears, sizes_in, sizes_of_linear
from .stand_ins import why_no_stand_in
from .trials import Bench, LinearCall, Trial, alike, quietly

# The probability of the dropout that is on.
_ON = 0.5
_DROPOUT_NAME = re.compile(r"drop|(^|_)p(rob)?$")


class Site(NamedTuple):
    """A linear of a block by its path: the block's own, or the one of a child."""

    path: str
    inputs: int
    outputs: int


class Chain(NamedTuple):
    """The FFN of a trial, by the paths of its linears, and its activation in this library's words."""

    up: str
    down: str
    gate: str | None
    gate_rows: str | None
    activation: str


class Unrecognised(Exception):
    """Why a block with the linears of an FFN is none."""


def sites(block: nn.Module, taken: set[nn.Module]) -> list[Site]:
    """The linears of a block that may make an FFN of its own: those that no block inside of it has, and no other."""
    found: list[Site] = []
    for name, child in block.named_children():
        if sizes := sizes_of_linear(child):
            found += [] if child in taken else [Site(name, *sizes)]
            continue
        inside = list(linears(child))
        if any(linear in taken for _, linear in inside):
            continue
        if len(inside) > 1 and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            # Of several it is the one that the child holds itself.
            own = [(path, linear) for path, linear in inside if "." not in path]
            inside = own if len(own) == 1 else []
        found += [Site(f"{name}.{path}", *sizes_of_linear(linear)) for path, linear in inside]  # type: ignore[misc]
    return found


def likely_pairs(block: nn.Module, found: Sequence[Site]) -> list[tuple[Site, Site]]:
    """The linears of which the second takes what the first gives, or half of it, in the order in which they were built.

    The other way around they come last, and only where the result has the width of the input.
    """
    sizes = [(site.inputs, site.outputs) for site in found]
    # Three alike are the queries, keys and values of an attention, unless there is nothing else.
    alone = len(found) == 3 and len(inspect.signature(type(block).forward).parameters) == 2
    backwards = [(up, down) for up, down in combinations(found[::-1], 2) if up.inputs == down.outputs]
    return [
        (up, down)
        for up, down in (*combinations(found, 2), *backwards)
        if up.outputs in (down.inputs, 2 * down.inputs)
        and (alone or all(sizes.count((each.inputs, each.outputs)) < 3 for each in (up, down)))
    ]


def recognise(block: nn.Module, taken: set[nn.Module]) -> FFNRule | str | None:
    """The rule of the FFN that a block computes; why it is not fused, if it has one; None: no trial shows any.

    ``taken`` are the linears of FFNs inside of the block.
    """
    pairs = likely_pairs(block, sites(block, taken))
    if not pairs:
        return None
    with quietly():
        return _tried(block, pairs)


def _tried(block: nn.Module, pairs: Sequence[tuple[Site, Site]]) -> FFNRule | str | None:
    reasons: list[str] = []
    errors: list[str] = []
    for by in dict.fromkeys((divisor(sizes_in(block)), 1)):
        # Some methods have sizes written into them, and run with no others.
        if reasons or (errors and elements(block) > LARGEST):
            break
        for segment in segments(block, pairs):
            try:
                return _recognise(block, by, segment)
            except Unrecognised as reason:
                reasons.append(str(reason))
            except Exception as error:
                # The method is the user's, and the numbers are ours: whatever it raises, it could not be tried.
                errors.append(f"a trial of its {segment.name} ended in {type(error).__name__}: {_first_line(error)}")
    return next(iter((*reasons, *errors)), None)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:120]


def _recognise(block: nn.Module, by: int, segment: Segment) -> FFNRule:
    bench = Bench(block, by, segment.method, segment.widths)
    trial = bench.run(bench.copy())
    again = bench.run(bench.copy())
    if not all(map(torch.equal, trial.results, again.results)):
        raise Unrecognised("it computes something else every time")
    chain = _chain(trial)
    if segment.whole and _is_whole(trial, chain) and _is_formula(bench):
        try:
            return _proven(bench, segment, trial, chain, whole=True)
        except Unrecognised as reason:
            # With a child, say, that it does not call.
            try:
                return _proven(bench, segment, trial, chain, whole=False)
            except Exception:
                raise reason from None
    return _proven(bench, segment, trial, chain, whole=False)


def _is_formula(bench: Bench) -> bool:
    """Whether the method computes the same whatever its input is, and so need not run."""
    copies = (bench.copy(), bench.copy(training=True))
    return is_formula_of_linears(copies, bench.method, bench.widths[0] // bench.by)


def _proven(bench: Bench, segment: Segment, trial: Trial, chain: Chain, *, whole: bool) -> FFNRule:
    """The rule of this chain, whose FFN is the ``whole`` forward, or a part of the method."""
    block = bench.block
    dropout, output_dropout = _dropouts(bench, trial, chain, whole)
    if not whole and (reason := why_no_stand_in(segment.name, getattr(type(block), segment.name))):
        raise Unrecognised(reason)
    rule = _rule(block, chain, segment, whole, dropout, output_dropout)
    reason = why_not_proven(bench, rule)
    into = chain.up.rpartition(".")[0]
    if reason and rule.inside and rule.activation == chain.activation and into and dropout is None:
        # A child with an activation that it writes out: it computes the hidden as a whole.
        rule = dataclasses.replace(rule, into=into)
        reason = why_not_proven(bench, rule)
    if reason:
        raise Unrecognised(reason)
    return _with_options(block, rule, bench) if whole or rule.into is not None else rule


def _chain(trial: Trial) -> Chain:
    """The FFN among the linears of a trial."""
    called = [call.path for call in trial.calls]
    once = [call for call in trial.calls if called.count(call.path) == 1]
    for place, down in enumerate(once):
        before = [call for call in once[:place] if call.output.shape[:-1] == down.input.shape[:-1]]
        for chain in _chains(before, down):
            return chain
    raise Unrecognised("no linear of it takes an activation of what another one gives")


def _chains(before: Sequence[LinearCall], down: LinearCall) -> Iterator[Chain]:
    width = down.input.shape[-1]
    for up in before:
        if up.output.shape[-1] == width:
            yield from (
                Chain(up.path, down.path, None, None, name)
                for name, activation in ACTIVATIONS.items()
                if name != "identity" and alike(activation.torch(up.output), down.input)
            )
        elif up.output.shape[-1] == 2 * width:
            for rows in GATE_ROWS:
                # The rows of a weight are the columns of what it gives.
                gate, rest = (half.movedim(0, -1) for half in split_gate(up.output.movedim(-1, 0), rows))
                if name := _gating(gate, rest, down.input):
                    yield Chain(up.path, down.path, None, rows, name)
    for gate_call, up in permutations(before, 2):
        alike_in_size = gate_call.output.shape[-1] == up.output.shape[-1] == width
        if not alike_in_size or not torch.equal(gate_call.input, up.input):
            continue
        if name := _gating(gate_call.output, up.output, down.input):
            yield Chain(up.path, down.path, gate_call.path, None, name)


def _gating(gate: Tensor, up: Tensor, hidden: Tensor) -> str | None:
    names = (name for name, activation in ACTIVATIONS.items() if alike(activation.torch(gate) * up, hidden))
    return next(names, None)


def _calls_of(trial: Trial, chain: Chain) -> tuple[LinearCall, LinearCall]:
    """The calls of the first and of the last linear."""
    calls = {call.path: call for call in trial.calls}
    return calls[chain.up], calls[chain.down]


def _is_whole(trial: Trial, chain: Chain) -> bool:
    """Whether the method computes the FFN of what it was given, and nothing else."""
    up, down = _calls_of(trial, chain)
    number = 2 if chain.gate is None else 3
    [x, *others] = trial.inputs
    alone = len(trial.calls) == number and len(trial.results) == 1 and not others
    return alone and torch.equal(up.input, x) and alike(trial.results[0], down.output)


def _dropouts(bench: Bench, evaluated: Trial, chain: Chain, whole: bool) -> tuple[str | None, str | None]:
    """The paths of the dropouts of the hidden and of the result."""
    trained = bench.run(_with_dropout(bench.copy(training=True), None))
    if len(trained.results) != len(evaluated.results) or not all(map(alike, trained.results, evaluated.results)):
        raise Unrecognised("it computes something else in training, and no attribute shows a dropout of it")
    hidden: list[str] = []
    output: list[str] = []
    for path in _dropout_paths(bench.copy()):
        if not all(map(alike, bench.run(_with_dropout(bench.copy(), path)).results, evaluated.results)):
            raise Unrecognised(f"its dropout {path!r} drops in evaluation, too")
        trial = bench.run(_with_dropout(bench.copy(training=True), path))
        (_, down), (_, base) = _calls_of(trial, chain), _calls_of(evaluated, chain)
        if not alike(down.input, base.input):
            if not _dropped(down.input, base.input):
                raise Unrecognised(f"its dropout {path!r} does not drop the hidden behind the activation")
            hidden.append(path)
        if whole and not alike(trial.results[0], down.output):
            if not _dropped(trial.results[0], down.output):
                raise Unrecognised(f"its dropout {path!r} drops neither the hidden nor the result")
            output.append(path)
    for paths, what in ((hidden, "the hidden"), (output, "the result")):
        if len(paths) > 1:
            raise Unrecognised(f"several dropouts drop {what}: {', '.join(paths)}")
    return next(iter(hidden), None), next(iter(output), None)


def _dropped(values: Tensor, base: Tensor) -> bool:
    """Whether some of these are zero, and the rest twice what they were."""
    kept = torch.where(values == 0, values, base * 2)
    return alike(values, kept)


def _dropout_paths(block: nn.Module) -> list[str]:
    """The dropouts of a block: modules, and numbers whose names say so."""
    found: list[str] = []
    for path, module in block.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, _DropoutNd):
            found.append(path)
            continue
        found += [
            prefix + name
            for name, value in vars(module).items()
            if _DROPOUT_NAME.search(name) and type(value) in (int, float) and 0 <= value < 1
        ]
    return found


def _with_dropout(block: nn.Module, dropping: str | None) -> nn.Module:
    """The block with all dropouts off but one."""
    for path in _dropout_paths(block):
        p = _ON if path == dropping else 0.0
        part = attribute(block, path)
        if isinstance(part, _DropoutNd):
            part.p = p
        else:
            holder, _, name = path.rpartition(".")
            (attribute(block, holder) if holder else block).__dict__[name] = p
    return block


def _rule(
    block: nn.Module, chain: Chain, segment: Segment, whole: bool, dropout: str | None, output_dropout: str | None
) -> FFNRule:
    inside = None if whole else segment.name
    if not whole and chain.gate_rows in ("even", "odd"):
        raise Unrecognised(f"its {segment.name} computes more than an FFN with interleaved gate and up projections")
    activation = _activation_path(block, chain)
    names = [chain.up, chain.gate, chain.down, activation, dropout, output_dropout]
    paths = dict.fromkeys(name.rpartition(".")[0] for name in names if name is not None and "." in name)
    holders = {path: class_path(type(attribute(block, path))) for path in paths}
    return FFNRule(
        type(block), up=chain.up, gate=chain.gate, gate_rows=chain.gate_rows, down=chain.down, activation=activation,
        dropout=dropout, output_dropout=output_dropout, inside=inside, holders=tuple(holders.items()),
    )  # fmt: skip


def _with_options(block: nn.Module, rule: FFNRule, bench: Bench) -> FFNRule:
    """The rule, with the options that were read in what will not run: the forward, or that of the child ``into``."""
    prefix = "" if rule.into is None else f"{rule.into}."
    part = attribute(block, rule.into) if rule.into is not None else block
    if rule.into is not None:
        copies = [attribute(bench.copy(training), rule.into) for training in (False, True)]
        width = bench.widths[0] // bench.by
        if part._parameters or part._buffers or not is_formula_of_linears(copies, type(part).forward, width):
            raise Unrecognised(f"its {rule.into} computes more than an activation of a linear")
    parts = [name.removeprefix(prefix) for name in (*rule.parts(), rule.output_dropout or "")]
    options = options_read(part, "forward", parts)
    if options is None:
        raise Unrecognised("its forward reads a variable that may change")
    values = {field.name: getattr(rule, field.name) for field in dataclasses.fields(FFNRule)}
    return FoundRule(**values, options=tuple((prefix + name, value) for name, value in options))


def _activation_path(block: nn.Module, chain: Chain) -> str:
    """Where the activation is in the block, or in a child that holds a linear of the FFN; else its name."""
    holders = dict.fromkeys(["", *(path.rpartition(".")[0] for path in (chain.gate or chain.up, chain.up, chain.down))])
    for holder in holders:
        owner = attribute(block, holder) if holder else block
        own = {**owner._modules, **attributes_of(owner)}
        for name, part in own.items():
            if name.startswith("_") or isinstance(part, _DropoutNd) or not (callable(part) or isinstance(part, str)):
                continue
            if sizes_of_linear(part) is None and torch_module_activation(part) == chain.activation:
                return f"{holder}.{name}" if holder else name
    return chain.activation
