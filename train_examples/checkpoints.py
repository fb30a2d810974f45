"""Checkpoints: one file, or with fsdp and tp a folder into which every process writes its shards.

Both hold the same parameters under the same names, so a run can continue from either with any ``parallel`` kind and any
number of processes. Loading a folder unpickles files of torch.distributed.checkpoint: open only those of your own runs.
"""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from train_examples.parallel import Processes
from train_examples.rules import SettingsError
from train_examples.settings import RunSettings

FILE = "checkpoint.pt"
FOLDERS = "checkpoint-*"
# In a folder: REST is everything but the shards. METADATA is written last, so a folder with it is complete.
REST = "rest.pt"
METADATA = ".metadata"
# Settings of a run that do not change what it computes, except for the order of sums.
HOW_TO_START = ("overwrite", "resume", "threads")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read before anything is changed; of a folder, the shards are still to be read."""

    path: Path
    step: int
    generators: dict[str, Any]
    states: dict[str, Any] | None  # of model and optimizer; None: in shards

    def restore(self, processes: Processes, model: Any, optimizer: Any, batches: torch.Generator, seed: int) -> None:
        """Restore Fabric's model and optimizer and all generators to the state of the checkpoint."""
        if self.states is None:
            states = named_states(model, optimizer)
            with warnings.catch_warnings():
                # A single process may read what several wrote.
                warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
                dcp.load(states, checkpoint_id=self.path)
            keep_kernel(optimizer, states["optimizer"])
            set_state_dict(
                model.module,
                optimizer.optimizer,
                model_state_dict=states["model"],
                optim_state_dict=states["optimizer"],
            )
        else:
            keep_kernel(optimizer, self.states["optimizer"])
            if processes.kind in ("fsdp", "tp"):
                set_state_dict(
                    model.module,
                    optimizer.optimizer,
                    model_state_dict=self.states["model"],
                    optim_state_dict=by_name(model.module, optimizer.optimizer, self.states["optimizer"]),
                    options=StateDictOptions(full_state_dict=True),
                )
            else:
                model.load_state_dict(self.states["model"])
                optimizer.load_state_dict(self.states["optimizer"])
        set_generators(processes, self.generators, batches, seed + self.step)


def find_checkpoint(run: RunSettings, directory: Path) -> Path | None:
    """The checkpoint to resume from, or None. A directory that holds another run is refused unless it may be
    overwritten."""
    own = newest(directory)
    chosen = None
    if run.resume == "auto":
        chosen = own
    elif run.resume is not None:
        chosen = Path(run.resume).expanduser()
        if not (chosen.is_file() or (chosen / METADATA).is_file()):
            raise SettingsError(
                f"run.resume is {run.resume!r}: there is no such file; expected a checkpoint.pt or auto, "
                "or a folder checkpoint-… of parallel=fsdp or tp"
            )
    if own is not None and not run.overwrite and (chosen is None or not own.samefile(chosen)):
        raise SettingsError(
            f"run.directory is {run.directory!r}, which already holds a run; "
            "run.resume=auto continues it, run.overwrite=true starts over, another run.directory=… keeps both"
        )
    return chosen


def finished(directory: Path, config: str) -> dict[str, Any] | None:
    """The summary of a finished run in ``directory`` with these settings, or None."""
    summary = directory / "summary.json"
    # A finished run has a summary. Without a checkpoint, a run with other settings could not continue it.
    if not summary.exists() or newest(directory) is None:
        return None
    settings, earlier = OmegaConf.create(config), OmegaConf.load(directory / "config.yaml")
    for each in (settings, earlier):
        for name in HOW_TO_START:
            each.run.pop(name, None)
    return json.loads(summary.read_text()) if settings == earlier else None


def newest(directory: Path) -> Path | None:
    """The checkpoint of a run: its file, or the complete folder with the most steps."""
    folders = [path.parent for path in directory.glob(f"{FOLDERS}/{METADATA}")]
    file = directory / FILE
    return file if file.exists() else max(folders, default=None)


def steps_done(directory: Path) -> int:
    """The number of steps in the checkpoint of a run, 0 without one.

    Raises:
        SettingsError: it is not a checkpoint of these examples.
    """
    own = newest(directory)
    return 0 if own is None else read_checkpoint(own)[0]["step"]


