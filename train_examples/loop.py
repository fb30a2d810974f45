"""The training loop of all examples: batches in; metrics, a loss curve, checkpoints and a sample out.

An example provides its model and a few functions (:class:`Example`); :func:`train` does the rest and is meant to be
read from top to bottom. Lightning Fabric handles device, precision and processes.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fusedlayers
from train_examples import plots
from train_examples.checkpoints import (
    find_checkpoint,
    finished,
    load_checkpoint,
    remove_checkpoints,
    save_checkpoint,
)
from train_examples.memory import with_bytes_kept
from train_examples.parallel import Processes
from train_examples.scores import Scores
from train_examples.settings import OptimSettings, RunSettings

Batch = tuple[Tensor, ...]
Row = dict[str, Any]

# The first steps of a process compile kernels, tune and fill caches: the row that contains them reports no speed, and
# its memory is ignored in comparisons.
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Example:
    """What the loop must know about an example.

    ``loss(model, batch)`` is the mean loss of a batch. ``sample(model)`` returns a text that shows what was learned,
    and numbers for the summary. ``fingerprint`` holds the settings that two runs must share for one to load the other's
    checkpoint. ``scores(model)`` are further metrics for every evaluation, the most important first; ``references`` are
    the scores of baselines, by name, to draw beside them. ``flops_per_token`` is the arithmetic of a training step,
    forward and backward, if the example counts it.
    """

    name: str
    model: nn.Module
    fingerprint: dict[str, Any]
    training_batch: Callable[[torch.Generator], Batch]
    validation_batches: Sequence[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    loss_unit: str
    tokens_per_batch: int
    sample: Callable[[nn.Module], tuple[str, Row]]
    scores: Callable[[nn.Module], Scores] | None = None
    references: Mapping[str, Scores] = field(default_factory=dict)
    flops_per_token: float | None = None


def train(
    example: Example, layers: str, run: RunSettings, optim: OptimSettings, config: str, parallel: str = "none"
) -> Row:
    """Train ``example`` as ``run`` and ``optim`` say, write everything into ``run.directory``, return the summary.

    ``config`` is the text of the whole configuration, stored with the results. Nothing is written before the settings
    and the checkpoint to resume from are checked. ``parallel`` is a kind of :class:`Processes`: all processes call
    this, and the first one writes; a kind other than none needs a loss that is a mean over rows.

    Raises:
        SettingsError: the directory, the checkpoint or ``parallel`` does not fit; the message says why.
        FloatingPointError: the loss is no longer finite.
    """
    directory = Path(run.directory)
    if run.resume == "auto" and (summary := finished(directory, config)) is not None:
        print(f"the run in {directory} is finished after {summary['steps']:,} steps; it stays as it is")
        return summary
    resume_from = find_checkpoint(run, directory)

    precision = choose_precision(run)
    processes = Processes(parallel, run, precision)
    fabric = processes.fabric
    if fabric.device.type == "cuda":
        # The CPU only prepares batches; threads for so little work delay the one that launches kernels.
        torch.set_num_threads(1)
    elif run.threads is not None:
        torch.set_num_threads(run.threads)
    checkpoint = None
    if resume_from is not None:
        checkpoint = load_checkpoint(resume_from, example.name, example.fingerprint, example.model)

    if run.compile:
        # In place: parameters keep their names, so checkpoints fit runs that are not compiled.
        example.model.compile()
    model = fabric.setup_module(example.model)
    # After setup_module, which may replace parameters by shards.
    optimizer: Any = fabric.setup_optimizers(build_optimizer(model, optim, precision))
    batches = torch.Generator().manual_seed(run.seed)
    processes.part_generators(run.seed)
    first_step = 0
    if checkpoint is not None:
        checkpoint.restore(processes, model, optimizer, batches, run.seed)
        first_step = checkpoint.step
        print(f"resumed from {resume_from} at step {first_step}")

    metrics = directory / "metrics.jsonl"
    rows = [row for row in read_metrics(metrics) if row["step"] <= first_step] if checkpoint is not None else []
    # Wait until no process still reads what is changed below.
    fabric.barrier()
    if fabric.is_global_zero:
        if checkpoint is None and metrics.exists():
            print(f"overwriting the earlier run in {directory}")
        directory.mkdir(parents=True, exist_ok=True)
        settings_file = directory / "config.yaml"
        settings_file.write_text(config)
        tokens = f"{run.steps:,} steps of {example.tokens_per_batch:,} tokens"
        print(f"{tokens} on {device_name(fabric.device)}, {precision}, seed {run.seed}; all settings: {settings_file}")
        # A summary marks a run as finished.
        (directory / "summary.json").unlink(missing_ok=True)
        if checkpoint is None:
            # If this run is killed before its first checkpoint, run.resume=auto must not continue the run before it.
            remove_checkpoints(directory)
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    last_step = run.steps if run.stop_after is None else min(run.stop_after, run.steps)

    # On a CPU there is no peak of tensor memory; what is saved for the backward pass can be counted instead.
    kept, counts_kept = None, fabric.device.type == "cpu" and processes.kind == "none" and not run.compile
    written = metrics if fabric.is_global_zero else Path(os.devnull)
    with written.open("a") as metrics_file, reporting(run.steps, first_step) as report:
        loss_sum, timed_steps, start = torch.zeros((), device=fabric.device), 0, time.perf_counter()
        for step in range(first_step + 1, last_step + 1):
            rate = learning_rate(step, run.steps, optim)
            for group in optimizer.param_groups:
                group["lr"] = rate

            forward = partial(example.loss, model, processes.share(example.training_batch(batches)))
            if counts_kept and kept is None:
                loss, kept = with_bytes_kept(model, forward)
            else:
                loss = forward()
            fabric.backward(loss)
            # A non-finite norm shows in the next row's loss; checking it here would stall the GPU at every step.
            norm = fabric.clip_gradients(model, optimizer, max_norm=optim.clip_norm, error_if_nonfinite=False)
            assert norm is not None
            optimizer.step()
            optimizer.zero_grad()

            loss_sum += loss.detach()
            timed_steps += 1
            if step % run.log_every and step != run.steps:
                continue

            train_loss = (
                processes.mean(loss_sum) / timed_steps
            )  # waits for the GPU, so the clock below sees finished work
            seconds = time.perf_counter() - start
            if not math.isfinite(train_loss):
                raise FloatingPointError(f"the loss is {train_loss} at step {step}; try a lower optim.learning_rate")
            evaluate_now = step % run.evaluate_every == 0 or step == run.steps
            warming_up = step - timed_steps < first_step + WARM_UP_STEPS
            row = {
                "step": step,
                "train_loss": train_loss,
                "validation_loss": evaluate(example, model, processes) if evaluate_now else None,
                "scores": measure(example, model) if evaluate_now else None,
                "learning_rate": rate,
                "gradient_norm": (norm.full_tensor() if isinstance(norm, DTensor) else norm).item(),
                "tokens_per_second": None if warming_up else example.tokens_per_batch * timed_steps / seconds,
                "peak_memory_bytes": peak_memory(fabric.device),
                "kept_bytes": kept,
            }
            rows.append(row)
            metrics_file.write(json.dumps(row) + "\n")
            metrics_file.flush()
            report(row)
            if step % run.checkpoint_every == 0 or step == last_step:
                name, fingerprint = example.name, example.fingerprint
                save_checkpoint(processes, directory, name, fingerprint, model, optimizer, batches, step)
            if warming_up and fabric.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(fabric.device)
            loss_sum, timed_steps, start = torch.zeros((), device=fabric.device), 0, time.perf_counter()

    with evaluating(model):
        sample, results = example.sample(model)
    summary = {**summarise(example, layers, run, processes, rows), **results}
    if not fabric.is_global_zero:
        return summary
    title = f"{example.name.replace('_', ' ').capitalize()}, layers={layers}"
    plots.loss_curve(rows, title, example.loss_unit, directory / "loss.png")
    if example.scores is not None:
        plots.score_curves(rows, example.references, title, directory / "scores.png")
    (directory / "sample.txt").write_text(sample)
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\nsample after step {summary['steps']}:\n{sample}\n")
    print(", ".join(in_words(summary)))
    print(f"metrics, config, checkpoint, plots and sample: {directory.absolute()}")
    return summary


def learning_rate(step: int, steps: int, optim: OptimSettings) -> float:
    """Linear warm-up, then half a cosine down to the final fraction (Loshchilov and Hutter 2017)."""
    if step <= optim.warmup_steps:
        return optim.learning_rate * step / optim.warmup_steps
    progress = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return optim.learning_rate * (
        optim.final_learning_rate_fraction + (1 - optim.final_learning_rate_fraction) * cosine
    )


def build_optimizer(model: nn.Module, optim: OptimSettings, precision: Any) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) with weight decay on matrices only, not on biases and norm scales."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # On a GPU in one fused kernel; with float16 that would unscale gradients only after clipping.
    fused = precision != "16-mixed" and all(parameter.is_cuda for parameter in model.parameters())
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=(optim.beta1, optim.beta2), fused=fused or None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients and dropout, and in eager mode: only the training step is compiled."""
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield
    model.train()


