"""Words of the command line that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from ..folders import check_folder
from ..functional.switches import backend
from .cases import DTYPES, INITS, Shape
from .contenders import AUTO, AUTOTUNED, CHECKPOINTED, COMPILED, EAGER, FUSED
from .runner import FORWARD, FORWARD_BACKWARD, Settings

CONTENDERS = {
    "eager": EAGER,
    "compile": COMPILED,
    "autotune": AUTOTUNED,
    "checkpoint": CHECKPOINTED,
    "auto": AUTO,
    "fused": FUSED,
}
_DIRECTIONS = {
    "forward": (FORWARD,),
    "forward_backward": (FORWARD_BACKWARD,),
    "both": (FORWARD, FORWARD_BACKWARD),
}
# Zeros run faster than real data and integers are mostly zeros: neither says what a user would see.
_TIMED_INITS = ("normal", "uniform")


def add_device_option(command: argparse.ArgumentParser) -> None:
    """``--device``, for :func:`chosen_device`."""
    command.add_argument("--device", help="default: cuda if there is one, else cpu")


def add_record_options(command: argparse.ArgumentParser) -> None:
    """Where a run is measured, for how long at most, and what becomes of its record."""
    add_device_option(command)
    command.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 without one")
    command.add_argument("--seed", type=seed, default=0, help="of the inputs (default: 0)")
    command.add_argument("--budget", type=positive, help="seconds after which no further row is timed")
    command.add_argument("--output", type=Path, default=Path("outputs/bench"), help="folder (default: outputs/bench)")
    command.add_argument("--commit", help="of the sources, where they are no git clone")


def add_run_options(command: argparse.ArgumentParser, contenders: Mapping[str, str] = CONTENDERS) -> None:
    """The options of :func:`settings_of`; ``contenders`` are the names of contenders by their words."""
    add_record_options(command)
    command.add_argument("--init", choices=INITS, default="normal", help="values of the inputs (default: normal)")
    command.add_argument("--verify", action="store_true", help="verify only; verification also precedes any timing")
    command.add_argument("--time", action="store_true", help="time what was verified")
    command.add_argument("--direction", choices=_DIRECTIONS, default="both", help="what to time (default: both)")
    command.add_argument(
        "--contenders",
        type=lambda text: tuple(contenders[word] for word in several(text, tuple(contenders))),
        metavar="NAME,…",
        help=f"of {','.join(contenders)}; default: eager and auto, on a GPU compile and fused too",
    )
    command.add_argument(
        "--seconds", type=positive, default=1.0, help="timing per row and direction, beside warm-up (default: 1)"
    )


def settings_of(chosen: argparse.Namespace) -> Settings:
    """How to measure, by the options of :func:`add_run_options`.

    Raises:
        ValueError: an option is wrong; the message names it.
    """
    device = chosen_device(chosen)
    # The contenders set the switch themselves; a wrong value in the environment is an error all the same.
    backend()
    if chosen.time and chosen.init not in _TIMED_INITS:
        raise ValueError(f"argument --init: {chosen.init}: --time needs random data: {' or '.join(_TIMED_INITS)}")
    on_gpu = device.type == "cuda"
    return Settings(
        dtype=chosen.dtype or ("bf16" if on_gpu else "fp32"),
        device=device,
        init=chosen.init,
        seed=chosen.seed,
        timed=chosen.time,
        directions=_DIRECTIONS[chosen.direction],
        contenders=chosen.contenders or ((EAGER, COMPILED, AUTO, FUSED) if on_gpu else (EAGER, AUTO)),
        seconds=chosen.seconds,
        budget=chosen.budget,
        commit=chosen.commit,
    )


def parse_shape(text: str, letters: tuple[str, ...], meaning: str) -> Shape:
    """``65536x256x1024``, with x or ×, as numbers.

    Raises:
        argparse.ArgumentTypeError: not as many positive integers as there are letters.
    """
    words = text.replace("×", "x").lower().split("x")
    if len(words) != len(letters) or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected {len(letters)} positive integers {'x'.join(letters)} ({meaning})"
        )
    return tuple(map(int, words))


def positive(text: str) -> float:
    """A number of seconds above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds") from error
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected more than 0 seconds, and not infinitely many")
    return value


def seed(text: str) -> int:
    """A seed that torch takes, and those next to it, which other draws start from.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer") from error
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of 64 bits")
    return value


def several(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The words of ``a,b,c`` in the order of the known ones.

    Raises:
        argparse.ArgumentTypeError: one of them is not known.
    """
    words = text.split(",")
    unknown = [word for word in words if word not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected names out of {','.join(known)}")
    return tuple(word for word in known if word in words)


def chosen_device(chosen: argparse.Namespace) -> torch.device:
    """The device of ``--device``.

    Raises:
        ValueError: there is no such device; the message names the argument.
    """
    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(chosen.device or ("cuda" if has_gpu else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"argument --device: {chosen.device!r}: expected cuda, cuda:N or cpu") from error
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"argument --device: {chosen.device!r}: expected cuda, cuda:N or cpu")
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"argument --device: {chosen.device!r}: there are {torch.cuda.device_count()} CUDA devices"
            )
        device = torch.device("cuda", device.index or 0)
    return device


def record_path(folder: Path, name: str, dtype: str, device: torch.device) -> Path:
    """The file of a record: ``ffn-bf16-nvidia-h200.json``.

    Raises:
        ValueError: the folder cannot be written into; the message names the argument.
    """
    try:
        check_folder(folder)
    except ValueError as error:
        raise ValueError(f"argument --output: {error}") from error
    kind = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return folder / f"{name}-{dtype}-{kind.lower().replace(' ', '-')}.json"
