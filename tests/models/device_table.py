"""Print, for each family, what `replace` does to a training step on a GPU: check, then time and memory, in bfloat16.

    python -m tests.models.device_table --families Llama GPT-2 BERT

A model has one layer (or one of each side) with the widths that its library takes by default, and few words, so that
the layer is what is measured. Contenders, interleaved: the model as it is, replaced in auto mode, and replaced with
``recompute=True``. A family whose logits or gradients fail the closeness rule is not timed.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
from collections.abc import Callable

import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.bench.timing import clock_for
from fusedlayers.closeness import compare_all
from tests.models.small import FAMILIES, Family, Inputs

HEADER = "| family | FFN | step, ms: torch / auto / recompute | speed-up: auto, recompute | peak MiB beside the model |"
ROUNDS, DISCARDED = 9, 2


def on(device: str, inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs there, floating ones in that dtype."""
    return {
        name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in inputs.items()
    }


def red_verdicts(family: Family, models: dict[str, nn.Module], inputs: Inputs) -> list[str]:
    """What fails the closeness rule, of every replaced model."""
    truth = family.truth(copy.deepcopy(models["torch"]).double(), inputs)
    theirs = family.results(models["torch"], inputs)
    red = []
    for name in ("auto", "recompute"):
        verdicts = compare_all(family.results(models[name], inputs), theirs, truth)
        red += [f"{name}: {verdict.message}" for verdict in verdicts.values() if not verdict.ok]
    return red


def step(family: Family, model: nn.Module, inputs: Inputs) -> None:
    """Forward and backward, the gradients of the last step thrown away."""
    model.zero_grad(set_to_none=True)
    _, loss = family.run(model, inputs)
    loss.backward()


def peak_mebibytes(run: Callable[[], None], model: nn.Module, device: str) -> float:
    """The most that one step allocates beside what is there before it; NaN where nothing counts it."""
    model.zero_grad(set_to_none=True)
    if device == "cpu":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def row(name: str, family: Family, device: str, batch: int, length: int, published: bool) -> str:
    """One line of the table, or why there is none."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    plain = (family.build_published(device) if published else family.build()).to(dtype).eval()
    models = {"torch": plain, "auto": copy.deepcopy(plain), "recompute": copy.deepcopy(plain)}
    report = fl.replace(models["auto"])
    fl.replace(models["recompute"], recompute=True)
    few = on(device, family.published_inputs(2, 64) if published else family.inputs(), dtype)
    if red := red_verdicts(family, models, few):
        return f"| {name} | not timed: {'; '.join(red)} | | | |"
    inputs = on(device, family.published_inputs(batch, length), dtype) if published else few
    runs = {kind: (lambda model=model: step(family, model, inputs)) for kind, model in models.items()}
    clock = clock_for(torch.device(device))
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for run in runs.values():
        clock.warm_up(run)
    for turn in range(ROUNDS):
        for kind in [*runs][turn % 3 :] + [*runs][: turn % 3]:
            measured = [seconds for seconds, _ in clock.visit(runs[kind])]
            times[kind] += measured if turn >= DISCARDED else []
    medians = {kind: 1e3 * statistics.median(found) for kind, found in times.items()}
    peaks = {kind: peak_mebibytes(runs[kind], models[kind], device) for kind in runs}
    speed_ups = ", ".join(f"{medians['torch'] / medians[kind]:.2f}" for kind in ("auto", "recompute"))
    ffn = report.replaced[0].reason.partition(": ")[2]
    spent, needed = (
        " / ".join(f"{found[kind]:{form}}" for kind in runs) for found, form in ((medians, ".2f"), (peaks, ".0f"))
    )
    return f"| {name} | {ffn} | {spent} | {speed_ups} | {needed} |"


def main() -> None:
    """Print the table for the chosen families."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=16, help="texts, images or sounds (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="the small models of the tests: to try this script")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    print(HEADER)
    print("| --- " * 5 + "|")
    for name in chosen.families:
        line = row(name, FAMILIES[name], chosen.device, chosen.batch, chosen.length, not chosen.small)
        print(line, flush=True)


if __name__ == "__main__":
    main()
