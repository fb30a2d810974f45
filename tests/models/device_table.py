"""Measure, for each family, what `replace` does to a training step on a GPU, in bfloat16: check, then time and memory.

    python -m tests.models.device_table --output tests/models/results/h200-bf16.json

A model has one layer (or one of each side) with the widths that its library takes by default, and a small vocabulary,
so that the layer is what is measured; attention is the library's default, too. Contenders share the parameters and are
interleaved: the model as it is (``torch``), replaced (``auto``), and replaced with ``recompute=True``. One whose logits
or gradients fail the closeness rule, for the very inputs that are to be timed, is not timed, and the exit status is 1.
It is judged over several draws: the parameters as they are, and changed a little, so that all is rounded anew. What
fails is judged again with more of them, its own and torch's: a single tile of thousands may have been unlucky, and one
that is wrong stays so. ``--update`` keeps the rows of other families that the output holds already, from a run on the
same device with the same versions.
The rows of the record, besides what every record of the benchmark says (``fusedlayers.bench.record``):

    family, ffn, shapes    of the inputs
    commit                 of the sources, where that is not the record's
    contenders             by name: paths (calls by the path that launched calls take), logits_error, gradients_error
                           (the largest error over the largest value, against float64), draws (how many were judged),
                           red (what failed the rule),
                           saved_bytes (kept by the forward pass for the backward pass, without parameters),
                           peak_bytes (most allocated by a step), launched (a spread of seconds), host_bound (launched
                           shows the host and not the device); or reason (why nothing was measured)
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fusedlayers as fl
from benchmarks.records import check_alike
from fusedlayers.bench import record as records
from fusedlayers.bench.contenders import AUTO_SWITCHES, Contender
from fusedlayers.bench.memory import peak_bytes, saved_bytes
from fusedlayers.bench.timing import NotTimed, measure
from fusedlayers.bench.work import Work
from fusedlayers.closeness import compare_draws
from fusedlayers.functional.dispatch import decisions
from fusedlayers.functional.switches import switched
from tests.models.small import FAMILIES, Family, Inputs, Results
from tests.support import seeds

Row = dict[str, Any]
TORCH = "torch"
# Models of this width and wider get fewer tokens, so that all take about as long.
WIDE, WIDE_TOKENS = 2048, 8_192
# Single tokens decide whole tiles of some gradients: of thousands of tiles, torch's errors are lucky in a few. Other
# inputs would not do: the largest error of all of them is again that of one token, with one error of each to compare.
DRAWS, MOST_DRAWS = 3, 24
# The largest share by which a draw changes a parameter: many roundings of 8 bits, and the same tokens still decide.
CHANGE = 1 / 16


def on(device: str, inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs there, floating ones in that dtype."""
    return {
        name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in inputs.items()
    }


def worst_error(results: Results, truth: Results, gradients: bool) -> float:
    """The largest error of the logits or of all gradients, over the largest value among them."""
    names = [name for name in truth if name != "loss" and (name != "logits") == gradients]
    errors, values = [], []
    for name in names:
        ours, reference = results[name], truth[name]
        if ours is not None and reference is not None and reference.numel():
            errors.append(float((ours.detach().double() - reference).abs().max()))
            values.append(float(reference.detach().abs().max()))
    return max(errors) / max(values)


def variants(plain: nn.Module) -> dict[str, nn.Module]:
    """The model as it is, and replaced, with the same parameters."""
    shared = {id(parameter): parameter for parameter in plain.parameters()}
    models = {TORCH: plain} | {name: copy.deepcopy(plain, dict(shared)) for name in ("auto", "recompute")}
    fl.replace(models["auto"])
    fl.replace(models["recompute"], recompute=True)
    return models


def stacked(results: Sequence[Results]) -> Results:
    """The draws of each result as one tensor; the weights of convolutions are the matrices of their products."""
    found: Results = {}
    for name in results[0]:
        draws = [each[name] for each in results]
        if any(draw is None for draw in draws):
            found[name] = None
            continue
        joined = torch.stack([draw for draw in draws if draw is not None])
        weight = name.startswith("d") and joined.dim() > 3
        found[name] = joined.flatten(2) if weight else joined
    return found