def evaluate(example: Example, model: nn.Module, processes: Processes) -> float:
    """Mean loss over the validation batches."""
    with evaluating(model):
        losses = [example.loss(model, processes.share(batch)).float() for batch in example.validation_batches]
    return processes.mean(torch.stack(losses).mean())


def measure(example: Example, model: nn.Module) -> Scores | None:
    """The scores of an example, if it has any."""
    if example.scores is None:
        return None
    with evaluating(model):
        return example.scores(model)


def choose_precision(run: RunSettings) -> Any:
    """``run.precision``; ``auto`` is bf16 mixed precision on a GPU that supports it natively, else float32."""
    if run.precision != "auto":
        return run.precision
    on_gpu = run.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU the peak of tensor memory since the warm-up, on a CPU the peak of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # In KiB on Linux, in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_name(device: torch.device) -> str:
    """The name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def summarise(example: Example, layers: str, run: RunSettings, processes: Processes, rows: list[Row]) -> Row:
    """The numbers of a run for a comparison; the speed is the median over rows, which is robust to disturbed ones."""
    timed = [row for row in rows if row["tokens_per_second"] is not None]
    speeds = [row["tokens_per_second"] for row in timed]
    peaks = [row["peak_memory_bytes"] for row in timed or rows]
    speed = statistics.median(speeds) if speeds else None
    losses = [row["validation_loss"] for row in rows if row["validation_loss"] is not None]
    flops = example.flops_per_token
    fabric = processes.fabric
    on_gpu = fabric.device.type == "cuda"
    return {
        "example": example.name,
        "layers": layers,
        "compiled": run.compile,
        "parallel": processes.kind,
        "processes": fabric.world_size,
        "steps": rows[-1]["step"] if rows else 0,
        "parameters": sum(parameter.numel() for parameter in example.model.parameters()),
        "train_loss": rows[-1]["train_loss"] if rows else None,
        "validation_loss": losses[-1] if losses else None,
        "loss_unit": example.loss_unit,
        "references": example.references,
        "tokens_per_second": speed,
        "model_flops_per_token": flops,
        "model_flops_per_second": None if speed is None or flops is None else speed * flops,
        "peak_memory_bytes": max(peaks, default=peak_memory(fabric.device)),
        "peak_memory_source": "tensors on the GPU" if on_gpu else "resident size of the process",
        "kept_bytes": rows[-1].get("kept_bytes") if rows else None,
        "device": device_name(fabric.device),
        "precision": choose_precision(run),
        **environment(),
        "seed": run.seed,
    }


def environment() -> Row:
    """What determines, besides the settings, which code runs: versions, and the library's switches."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "torch": torch.__version__,
        "triton": triton,
        "fusedlayers": fusedlayers.__version__,
        "FUSEDLAYERS_BACKEND": os.environ.get("FUSEDLAYERS_BACKEND") or "auto",
        "FUSEDLAYERS_WORKSPACE_MIB": os.environ.get("FUSEDLAYERS_WORKSPACE_MIB"),
    }


