"""Words of the command line that several commands share, and how their tables are shown."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from ..folders import check_folder
from .cases import DTYPES, Shape
from .tables import Table


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


def show(table: Table) -> None:
    """Through rich where it is installed, in plain columns otherwise."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(table.plain())
        return
    shown = RichTable(title=table.title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        shown.add_column(column, no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    console = Console()
    # Written to a file or a pipe, rich would cut the table to 80 columns.
    console.print(shown) if console.is_terminal else print(table.plain())
