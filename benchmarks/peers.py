"""Others' versions of our operations, which are timed beside ours on request where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedlayers import reference
from fusedlayers.bench import contenders
from fusedlayers.bench.cases import Case, Options, Results
from fusedlayers.bench.contenders import Contender
from fusedlayers.bench.timing import NotTimed

Version = Callable[..., Results]

# Tokens whose logits the plain chunked version has in memory at once.
_CHUNK = 1024


def _loss_head(module: str, function: str) -> Callable[[], Version]:
    """Imports a function that takes input, linear_weight and target of a loss head in this order."""

    def imported() -> Version:
        found: Version = getattr(importlib.import_module(module), function)
        return lambda input, linear_weight, target: found(input, linear_weight, target)

    return imported


def _torch_loss_head() -> Version:
    """torch's own function, in chunks."""
    from torch.nn import LinearCrossEntropyOptions
    from torch.nn.functional import linear_cross_entropy

    options = LinearCrossEntropyOptions()
    return lambda input, linear_weight, target: linear_cross_entropy(input, linear_weight, target, options=options)


def _trl_scores(*outputs: str) -> Version:
    """(log-probabilities, entropies or None) of TRL's loss head, in the tiles that its trainers use."""
    function = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    columns = importlib.import_module("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE

    def scores(input: Tensor, linear_weight: Tensor, target: Tensor) -> Results:
        log_probs, entropies, *_ = function.apply(
            input, linear_weight, None, target, 1.0, columns, None, 1.0, outputs
        )  # fmt: skip
        return log_probs, entropies

    return scores


def _trl_loss() -> Version:
    scores = _trl_scores()

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
        log_probs = scores(input, linear_weight, target)[0]
        assert log_probs is not None
        return -log_probs.mean()

    return loss


def _loss_in_chunks() -> Version:
    """torch's operations on some tokens at a time, whose logits the backward pass computes again."""

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
        def of_chunk(part: Tensor, classes: Tensor) -> Tensor:
            return reference.linear_cross_entropy(part, linear_weight, classes, reduction="sum")

        parts = zip(input.split(_CHUNK), target.split(_CHUNK), strict=True)
        return torch.stack([checkpoint(of_chunk, *part, use_reentrant=False) for part in parts]).sum() / len(target)

    return loss


def _log_probs_in_chunks() -> Version:
    def log_probs(input: Tensor, linear_weight: Tensor, target: Tensor) -> Results:
        def of_chunk(part: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
            return tuple(reference.linear_log_probs(part, linear_weight, classes, return_entropy=True))

        parts = zip(input.split(_CHUNK), target.split(_CHUNK), strict=True)
        found = [checkpoint(of_chunk, *part, use_reentrant=False) for part in parts]
        return tuple(torch.cat(each) for each in zip(*found, strict=True))

    return log_probs


def _liger_experts() -> Version:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        found: Tensor = LigerFusedMoEFunction.apply(x, w_up, w_down, top_k_index.to(torch.int32), top_k_weights)
        return found

    return experts


@dataclass(frozen=True)
class Peer:
    """A library: how it is installed, by case what imports its version of a published grid, and its distribution."""

    title: str
    installed_by: str
    versions: Mapping[str, Callable[[], Version]]
    distribution: str | None = None  # where a record does not state its version anyway

    def version(self, case: Case) -> Version:
        """Its version of a case.

        Raises:
            ImportError: it is not installed, has not what the case needs, or fails when it is imported.
            KeyError: it has no version of the case.
        """
        make = self.versions[case.name]
        try:
            return make()
        except ImportError:
            raise
        except Exception as error:
            # Beside releases of its libraries that it does not know it may raise anything.
            raise ImportError(f"{self.title} fails when it is imported: {type(error).__name__}: {error}") from error


_HEAD, _LOG_PROBS = "linear_cross_entropy", "linear_log_probs"
# By the words of a command line.
PEERS = {
    "function": Peer("torch function", "pip install --upgrade torch", {_HEAD: _torch_loss_head}),
    "liger": Peer(
        "Liger", "pip install liger-kernel",
        {
            _HEAD: _loss_head("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
            "moe_ffn": _liger_experts,
        },
        "liger_kernel",
    ),
    "cce": Peer(
        "CCE", "pip install cut-cross-entropy", {_HEAD: _loss_head("cut_cross_entropy", "linear_cross_entropy")},
        "cut-cross-entropy",
    ),
    "quack": Peer(
        "quack", "pip install quack-kernels",
        {_HEAD: _loss_head("quack.linear_cross_entropy", "chunked_linear_cross_entropy")}, "quack-kernels",
    ),
    "trl": Peer(
        "TRL", "pip install trl", {_HEAD: _trl_loss, _LOG_PROBS: lambda: _trl_scores("entropy")}, "trl"
    ),
    "chunks": Peer(
        "torch in chunks", "pip install torch", {_HEAD: _loss_in_chunks, _LOG_PROBS: _log_probs_in_chunks}
    ),
}  # fmt: skip
_BY_TITLE = {peer.title: peer for peer in PEERS.values()}


def contender(name: str, case: Case, options: Options) -> Contender | NotTimed:
    """The benchmark's own contender of that name, or a peer, or why that one has no times for this case."""
    if name not in _BY_TITLE:
        return contenders.contender(name, case, options)
    try:
        return Contender(name, _BY_TITLE[name].version(case), recorded=False)
    except ImportError as error:
        return NotTimed(f"not usable here: {error}".splitlines()[0])
    except KeyError:
        return NotTimed(f"{case.name} has no such contender")


def distributions(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the peers among the named contenders, whose versions a record states."""
    peers = (_BY_TITLE[name] for name in names if name in _BY_TITLE)
    return tuple(peer.distribution for peer in peers if peer.distribution is not None)


def check(names: Iterable[str], cases: Iterable[Case]) -> list[str]:
    """One line for each case of which a named peer has no version; every peer can run those of which it has one.

    Raises:
        ValueError: a peer cannot be imported, or has no version of any case; the message says what to do.
    """
    cases, lines = list(cases), list[str]()
    for peer in (_BY_TITLE[name] for name in names if name in _BY_TITLE):
        without = [case for case in cases if case.name not in peer.versions]
        try:
            for case in cases:
                if case not in without:
                    peer.version(case)
        except ImportError as error:
            reason = f"{peer.title} cannot run here ({error}): {peer.installed_by}"
            raise ValueError(f"argument --contenders: {reason}".replace("\n", " ")) from error
        found = [f"{peer.title} has no version of {case.name}" for case in without]
        if len(without) == len(cases):
            raise ValueError(f"argument --contenders: {found[0]}")
        lines += found
    return lines