def judged(found: Results, expected: Results, truth: Results) -> dict[str, str]:
    """What fails the rule of closeness, and how; each result has several draws."""

    def draw(number: int) -> tuple[Results, ...]:
        return tuple(
            {name: None if each is None else each[number] for name, each in results.items()}
            for results in (found, expected, truth)
        )

    count = max(len(each) for each in truth.values() if each is not None)
    verdicts = compare_draws(draw(number) for number in range(count))
    return {name: verdict.message for name, verdict in verdicts.items() if not verdict.ok}


@contextmanager
def changed(model: nn.Module, draw: int) -> Iterator[None]:
    """Inside, each number of its parameters is a little larger or smaller, in another way for each draw but the 0th."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    # A generator of its own: every result begins with the same random numbers.
    generator = seeds.generator(draw, kept[0].device)
    with torch.no_grad():
        for parameter in model.parameters() if draw else ():
            drawn = torch.rand(parameter.shape, generator=generator, device=parameter.device)
            parameter.mul_(1 + CHANGE * (2 * drawn - 1))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), kept, strict=True):
                parameter.copy_(values)


class Draw(NamedTuple):
    """What each model gives, through which paths, and in float64 torch's."""

    results: dict[str, Results]
    paths: dict[str, dict[str, int]]
    truth: Results


def computed(family: Family, models: dict[str, nn.Module], inputs: Inputs) -> Draw:
    """One draw, for the parameters as they are now."""
    results, paths = {}, {}
    for name, model in models.items():
        with switched(AUTO_SWITCHES), decisions() as taken:
            results[name] = family.results(model, inputs)
        paths[name] = dict(taken)
    return Draw(results, paths, family.truth(copy.deepcopy(models[TORCH]).double(), inputs))


def checked(family: Family, models: dict[str, nn.Module], inputs: Inputs) -> tuple[dict[str, Row], list[str]]:
    """For each model what it computes and through which path, against float64; and the parameters with gradients."""
    draws = []
    for count in range(DRAWS):
        with changed(models[TORCH], count):
            draws.append(computed(family, models, inputs))
    truth = stacked([draw.truth for draw in draws])
    results = {name: stacked([draw.results[name] for draw in draws]) for name in models}
    red = {name: judged(results[name], results[TORCH], truth) for name in models}
    entries: dict[str, Row] = {}
    for name, paths in draws[0].paths.items():
        logits, gradients = (worst_error(results[name], truth, gradients) for gradients in (False, True))
        entries[name] = {"paths": paths, "logits_error": logits, "gradients_error": gradients}
    trained = [name for name, _ in models[TORCH].named_parameters() if results[TORCH][f"d{name}"] is not None]
    count = DRAWS
    while any(red.values()) and count < MOST_DRAWS:
        suspects = {name for names in red.values() for name in names}
        suspected = {name: model for name, model in models.items() if name == TORCH or red[name]}
        with changed(models[TORCH], count):
            draw = computed(family, suspected, inputs)
        truth = with_draw(truth, draw.truth, suspects)
        for name, more in draw.results.items():
            results[name] = with_draw(results[name], more, suspects)
        count += 1
        for name, faults in red.items():
            if faults:
                red[name] = judged(
                    *({key: each[key] for key in faults} for each in (results[name], results[TORCH], truth))
                )
    for name, entry in entries.items():
        entry |= {"draws": count, "red": list(red[name].values())}
    models[TORCH].zero_grad()
    return entries, trained


def with_draw(found: Results, more: Results, names: Collection[str]) -> Results:
    """Those results with another draw; the others are not needed any more."""
    added = stacked([{name: more[name] for name in names}])
    both = {name: (found[name], added[name]) for name in names}
    return {name: None if a is None or b is None else torch.cat((a, b)) for name, (a, b) in both.items()}


def times(contenders: list[Contender], work: Work, seconds: float) -> dict[str, Row]:
    """Time and memory of every contender, or why there are none."""
    entries: dict[str, Row] = {}
    found = measure(contenders, work, seconds=seconds)
    for contender, timing in zip(contenders, found.values(), strict=True):
        if isinstance(timing, NotTimed):
            entries[contender.name] = {"reason": timing.reason}
            continue
        entries[contender.name] = {
            "launched": asdict(timing.launched),
            "host_bound": timing.host_bound,
            "saved_bytes": saved_bytes(contender, work, frozenset(work.inputs)),
            "peak_bytes": peak_bytes(contender, work),
        }
    return entries


