"""The command line of every example: check it, print it, run it, and report errors in one line."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig

from fusedlayers.folders import check_folder
from fusedlayers.functional import switches
from train_examples.checkpoints import find_checkpoint, newest, read_checkpoint
from train_examples.rules import SettingsError
from train_examples.settings import RunSettings, Settings, as_settings

CONFIGS = str(Path(__file__).parents[1] / "configs")
# The beginning of Hydra's ValueError for a group whose value is a number, a bool or null; it does not name the group.
NO_WORD = "Config group override must be"
# The exit status that shells report after Ctrl-C.
INTERRUPTED = 130
# The environment variable in which make names the command that continues its runs.
RESUME_COMMAND = "RESUME_COMMAND"


def in_one_line(main: Callable[[], None]) -> Callable[[], None]:
    """Wraps the entry point that Hydra made, to print Hydra's own errors in one line.

    Hydra prints them over several lines, unless HYDRA_FULL_ERROR asks for the traceback; then this changes nothing.
    """

    @functools.wraps(main)
    def entry_point() -> None:
        if "HYDRA_FULL_ERROR" in os.environ:
            return main()
        # This makes Hydra raise its errors.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            main()
        except (HydraException, ValueError) as error:
            if not isinstance(error, HydraException) and not str(error).startswith(NO_WORD):
                raise
            print(f"error: {hydra_message(error, sys.argv[1:])}", file=sys.stderr)
            raise SystemExit(1) from None
        finally:
            del os.environ["HYDRA_FULL_ERROR"]

    return entry_point


def hydra_message(error: Exception, words: Sequence[str]) -> str:
    """The error of Hydra, or of OmegaConf behind it, for the words of a command line, in one line."""
    if str(error).startswith(NO_WORD):
        return "; ".join(groups_without_a_word([word for word in words if not word.startswith("-")]))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group} is {name!r}; expected one of {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {first_line(error)}"
    # The cause names the value or the key.
    return "; ".join(first_line(one) for one in (error, error.__cause__) if one is not None)


def groups_without_a_word(words: Sequence[str]) -> Iterator[str]:
    """The groups of settings whose value is, say, a number instead of the name of one of their files."""
    for override in OverridesParser.create().parse_overrides(list(words)):
        folder = Path(CONFIGS, override.key_or_group)
        if folder.is_dir() and not isinstance(override.value(), str | list):
            known = ", ".join(sorted(path.stem for path in folder.iterdir()))
            yield f"{override.key_or_group} is {override.get_value_string()}; expected one of {known}"


def first_line(error: BaseException) -> str:
    """The first line of an error, above the classes and paths that were searched."""
    return str(error).partition("\n")[0].rstrip(".")


class Messages(logging.Handler):
    """Prints the library's messages to the current standard error: a progress bar replaces it while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.name}: {record.getMessage()}", file=sys.stderr)


def checked_settings(config: DictConfig, schema: type[Settings]) -> Settings:
    """The checked settings of a configuration whose keys Hydra has checked; also checks the environment. A mistake ends
    the command with one line."""
    try:
        settings = as_settings(config, schema)
        check_surroundings(settings.run)
        return settings
    except SettingsError as error:
        raise SystemExit(f"error: {error}") from error


def start(config: DictConfig, schema: type[Settings], run: Callable[[Settings], object]) -> None:
    """Run the example that a configuration describes; Hydra has checked its keys."""
    with ExitStack() as stack:
        first = not int(os.environ.get("RANK") or "0")
        if first:
            # The library logs in one line which path its layers take on this machine, and why.
            logging.basicConfig(handlers=[Messages()])
            logging.getLogger("fusedlayers").setLevel(logging.INFO)
        else:
            # Only the first of torchrun's processes prints.
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        settings = checked_settings(config, schema)
        try:
            run(settings)
        except (SettingsError, FloatingPointError) as error:
            raise SystemExit(f"error: {error}") from error
        except KeyboardInterrupt:
            if first:
                print(f"\n{after_an_interruption(settings.run)}", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None


def check_surroundings(run: RunSettings) -> None:
    """Check what a run depends on besides its settings: the library's switches, its folder, and its checkpoint to
    resume from.

    Raises:
        SettingsError: one of them cannot work; raised before anything is read or built.
    """
    try:
        for switch in (switches.backend, switches.strict, switches.workspace_limit):
            switch()
    except ValueError as error:
        raise SettingsError(str(error)) from error
    directory = Path(run.directory)
    try:
        check_folder(directory)
    except ValueError as error:
        raise SettingsError(f"run.directory is {error}") from error
    checkpoint = find_checkpoint(run, directory)
    if checkpoint is not None:
        read_checkpoint(checkpoint)


def after_an_interruption(run: RunSettings) -> str:
    """How to continue a run after Ctrl-C, in one line."""
    kept, command = newest(Path(run.directory)), os.environ.get(RESUME_COMMAND)
    if kept is not None:
        how = command or "the same command with run.resume=auto"
        return f"interrupted; {how} goes on from the last checkpoint, {kept}"
    how = f"{command} keeps the runs that are finished, and" if command else "the same command"
    return f"interrupted before the first checkpoint; {how} starts over"
