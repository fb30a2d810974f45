"""Who runs a case: plain torch, compiled torch, our planner's choice, and our kernels by force."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import planning
from ..devices import describe
from ..planning import Plan
from .cases import Case, Inputs, Options, Results, as_tuple

EAGER, COMPILED, AUTO, FUSED = "torch eager", "torch.compile", "auto", "fused"
# Only for those who ask: tuning takes about ten seconds a product, and checkpoints are for layers that keep something.
AUTOTUNED, CHECKPOINTED = "max-autotune", "checkpoint"
# Others' versions of the same, of cases that have any, where they are installed.
FUNCTION, LIGER, CCE, QUACK = "torch function", "Liger", "CCE", "quack"
PEERS = (FUNCTION, LIGER, CCE, QUACK)
# Whose version a record states beside theirs.
DISTRIBUTIONS = {LIGER: "liger_kernel", CCE: "cut-cross-entropy", QUACK: "quack-kernels"}
# What a machine without them needs.
INSTALLED_BY = {
    FUNCTION: "pip install --upgrade torch",
    LIGER: "pip install liger-kernel",
    CCE: "pip install cut-cross-entropy",
    QUACK: "pip install quack-kernels",
}
ON_REQUEST = (AUTOTUNED, CHECKPOINTED, *PEERS)
TORCH_CONTENDERS = (EAGER, COMPILED, AUTOTUNED, CHECKPOINTED)

# What the user has set must not decide what is measured: each contender sets both.
AUTO_SWITCHES = {"FUSEDLAYERS_BACKEND": "auto", "FUSEDLAYERS_STRICT": "0"}
FUSED_SWITCHES = {"FUSEDLAYERS_BACKEND": "triton", "FUSEDLAYERS_STRICT": "0"}


@dataclass(frozen=True)
class Contender:
    """``call`` takes the inputs of the case by name; ``switches`` are environment variables that hold meanwhile.

    ``saves``: what is kept for a backward pass is what autograd saves, and can be counted. ``recorded``: it is timed
    inside a CUDA graph, too.
    """

    name: str
    call: Callable[..., Results]
    switches: Mapping[str, str] = field(default_factory=dict)
    saves: bool = True
    recorded: bool = True


@dataclass(frozen=True)
class Work:
    """What a contender does once: the forward pass without a graph, or forward and backward with all gradients.

    Inputs that are no real numbers have none, nor have those that are ``frozen``. ``upstream`` holds a gradient of
    each result. ``rotation`` is the same with other tensors, to be done behind it: together they do not fit the L2
    cache, so that work of a few microseconds reads its inputs from memory.
    """

    inputs: Inputs
    upstream: tuple[Tensor, ...]
    backward: bool
    rotation: tuple[Work, ...] = ()
    frozen: frozenset[str] = frozenset()

    @property
    def device(self) -> torch.device:
        """Where all of it lies."""
        return self.upstream[0].device

    @property
    def leaves(self) -> Inputs:
        """The inputs that have a gradient, by name."""
        return {
            name: tensor
            for name, tensor in self.inputs.items()
            if tensor.is_floating_point() and name not in self.frozen
        }

    @property
    def count(self) -> int:
        """How many times the work is done by :meth:`run_all`."""
        return 1 + len(self.rotation)

    def run_all(self, call: Callable[..., Results]) -> None:
        """The work, and its rotation behind it."""
        for work in (self, *self.rotation):
            work.run(call)

    def run(self, call: Callable[..., Results]) -> tuple[Tensor, ...]:
        """The results, and with ``backward`` the gradient of each leaf in order."""
        results = self.forward(call)
        return (*results, *self.gradients(results))

    def forward(self, call: Callable[..., Results]) -> tuple[Tensor, ...]:
        """The results alone, with a graph if ``backward``."""
        with torch.set_grad_enabled(self.backward):
            return as_tuple(call(**self.inputs))

    def gradients(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """With ``backward`` the gradient of each leaf in order."""
        return torch.autograd.grad(results, tuple(self.leaves.values()), self.upstream) if self.backward else ()


def contender(name: str, case: Case, options: Options) -> Contender:
    """The contender of that name for a case and its options.

    Raises:
        ImportError: it is another library's, which is not installed, or has not what the case needs.
        KeyError: the case has no such peer with these options.
    """
    if name in PEERS:
        return Contender(name, case.peer(name, options), recorded=False)
    if name in TORCH_CONTENDERS:
        keywords = case.keywords(options)

        def expression(**inputs: Tensor) -> Results:
            return case.torch_expression(**inputs, **keywords)

        if name == EAGER:
            return Contender(name, expression)
        if name == CHECKPOINTED:
            # The forward pass keeps its inputs alone, and the backward pass repeats it; what is drawn is not restored.
            return Contender(name, partial(_checkpointed, expression), saves=False)
        # Static shapes and one graph: what is fastest for torch. Whether it is recorded, too, is decided by the timing.
        mode = "max-autotune-no-cudagraphs" if name == AUTOTUNED else None
        return Contender(name, torch.compile(expression, dynamic=False, fullgraph=True, mode=mode))
    our_keywords = case.our_keywords(options)
    switches = AUTO_SWITCHES if name == AUTO else FUSED_SWITCHES
    return Contender(name, lambda **inputs: case.ours(**inputs, **our_keywords), switches)


def missing_peers(names: Collection[str], calls: Iterable[tuple[Case, Options]]) -> list[str]:
    """One line for each call that a named peer has no version of; peers that have some can run all of these.

    Raises:
        ValueError: a peer cannot be imported, or has no version of any of these calls; the message says what to do.
    """
    calls, lines = list(calls), list[str]()
    for name in (name for name in PEERS if name in names):
        without = []
        for case, options in calls:
            try:
                case.peer(name, options)
            except ImportError as error:
                raise ValueError(
                    f"{name} cannot run here ({error}): {INSTALLED_BY[name]}".replace("\n", " ")
                ) from error
            except KeyError:
                without.append(f"{name} has no version of {case.name} with these options")
        if len(without) == len(calls):
            raise ValueError(without[0])
        lines += dict.fromkeys(without)
    return lines


def _checkpointed(expression: Callable[..., Results], **inputs: Tensor) -> Results:
    return checkpoint(partial(expression, **inputs), use_reentrant=False, preserve_rng_state=False)


def our_plan(case: Case, options: Options, work: Work, captured: bool = False, backend: str = "auto") -> Plan:
    """What auto mode plans for this work, launched or captured; or another backend.

    Its ``unsupported`` says why the kernels cannot be forced.
    """
    with torch.set_grad_enabled(work.backward):
        problem = replace(case.problem(work.inputs, options), captured=captured)
    return planning.plan(problem, describe(work.device), backend)


def why_not_forced(plan: Plan, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the fused kernels cannot be verified here, or None."""
    if plan.unsupported is not None:
        return plan.unsupported
    if device.type == "cpu" and dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly"
    return None
