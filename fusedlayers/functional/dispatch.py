"""From tensors to a plan: the problem in numbers, the user's switches, autocast, and one INFO line per decision."""

import functools
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import planning
from ..devices import describe
from ..planning import (
    Call,
    Decision,
    Device,
    HiddenGradientProblem,
    MaxSimProblem,
    Problem,
    WeightGradientProblem,
)
from .arguments import autocast_dtype
from .layouts import portable_operand
from .signatures import PLAIN_TENSORS, input_precision, transformed
from .tracing import TRACED_TENSORS, recorded_later, traced, with_known_sizes

logger = logging.getLogger("fusedlayers")

# Problems whose kernels have run on a device in this process, so that they are compiled for it. Forgetting all of them
# when they become many costs no more than another warm-up.
_warm: set[tuple[Call, torch.device]] = set()
_WARM_LIMIT = 4096

# Calls that were checked and planned before -> their problem, plan, the facts of the device it was planned for, and
# whether graphs are captured on such devices.
_calls: dict[tuple[object, ...] | None, tuple[Any, Any, Device, bool]] = {}
_CALLS_LIMIT = 4096

_NOTHING = nullcontext()

# Who counts the paths that calls take, while somebody does.
_counted: Counter[str] | None = None


def backend() -> str:
    """The user's wish, from ``FUSEDLAYERS_BACKEND``: ``auto`` (default), ``triton`` or ``torch``."""
    value = os.environ.get("FUSEDLAYERS_BACKEND", "auto")
    if value not in planning.BACKENDS:
        raise ValueError(f"FUSEDLAYERS_BACKEND is {value!r}; expected one of {', '.join(planning.BACKENDS)}")
    return value


@contextmanager
def switched(switches: Mapping[str, str]) -> Iterator[None]:
    """The environment variables (``FUSEDLAYERS_BACKEND`` ...) set for a while."""
    before = {name: os.environ.get(name) for name in switches}
    os.environ.update(switches)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def strict() -> bool:
    """Whether ``FUSEDLAYERS_STRICT`` asks for an error where kernels cannot run, instead of torch."""
    value = os.environ.get("FUSEDLAYERS_STRICT", "0")
    if value not in ("0", "1"):
        raise ValueError(f"FUSEDLAYERS_STRICT is {value!r}; expected 0 or 1")
    return value == "1"


def workspace_limit() -> int:
    """Bytes of temporary memory of a call with ``recompute=True``, from ``FUSEDLAYERS_WORKSPACE_MIB`` (default: 64)."""
    value = os.environ.get("FUSEDLAYERS_WORKSPACE_MIB")
    if value is None:
        return planning.WORKSPACE_LIMIT
    try:
        limit = float(value) * 2**20
    except ValueError:
        limit = math.nan
    if not 1 <= limit < math.inf:
        raise ValueError(f"FUSEDLAYERS_WORKSPACE_MIB is {value!r}; expected a positive number of MiB")
    return int(limit)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that products of ``tensor`` run in: autocast's where it applies (never to float64), else its own."""
    own = tensor.dtype
    return own if own is torch.float64 else autocast_dtype(tensor.device) or own


def autocast(tensors: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """The tensors in the dtype products run in; gradients flow back to each in its own dtype."""
    return tuple([tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype) for tensor in tensors])


def rows(tensor: Tensor) -> Tensor:
    """``[*B, M, K]`` as a matrix of rows: a view where the strides allow it, else a copy."""
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def with_leading_dims(matrix: Tensor, tensor: Tensor) -> Tensor:
    """A new matrix of rows ``[rows, N]`` as ``[*B, M, N]``, with the leading dims of ``tensor``, and no view.

    What is a view inside of an autograd Function can never be changed in place: autograd refuses.
    """
    if tensor.dim() == 2:
        return matrix
    return torch.ops.aten._unsafe_view.default(matrix, (*tensor.shape[:-1], matrix.shape[-1]))


def leading_dims(*tensors: Tensor) -> torch.Size:
    """The leading dims ``*batch`` of ``[*batch, rows, columns]`` tensors, which broadcast."""
    first, *others = [tensor.shape[:-2] for tensor in tensors]
    return first if all(each == first for each in others) else torch.broadcast_shapes(first, *others)