def in_words(summary: Row) -> Iterator[str]:
    """The parts of the closing line, without what a very short run did not measure."""
    if summary["validation_loss"] is not None:
        yield f"validation loss {summary['validation_loss']:.4f}"
    if summary["tokens_per_second"] is not None:
        yield f"{summary['tokens_per_second']:,.0f} tokens/s"
    yield f"peak memory {summary['peak_memory_bytes'] / 2**20:,.0f} MiB ({summary['peak_memory_source']})"


def read_metrics(path: Path) -> list[Row]:
    """The rows of a ``metrics.jsonl``, or none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def reporting(steps: int, first_step: int) -> Iterator[Callable[[Row], None]]:
    """A function that shows a row: as a progress bar on a terminal, else as a plain line."""
    if not sys.stdout.isatty():
        yield lambda row: print(as_line(row, steps), flush=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as progress:
        task = progress.add_task("warming up", total=steps, completed=first_step)

        def report(row: Row) -> None:
            if row["validation_loss"] is not None:
                progress.console.print(as_line(row, steps), highlight=False)
            progress.update(task, completed=row["step"], description=f"loss {row['train_loss']:.3f}")

        yield report


def as_line(row: Row, steps: int) -> str:
    """One row of the metrics in words."""
    parts = [f"step {row['step']:>{len(str(steps))}}/{steps}", f"train loss {row['train_loss']:.4f}"]
    if row["validation_loss"] is not None:
        parts.append(f"validation loss {row['validation_loss']:.4f}")
    parts += [f"{name.replace('_', ' ')} {value:.3f}" for name, value in (row["scores"] or {}).items()]
    if row["tokens_per_second"] is not None:
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    return ", ".join(parts)
