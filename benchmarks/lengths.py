"""Peak memory of a training step over the length of its text: torch's layers, Liger-Kernel's and ours.

    python -m benchmarks.lengths                                          Llama, 2048 × 8192, up to 65,536 tokens
    python -m benchmarks.lengths --model qwen2-896 --lengths 2048 8192    another model, other lengths

One text per step, eager, with a fused AdamW whose state exists before the first step. Nothing is timed or checked:
``benchmarks.steps`` does that, with the same contenders. A record has a row for each length; what does not fit into the
memory of the GPU has no peak, but a reason.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from fusedlayers.bench import record as records
from fusedlayers.bench.arguments import add_record_options, record_path
from fusedlayers.bench.cases import DTYPES
from fusedlayers.bench.record import Record
from fusedlayers.bench.tables import NONE, Table
from fusedlayers.functional.switches import switched

from . import attention
from .endings import answered, chosen_gpu
from .plots import draw, figure_class, over_tokens, save
from .step_models import LIGER, NORM, STEP_MODELS, TORCH, StepModel, check_liger, variants
from .step_tables import COLOURS, LABELS, conditions, peak
from .steps import Step, forget

CONTENDERS = (TORCH, LIGER, NORM)
LENGTHS = (4096, 8192, 16384, 32768, 65536)


def build_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=(__doc__ or "").split("\n")[0])
    add_record_options(parser)
    parser.add_argument("--model", choices=tuple(STEP_MODELS), default="llama-2048", help="default: llama-2048")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="TOKENS", help="of the one text")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    return answered(build_parser(), _run, arguments)


def _run(chosen: argparse.Namespace, words: list[str]) -> int:
    device, dtype = chosen_gpu(chosen, "lengths compares peaks of memory"), chosen.dtype or "bf16"
    check_liger(CONTENDERS)
    path = record_path(chosen.output, "lengths", dtype, device)
    method = {"seed": chosen.seed, "attention": attention.NAME}
    record = records.new_record(words, device, method, chosen.commit, ("transformers", "liger_kernel"))
    for length in chosen.lengths:
        record["rows"].append(measured(STEP_MODELS[chosen.model], length, dtype, device, chosen.seed))
        records.write(record, path)
        print(f"{length:,} tokens: done")
    records.finish(record, path)
    print(f"record: {path}")
    print(table(record).plain())
    draw(plot, record, path)
    return 0


def measured(model: StepModel, length: int, dtype: str, device: torch.device, seed: int) -> Record:
    """The row of one length: the model with one text of that length, in the way of every contender."""
    sized = replace(model, sizes=replace(model.sizes, batch=1, length=length))
    torch.manual_seed(seed)
    plain = sized.build(device, DTYPES[dtype])
    inputs = sized.inputs(device, DTYPES[dtype], seed)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5, fused=True)
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    entries = {}
    for name, variant in variants(plain, CONTENDERS).items():
        if variant.model is None:
            entries[name] = records.untimed_entry(variant.reason)
        else:
            entries[name] = _entry(Step(name, "eager", variant, variant.model, inputs, optimizer), device)
    held = [*plain.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return {
        "case": "lengths", "grid": model.name, "title": model.title, "shape": [length], "dtype": dtype,
        "sizes": asdict(sized.sizes), "direction": "eager", "contenders": entries,
        "held_bytes": sum(tensor.numel() * tensor.element_size() for tensor in held),
    }  # fmt: skip


def _entry(step: Step, device: torch.device) -> Record:
    """The peak of two steps beyond the weights and the optimizer's state; None without a GPU, or enough memory."""
    forget(device)
    entry = records.untimed_entry("only its memory was measured")
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with switched(step.switches):
            step.run()
            step.run()
    except torch.OutOfMemoryError:
        step.optimizer.zero_grad(set_to_none=True)
        return entry | {"reason": "it takes more memory than there is"}
    return entry | {"peak_bytes": torch.cuda.max_memory_allocated(device) - before if on_gpu else None}


def table(record: Record) -> Table:
    """One line for each length, a column for each contender."""
    lines = []
    for row in record["rows"]:
        peaks = [peak(row, name) for name in CONTENDERS]
        lines.append((f"{row['shape'][0]:,}", *(NONE if size is None else f"{size / 2**30:.1f}" for size in peaks)))
    title = f"{record['rows'][0]['title']}: most GiB in a training step on one text"
    return Table(title, ("tokens", *(LABELS[name] for name in CONTENDERS)), tuple(lines))


def markdown(record: Record) -> str:
    """The table with its conditions above."""
    measured_on = conditions(record, record["rows"])
    return (
        f"{measured_on}: random weights, six layers, a fused AdamW, eager, one text a step; weights, gradients and the "
        f"optimizer's state included.\n\n{table(record).markdown()}"
    )


def plot(record: Record, path: Path) -> list[Path]:
    """``<path without suffix>.png``: the peaks of all contenders over the length.

    Raises:
        MatplotlibMissingError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    series = {}
    for name in CONTENDERS:
        peaks = {row["shape"][0]: peak(row, name) for row in record["rows"]}
        series[LABELS[name]] = {length: size / 2**30 for length, size in peaks.items() if size is not None}
    over_tokens(axes, series, {LABELS[name]: COLOURS[name] for name in CONTENDERS}, "GiB")
    axes.legend(fontsize="small", frameon=False)
    title = f"{record['rows'][0]['title']}: most memory in a training step on one text, less is better"
    return [save(figure, record, title, path.with_suffix(".png"))]


if __name__ == "__main__":
    sys.exit(main())