def flat_batch(tensor: Tensor, batch: torch.Size) -> Tensor:
    """``[*batch, rows, columns]`` as ``[Z, rows, columns]``, without a copy where one matrix serves every entry."""
    if tensor.dim() == 3 and tensor.shape[:1] == batch:
        return tensor
    if all(size == 1 for size in tensor.shape[:-2]):
        return tensor.reshape(1, *tensor.shape[-2:]).expand(math.prod(batch), -1, -1)
    return tensor.expand(*batch, -1, -1).reshape(-1, *tensor.shape[-2:])


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Operands are cast once, before a Function; nothing inside it, forward or backward, may cast them again."""
    return _NOTHING if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)


def captured(device: torch.device) -> bool:
    """Whether this call is being recorded into a CUDA graph, or compiled to be."""
    if device.type != "cuda":
        return False
    return recorded_later() if traced() else torch.cuda.is_current_stream_capturing()


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of any of these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def subclass_of(*tensors: Tensor | None) -> str:
    """The name of the first tensor subclass among these (DTensor, quantised, ...), or an empty string.

    The tensors of torch.func's transforms are plain by their type alone, and so are those whose memory holds their
    negatives, as the imaginary part of a conjugate does.
    """
    if transformed():
        return "tensor of a torch.func transform, or of forward-mode differentiation"
    plain = (*PLAIN_TENSORS, *TRACED_TENSORS) if traced() else PLAIN_TENSORS
    for tensor in tensors:
        if tensor is not None and type(tensor) not in plain:
            return type(tensor).__name__
        if tensor is not None and tensor.is_neg():
            return "negated view"
    return ""


def recalled(call: tuple[object, ...] | None, device: torch.device) -> tuple[Any, Any] | None:
    """The problem and the plan of a call that was checked and planned before, or None."""
    known = _calls.get(call)
    if known is None:
        return None
    problem, plan, facts, may_capture = known
    # The device is described anew while others of its facts are assumed, or after a self-test.
    if describe(device) is not facts:
        return None
    if may_capture and torch.cuda.is_current_stream_capturing():
        problem = replace(problem, captured=True)
        return problem, dispatch(problem, device)
    if (counter := _counted) is not None:
        _count(counter, plan)
    return problem, plan


def planned(call: tuple[object, ...] | None, problem: Any, device: torch.device) -> tuple[Any, Any]:
    """The problem of a call that is right, and its plan, which is remembered by the call's signature.

    Raises:
        RuntimeError: as :func:`dispatch`.
    """
    plan = dispatch(problem, device)
    if call is not None and not problem.captured:
        if len(_calls) >= _CALLS_LIMIT:
            _calls.clear()
        _calls[call] = problem, plan, describe(device), device.type == "cuda"
    return problem, plan


def ffn_problem(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
    *,
    activation: str,
    dropout_p: float,
    recompute: bool | int | str,
    residual: Tensor | None = None,
) -> Problem:
    """The planning problem of one ``ffn`` call, its leading dims flattened into rows."""
    dtype = compute_dtype(x)
    budget = None if isinstance(recompute, (bool, str)) else recompute
    return Problem(
        operation="ffn",
        batch=1,
        M=math.prod(x.shape[:-1]),
        K=x.shape[-1],
        N=w_up.shape[0],
        O=w_down.shape[0],
        dtype=str(dtype).removeprefix("torch."),
        activation=activation,
        gated=w_gate is not None,
        dropout=dropout_p > 0,
        needs_data_gradient=wants_gradient(x),
        needs_weight_gradient=wants_gradient(w_up, w_down, b_up, w_gate, b_gate),
        recompute=recompute if isinstance(recompute, (bool, str)) else "auto",
        saved_limit=budget,
        workspace_limit=workspace_limit(),
        input_precision=input_precision(x.device, dtype),
        captured=captured(x.device),
        portable=portable_operand(x, w_up, w_down, b_up, w_gate, b_gate),
        subclass=subclass_of(x, w_up, w_down, b_up, b_down, w_gate, b_gate, residual),
    )


def gemm_gemm_problem(a: Tensor, b: Tensor, c: Tensor, *, activation: str) -> Problem:
    """The planning problem of one ``gemm_gemm`` call, its leading dims broadcast and flattened into the batch."""
    dtype = compute_dtype(a)
    return Problem(
        operation="gemm_gemm",
        batch=math.prod(leading_dims(a, b, c)),
        M=a.shape[-2],
        K=a.shape[-1],
        N=b.shape[-1],
        O=c.shape[-1],
        dtype=str(dtype).removeprefix("torch."),
        activation=activation,
        needs_data_gradient=wants_gradient(a),
        needs_weight_gradient=wants_gradient(b, c),
        input_precision=input_precision(a.device, dtype),
        captured=captured(a.device),
        subclass=subclass_of(a, b, c),
    )


def maxsim_problem(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    cu_seqlens_queries: Tensor | None = None,
    cu_seqlens_documents: Tensor | None = None,
) -> MaxSimProblem:
    """The planning problem of one ``maxsim`` call: all tokens of the queries against all tokens of the documents."""
    dtype = compute_dtype(queries)
    extras = (query_mask, document_mask, cu_seqlens_queries, cu_seqlens_documents)
    return MaxSimProblem(
        queries=queries.shape[0] if cu_seqlens_queries is None else cu_seqlens_queries.shape[0] - 1,
        documents=documents.shape[0] if cu_seqlens_documents is None else cu_seqlens_documents.shape[0] - 1,
        query_tokens=math.prod(queries.shape[:-1]),
        document_tokens=math.prod(documents.shape[:-1]),
        K=queries.shape[-1],
        dtype=str(dtype).removeprefix("torch."),
        query_layout=_layout(query_mask, cu_seqlens_queries),
        document_layout=_layout(document_mask, cu_seqlens_documents),
        needs_query_gradient=wants_gradient(queries),
        needs_document_gradient=wants_gradient(documents),
        input_precision=input_precision(queries.device, dtype),
        captured=captured(queries.device),
        subclass=subclass_of(queries, documents, *extras),
    )


def _layout(mask: Tensor | None, cu_seqlens: Tensor | None) -> str:
    return "packed" if cu_seqlens is not None else "padded" if mask is None else "masked"


def hidden_gradient_problem(
    dy: Tensor, w_down: Tensor, z: Tensor, z_gate: Tensor | None = None, *, activation: str, bias: bool = True
) -> HiddenGradientProblem:
    """The planning problem of one ``hidden_gradient`` call, its leading dims flattened into rows."""
    dtype = compute_dtype(dy)
    return HiddenGradientProblem(
        M=math.prod(dy.shape[:-1]),
        N=w_down.shape[1],
        O=w_down.shape[0],
        dtype=str(dtype).removeprefix("torch."),
        activation=activation,
        gated=z_gate is not None,
        bias=bias,
        training=wants_gradient(dy, w_down, z, z_gate),
        input_precision=input_precision(dy.device, dtype),
        captured=captured(dy.device),
        subclass=subclass_of(dy, w_down, z, z_gate),
    )


def weight_gradient_problem(dy: Tensor, x: Tensor, *, bias: bool = True) -> WeightGradientProblem:
    """The planning problem of one ``weight_gradient`` call, its leading dims flattened into rows."""
    dtype = compute_dtype(dy)
    return WeightGradientProblem(
        M=math.prod(dy.shape[:-1]),
        O=dy.shape[-1],
        K=x.shape[-1],
        dtype=str(dtype).removeprefix("torch."),
        bias=bias,
        training=wants_gradient(dy, x),
        input_precision=input_precision(dy.device, dtype),
        captured=captured(dy.device),
        subclass=subclass_of(dy, x),
    )


def dispatch(problem: Any, device: torch.device) -> Any:
    """The plan of ``problem`` on ``device`` under the user's switches.

    Raises:
        RuntimeError: the kernels cannot run, and ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` is set.
    """
    wish, must = backend(), strict()
    reading = traced()
    if reading:
        problem = with_known_sizes(problem)
    # What torch.compile records runs once before that.
    if problem.captured and not (must or reading):
        problem = replace(problem, cold=(replace(problem, captured=False), device) not in _warm)
    plan = _cached_plan(problem, describe(device), wish)
    if plan.unsupported is not None and not problem.empty and (wish == "triton" or (must and wish == "auto")):
        switch = "FUSEDLAYERS_BACKEND=triton" if wish == "triton" else "FUSEDLAYERS_STRICT=1"
        raise RuntimeError(f"{switch} is set, but {problem.operation} cannot run in Triton: {plan.unsupported}")
    if (counter := _counted) is not None:
        _count(counter, plan)
    return plan


def _count(counter: Counter[str], plan: Decision) -> None:
    counter[f"{plan.problem.operation} {plan.path}"] += 1


@contextmanager
def decisions() -> Iterator[Counter[str]]:
    """Counts the calls of each operation and path ("ffn fused") for a while; not for use inside itself."""
    global _counted
    _counted = Counter()
    try:
        yield _counted
    finally:
        _counted = None


def plan_on_path(problem: Any, path: str, device: torch.device) -> Any:
    """The plan of ``problem`` on a path that was chosen before, for other sizes.

    Raises:
        RuntimeError: the path cannot run it.
    """
    # First as the user wishes: the path alone does not say which of several products run in kernels.
    forced = ("triton", "torch") if path in planning.KERNEL_PATHS else ("torch", "triton")
    for wish in (backend(), *forced):
        plan = _cached_plan(problem, describe(device), wish)
        if plan.path == path:
            return plan
    reasons = dict(plan.rejected)
    raise RuntimeError(
        f"{problem.operation} was compiled for its {path} path, which cannot run these sizes: {reasons[path]}"
    )


def ran_as_kernels(problem: Call, device: torch.device) -> None:
    """Remembers that the kernels of this problem ran, those of its backward pass too where it has one.

    Planning it, as ``explain`` does, compiles nothing; neither does tracing a call. A compiled call that torch records
    into a CUDA graph later runs before that, with the problem that was traced.
    """
    if problem.captured and not captured(device):
        problem = replace(problem, captured=False)
    if not (problem.captured or traced()):
        if len(_warm) >= _WARM_LIMIT:
            _warm.clear()
        _warm.add((problem, device))


@functools.lru_cache(maxsize=4096)
def _cached_plan(problem: Any, device: Device, wish: str) -> Any:
    plan: Decision = planning.plan(problem, device, wish)
    reasons = dict(plan.rejected)
    told = planning.KERNEL_PATHS if plan.path == "torch" else ("fused",)
    # Without the numbers of this call, which would make every length a decision of its own; each reason once.
    said = "; ".join(dict.fromkeys(reasons[path].split(":")[0] for path in told if path in reasons))
    _log_once(problem.operation, plan.path, said or plan.reason)
    return plan


@functools.cache
def _log_once(operation: str, path: str, reason: str) -> None:
    logger.info("%s takes the %s path: %s", operation, path, reason)
