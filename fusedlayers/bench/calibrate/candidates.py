"""What is measured: calls of benchmark cases, at the sizes given, at those of a model, or at the published ones."""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import nn

from ... import replacing
from ...functional.dispatch import decisions
from ...functional.switches import switched
from ...kernels.activations import ACTIVATIONS
from ...kernels.gemm_reduce import OPERATIONS
from ..arguments import parse_shape
from ..cases import CASES, DTYPES, Case, Options, Shape
from ..cases.trial import Trial
from ..contenders import AUTO_SWITCHES

SYNTAX = "CASE:SIZES[:WORD,...]"
# The letter of rows, whose number differs from call to call; the other sizes are those of a layer.
_ROWS = "M"
# The letters of cases whose sizes have other names in problems.
_FIELDS = {"B": "batch", "k": "top_k", "R": "rank_up"}


def parse_candidate(text: str) -> tuple[Case, Options, Shape]:
    """``ffn:16384x1024x4096:silu,gated``: a case, its sizes, and the options that differ from the published ones.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    name, _, rest = text.partition(":")
    if name not in CASES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {SYNTAX} with a case out of {', '.join(CASES)}")
    case = CASES[name]
    sizes, _, words = rest.partition(":")
    shape = parse_shape(sizes, case.letters, case.meaning)
    options = Options(bias=False) if words else case.grids[0].options
    for word in filter(None, words.split(",")):
        change = _option(word)
        if not change or not (change.keys() <= case.flags | ({"activation"} if case.has_activation else set())):
            known = [*ACTIVATIONS] if case.has_activation else []
            known += [*OPERATIONS, "rows", "columns"] if "op" in case.flags else []
            known += sorted(case.flags & {"gated", "bias"})
            raise argparse.ArgumentTypeError(f"{word!r} of {text!r}: expected words out of {', '.join(known)}")
        options = replace(options, **change)
    return case, options, shape


def _option(word: str) -> dict[str, Any]:
    if word in ("gated", "bias"):
        return {word: True}
    if word in ACTIVATIONS:
        return {"activation": word}
    if word in OPERATIONS:
        return {"op": word}
    return {"dim": {"rows": -2, "columns": -1}[word]} if word in ("rows", "columns") else {}


def at_shapes(chosen: Iterable[tuple[Case, Options, Shape]], dtype: str) -> list[Trial]:
    """Both passes of what was chosen."""
    return _distinct(both for one in chosen for both in _both_passes(*one, dtype))


def published(dtype: str) -> list[Trial]:
    """All published grids, one shape of each after the other, each also with fewer rows: what lies between follows."""
    grids = [[(case, grid.options, shape) for shape in grid.shapes] for case in CASES.values() for grid in case.grids]
    rounds = filter(None, chain.from_iterable(zip_longest(*grids)))
    return _distinct(
        both
        for case, options, shape in rounds
        for rows in _rows(case, shape)
        for both in _both_passes(case, options, rows, dtype)
    )


def of_model(name: str) -> tuple[list[Trial], list[str]]:
    """The calls of a model after ``fl.replace``, also with fewer rows; and what cannot be measured, and why.

    ``name`` is ``MODULE:FUNCTION``; the function takes nothing, and gives the model and its inputs: a tensor, a tuple
    of them, or a dictionary of arguments.

    Raises:
        ValueError: there is no such function, or it gives something else.
    """
    model, inputs = _made(name)
    with warnings.catch_warnings():
        # Where there is nothing to replace, the model may call this library itself.
        warnings.filterwarnings("ignore", message="nothing was replaced")
        replacing.replace(model)
    trials, left = [], []
    for problem in _problems(model, inputs):
        trial = trial_of(problem)
        if trial is None:
            left.append(f"{problem.operation}, {problem.described}")
            continue
        case = CASES[trial.case]
        trials += [replace(trial, shape=shape) for shape in _rows(case, trial.shape)]
    return _distinct(trials), left


def trial_of(problem: Any) -> Trial | None:
    """The call of a benchmark case that has this very problem, if there is one."""
    values: dict[str, Any] = {each.name: getattr(problem, each.name) for each in fields(problem)}
    for case in CASES.values():
        names = [_FIELDS.get(letter, letter) for letter in case.letters]
        dtype = next((short for short, known in DTYPES.items() if str(known) == f"torch.{values['dtype']}"), None)
        if case.operation != problem.operation or dtype is None or not set(names) <= values.keys():
            continue
        shape = tuple(values[name] for name in names)
        given = {name: values[name] for name in ("activation", "gated", "op") if name in values}
        backward = bool(getattr(problem, "training", False)) and case.backward
        dropped = 0.1 if values.get("dropout") else 0.0
        if "reduction" in values:
            given["op"] = "mean"  # the one that losses are benchmarked with
        for bias in (True, False):
            options = Options(**given, bias=bias, dropout_p=dropped)
            trial = Trial(case.name, options, shape, dtype, backward=backward)
            if 0 not in shape and _alike(trial.problem(), problem):
                return trial
    return None


def _alike(one: Any, other: Any) -> bool:
    """Whether two problems differ by nothing but how they are launched, and what could be trained."""
    free = {name: False for name in ("captured", "compiled", "trains_weight") if hasattr(one, name)}
    return type(one) is type(other) and bool(replace(one, **free) == replace(other, **free))


def _made(name: str) -> tuple[nn.Module, Any]:
    module, colon, function = name.partition(":")
    try:
        if not colon:
            raise ValueError("expected MODULE:FUNCTION")
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"argument --model: {name!r}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(f"argument --model: {name!r}: expected a function that gives (model, inputs)")
    return made[0], made[1]


def _problems(model: nn.Module, inputs: Any) -> list[Any]:
    """What one training step and one call without gradients ask of the planner."""
    arguments, keywords = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    arguments = arguments if isinstance(arguments, tuple) else (arguments,)
    training = model.training
    with switched(AUTO_SWITCHES), decisions() as found:
        model.train()
        results = model(*arguments, **keywords)
        sum(tensor.float().sum() for tensor in _results(results)).backward()  # type: ignore[union-attr]
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            model.eval()(*arguments, **keywords)
    model.train(training)
    return list(found.problems)


def _results(found: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result that have a gradient."""
    if isinstance(found, torch.Tensor):
        yield from [found] * found.requires_grad
    elif isinstance(found, Mapping):
        yield from chain.from_iterable(map(_results, found.values()))
    elif isinstance(found, tuple | list):
        yield from chain.from_iterable(map(_results, found))


def _rows(case: Case, shape: Shape) -> list[Shape]:
    """The shape, and one with an odd number of rows, about a quarter: then any number in between follows from both."""
    if _ROWS not in case.letters:
        return [shape]
    place = case.letters.index(_ROWS)
    fewer = max(1, (shape[place] // 4 - 1) | 1)
    return [shape, (*shape[:place], fewer, *shape[place + 1 :])]


def _both_passes(case: Case, options: Options, shape: Shape, dtype: str) -> Iterator[Trial]:
    yield Trial(case.name, options, shape, dtype, backward=False)
    if case.backward:
        yield Trial(case.name, options, shape, dtype)


def _distinct(trials: Iterable[Trial]) -> list[Trial]:
    return list(dict.fromkeys(trials))
