"""The longest sequence that each kind of layers trains within a given memory, on a GPU.

    python -m train_examples.longest_sequence model=small --gibibytes 24

One sequence per batch, bfloat16 autocast, and whole training steps: forward, loss, backward, clipping, AdamW. Tokens
are random, because their values do not matter.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from torch import nn

from fusedlayers.folders import check_folder
from train_examples.command import CONFIGS, hydra_message
from train_examples.language_model import build_model, next_token_loss
from train_examples.loop import Row, build_optimizer, environment
from train_examples.settings import LanguageModelSettings, as_settings
from train_examples.tables import aligned

CONTENDERS = {
    "torch": ("layers=torch",),
    "fused": ("layers=fused",),
    "fused, recompute": ("layers=fused", "layers.recompute=true"),
}
# Bytes per float32 parameter before a step begins: itself and AdamW's two averages.
BYTES_OF_A_PARAMETER = 12


# The number of lengths guessed from the memory of earlier tries, before the search doubles and halves.
GUESSES = 4


def longest(fits: Callable[[int], bool], multiple: int, first: int, guess: Callable[[int], int] | None = None) -> int:
    """The largest multiple of ``multiple`` that fits, or 0; assumes that anything shorter than a length that fits also
    fits.

    ``guess`` estimates it from a length that fits: that estimate, or the next length, is tried. Otherwise the search
    doubles ``first`` until it does not fit, then halves the gap; no length is tried twice.
    """
    fitting, failing, tries = 0, None, 0
    candidate = first
    while failing is None or failing - fitting > multiple:
        tries += 1
        if fits(candidate):
            fitting = candidate
        else:
            failing = candidate
        if fitting and guess is not None and tries <= GUESSES:
            candidate = max(guess(fitting) // multiple * multiple, fitting + multiple)
            candidate = candidate if failing is None else min(candidate, failing - multiple)
        else:
            candidate = 2 * fitting if failing is None else (fitting + failing) // (2 * multiple) * multiple
    return fitting


def train_step(settings: LanguageModelSettings, length: int, compiled: bool, device: torch.device) -> Row:
    """Train one step on a sequence of ``length`` tokens, and time it.

    Raises:
        torch.OutOfMemoryError: the device has too little memory for it.
    """
    with device:
        shape, classes = dataclasses.replace(settings.model, context=length), settings.vocabulary.size
        model = build_model(shape, settings.layers, classes, settings.loss)
        window = torch.randint(classes, (1, length + 1))
    if compiled:
        model.compile()
    optimizer = build_optimizer(model, settings.optim, "bf16-mixed")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    # Adam allocates its averages in the first update; later steps have them already.
    optimizer.step()
    optimizer.zero_grad()
    # The first step of a compiled model includes compilation.
    for _ in range(2 if compiled else 1):
        synchronize(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = next_token_loss(model, (window,))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
    seconds = time.perf_counter() - start
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"length": length, "seconds": seconds, "parameters": parameters}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def longest_step(settings: LanguageModelSettings, multiple: int, first: int, compiled: bool, limit: int) -> Row:
    """The step with the longest sequence that fits into ``limit`` bytes, its memory, and the number of lengths
    tried."""
    steps: dict[int, Row] = {}

    def fits(length: int) -> bool:
        # Free everything of the previous try: reference cycles, and cached blocks of other sizes.
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        steps[length] = {"length": 0}
        try:
            step = train_step(settings, length, compiled, torch.device("cuda"))
        except torch.OutOfMemoryError:
            return False
        peak = torch.cuda.max_memory_allocated()
        per_token = (peak - BYTES_OF_A_PARAMETER * step["parameters"]) / length
        steps[length] = {**step, "peak_bytes": peak, "bytes_per_token": per_token}
        return True

    def guess(length: int) -> int:
        step = steps[length]
        return int((limit - BYTES_OF_A_PARAMETER * step["parameters"]) / step["bytes_per_token"])

    found = longest(fits, multiple, first, guess)
    return {**steps.get(found, {"length": 0}), "tries": len(steps)}


def table(contenders: dict[str, Row]) -> str:
    """The lengths, and the time and memory of a step at them, as aligned text."""
    cells = [("", "longest sequence", "to torch", "step, s", "tokens/s", "bytes a token")]
    base = contenders["torch"]["length"]
    for name, step in contenders.items():
        length = step["length"]
        if not length:
            cells.append((name, "none", "", "", "", ""))
            continue
        ratio = f"{length / base:.2f}" if base else ""
        seconds = step["seconds"]
        speed = f"{length / seconds:,.0f}"
        cells.append((name, f"{length:,}", ratio, f"{seconds:.3f}", speed, f"{step['bytes_per_token']:,.0f}"))
    return aligned(cells)


def compose_settings(overrides: Sequence[str]) -> dict[str, LanguageModelSettings]:
    """The settings of every contender, ``model=small`` and what the overrides change."""
    found = {}
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        for name, kind in CONTENDERS.items():
            config = compose("language_model", ["model=small", *overrides, *kind])
            found[name] = as_settings(config, LanguageModelSettings)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: search, print, and write the record."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m train_examples.longest_sequence", description=description)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the language model, e.g. model=narrow")
    parser.add_argument("--gibibytes", type=float, default=24, help="what tensors may take of the GPU's memory")
    parser.add_argument("--multiple", type=int, default=1024, help="lengths are multiples of it")
    parser.add_argument("--first", type=int, default=8192, help="the length that is tried first")
    parser.add_argument("--compile", action="store_true", help="compiled models too; every length is compiled anew")
    parser.add_argument("--output", type=Path, default=Path("runs/longest_sequence.json"), metavar="JSON")
    chosen = parser.parse_args(arguments)
    if chosen.multiple < 1 or chosen.first < 1 or chosen.first % chosen.multiple:
        parser.error(f"--first is {chosen.first}; expected a positive multiple of --multiple={chosen.multiple}")
    try:
        contenders = compose_settings(chosen.overrides)
    except (HydraException, ValueError) as error:
        parser.error(hydra_message(error, chosen.overrides))
    try:
        check_folder(chosen.output.parent)
    except ValueError as error:
        parser.error(f"argument --output: {error}")
    if not torch.cuda.is_available():
        raise SystemExit("error: there is no CUDA device; expected a GPU, whose memory can be limited and measured")
    memory = torch.cuda.get_device_properties().total_memory
    if not 0 < chosen.gibibytes * 2**30 <= memory:
        parser.error(f"--gibibytes is {chosen.gibibytes}; expected more than 0 and at most {memory / 2**30:.0f}")
    limit = round(chosen.gibibytes * 2**30)
    torch.cuda.set_per_process_memory_fraction(limit / memory)

    found = {}
    for compiled in (False, True) if chosen.compile else (False,):
        for name, settings in contenders.items():
            label = f"{name}, compiled" if compiled else name
            found[label] = longest_step(settings, chosen.multiple, chosen.first, compiled, limit)
            print(f"{label}: {found[label]['length']:,} tokens, {found[label]['tries']} lengths tried", flush=True)
    record = {
        "device": torch.cuda.get_device_name(),
        **environment(),
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "model": contenders["torch"].model.name,
        "overrides": list(chosen.overrides),
        "memory_limit_bytes": limit,
        "multiple": chosen.multiple,
        "contenders": found,
    }
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nmodel={record['model']}, one sequence, {chosen.gibibytes:g} GiB of {record['device']}:")
    print(table(found))
    print(f"record: {chosen.output.absolute()}")


if __name__ == "__main__":
    main()