def remove_checkpoints(directory: Path, but: Path | None = None) -> None:
    """Remove the checkpoints of a run, complete or not, except one."""
    for path in (*directory.glob(FOLDERS), directory / FILE):
        if path == but:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def save_checkpoint(
    processes: Processes,
    directory: Path,
    name: str,
    fingerprint: dict[str, Any],
    model: Any,
    optimizer: Any,
    batches: torch.Generator,
    step: int,
) -> None:
    """Write everything that the next step depends on; the previous checkpoint is removed when this one is complete."""
    fabric = processes.fabric
    rest = {"example": name, "fingerprint": fingerprint, "step": step, "generators": get_generators(processes, batches)}
    if processes.kind in ("none", "ddp"):
        path = directory / FILE
        # Fabric replaces the file only when the new one is complete.
        fabric.save(path, {**rest, "model": model, "optimizer": optimizer})
    else:
        path = directory / f"{FOLDERS[:-1]}{step:08d}"
        if fabric.is_global_zero:
            shutil.rmtree(path, ignore_errors=True)  # left by a killed run
            path.mkdir()
            torch.save(rest, path / REST)
        fabric.barrier()
        dcp.save(named_states(model, optimizer), checkpoint_id=path)
    if fabric.is_global_zero:
        remove_checkpoints(directory, but=path)
    fabric.barrier()


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(contents of a checkpoint, without the shards of a folder; metadata of the shards).

    Raises:
        SettingsError: the file or folder is not a checkpoint of these examples.
    """
    sharded = path.is_dir()
    try:
        content = torch.load(path / REST if sharded else path, map_location="cpu", weights_only=True)
        metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata if sharded else {}
    except Exception as error:  # any other file may fail in any way
        # torch's message is long, and suggests executing what is in the file.
        reason = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise SettingsError(
            f"run.resume: {path} cannot be read as a checkpoint; expected one that these examples wrote{reason}"
        ) from error
    expected_keys = {"example", "fingerprint", "step", "generators"} | (set() if sharded else {"model", "optimizer"})
    if not isinstance(content, dict) or expected_keys - content.keys():
        raise SettingsError(f"run.resume: {path} is no checkpoint of these examples; expected {sorted(expected_keys)}")
    return content, metadata


def load_checkpoint(path: Path, name: str, fingerprint: dict[str, Any], model: nn.Module) -> Checkpoint:
    """Read a checkpoint and check that it is one of this example and model, before anything is changed.

    Raises:
        SettingsError: it is not a checkpoint of these examples, or is one of another model; lists the differences.
    """
    sharded = path.is_dir()
    content, metadata = read_checkpoint(path)
    if sharded:
        found = {key: tuple(entry.size) for key, entry in metadata.items() if hasattr(entry, "size")}
        tensors = {key.removeprefix("model."): size for key, size in found.items() if key.startswith("model.")}
    else:
        tensors = shapes(content["model"])
    saved = {"example": content["example"], **content["fingerprint"], **tensors}
    here = {"example": name, **fingerprint, **shapes(model.state_dict())}
    differing = [key for key in {**here, **saved} if saved.get(key) != here.get(key)]
    if differing:
        shown = "; ".join(f"{key} is {saved.get(key)} there and {here.get(key)} here" for key in differing[:8])
        more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise SettingsError(f"run.resume: {path} is a checkpoint of another model: {shown}{more}")
    states = None if sharded else {key: content[key] for key in ("model", "optimizer")}
    return Checkpoint(path, content["step"], content["generators"], states)


def get_generators(processes: Processes, batches: torch.Generator) -> dict[str, Any]:
    """The states of the generators of batches and dropout; of every process, if each has its own dropout."""
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    states: dict[str, Any] = {"batches": batches.get_state(), **own}
    if processes.split_batches and processes.fabric.world_size > 1:
        everyone: list[Any] = [None] * processes.fabric.world_size
        dist.all_gather_object(everyone, own)
        states |= {**everyone[0], "other_processes": everyone[1:]}
    return states


def set_generators(processes: Processes, states: dict[str, Any], batches: torch.Generator, seed: int) -> None:
    """Restore the generators; a process that did not exist then seeds its dropout with ``seed``."""
    batches.set_state(states["batches"])
    rank, others = processes.fabric.global_rank, states.get("other_processes", [])
    if processes.split_batches and rank:
        if len(others) != processes.fabric.world_size - 1:
            processes.part_generators(seed)
            return
        states = others[rank - 1]
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def named_states(model: Any, optimizer: Any) -> dict[str, Any]:
    """The states of Fabric's model and optimizer, keyed by parameter name; shards stay shards."""
    of_model, of_optimizer = get_state_dict(model.module, optimizer.optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def keep_kernel(optimizer: Any, state: dict[str, Any]) -> None:
    """Keep this run's choice of AdamW's ``fused``: it depends on the device, not on the checkpoint."""
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        saved["fused"] = own["fused"]


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer, keyed by parameter names instead of numbers."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[number]: entry for number, entry in state["state"].items()}, "param_groups": groups}


def shapes(state_dict: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state dict, by its key."""
    return {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