def row(name: str, family: Family, chosen: argparse.Namespace) -> Row:
    """One row of the record."""
    torch.manual_seed(0)
    plain = family.build() if chosen.small else family.build_published(chosen.device)
    models = variants(plain.to(torch.bfloat16).eval())
    ffn = fl.replace(copy.deepcopy(plain), dry_run=True).replaced[0].reason.partition(": ")[2]
    tokens = WIDE_TOKENS if int(ffn.rpartition(" ")[2]) >= WIDE else chosen.tokens
    inputs = on(chosen.device, family.inputs() if chosen.small else family.published_inputs(tokens), torch.bfloat16)
    entries, trained = checked(family, models, inputs)

    def loss(model: nn.Module, **_: Tensor) -> Tensor:
        return family.run(model, inputs)[1]

    kinds = [kind for kind, entry in entries.items() if not entry["red"]]
    # transformers builds an attention mask inside a capture that it does without elsewhere: another step.
    timed = [Contender(kind, partial(loss, models[kind]), AUTO_SWITCHES, recorded=False) for kind in kinds]
    parameters = dict(plain.named_parameters())
    upstream = torch.ones_like(loss(plain))
    work = Work({name: parameters[name] for name in trained}, (upstream,), backward=True)
    for kind, entry in times(timed, work, chosen.seconds).items():
        entries[kind] = entries.get(kind, {}) | entry
    shapes = {key: list(tensor.shape) for key, tensor in inputs.items()}
    return {"family": name, "ffn": ffn, "shapes": shapes, "contenders": entries}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=65_536, help=f"about so many for models below width {WIDE}")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing for each family, at least")
    parser.add_argument("--commit", help="of the sources, where they are no git clone")
    parser.add_argument("--update", action="store_true", help="keep what the output holds of other families")
    parser.add_argument("--small", action="store_true", help="the small models of the tests: to try this script")
    return parser.parse_args(words)


def kept_rows(older: records.Record, record: records.Record, measured: Sequence[str]) -> list[Row]:
    """The rows of an older record that are not measured anew, each with its commit.

    Raises:
        ValueError: the older record has another device or other versions.
    """
    check_alike(older, record, "versions", "device")
    return [{"commit": older["commit"]} | row for row in older["rows"] if row["family"] not in measured]


def main() -> int:
    """Measure the chosen families, and write the record after each of them."""
    chosen = arguments()
    logging.disable(logging.WARNING)
    method = {"seconds_per_row": chosen.seconds, "dtype": "bfloat16", "small": chosen.small}
    record = records.new_record(sys.argv[1:], torch.device(chosen.device), method, chosen.commit)
    if chosen.update:
        record["rows"] += kept_rows(records.read(chosen.output), record, chosen.families)
    failed = False
    for name in chosen.families:
        start = time.perf_counter()
        # Models hold themselves in cycles: what is left of the last one must not count for this one.
        gc.collect()
        torch.cuda.empty_cache()
        try:
            found = row(name, FAMILIES[name], chosen)
        except Exception as error:  # the other families are measured nevertheless, and the exit status tells
            failed = True
            print(f"{name}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
            continue
        red = [f"{kind}: {line}" for kind, entry in found["contenders"].items() for line in entry.get("red", ())]
        failed = failed or bool(red)
        print(f"{name} ({time.perf_counter() - start:.1f} s)", *_lines(found), *red, sep="; ", flush=True)
        record["rows"].append(found)
        records.write(record, chosen.output)
    records.finish(record, chosen.output)
    return 1 if failed else 0


def _lines(found: Row) -> list[str]:
    """Milliseconds of every contender, or why there are none."""
    return [
        f"{kind} {1e3 * entry['launched']['median']:.2f} ms" if "launched" in entry else f"{kind} {entry.get('reason')}"
        for kind, entry in found["contenders"].items()
    ]


if __name__ == "__main__":
    sys.exit(main())
