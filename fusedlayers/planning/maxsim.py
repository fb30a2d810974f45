"""Which path a late-interaction score takes, with which tiles, chunks and splits, and why."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..kernels.tuning import (
    CONSUMER_ROWS,
    GatherConfig,
    OneHotConfig,
    ReduceConfig,
    gather_config,
    one_hot_config,
    one_hot_pipeline,
    reduce_config,
    sm90_reduce_config,
)
from ..kernels.tuning.dtypes import GENERIC
from .call import Call, Decision, Facts, Yields
from .choosing import choose
from .devices import PARTIALS_LIMIT, Device, filling_splits
from .gemm_reduce import reduce_text
from .measured import fitted
from .record import TORCH


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How many splits there are: as many as make so many programs for every SM, none shorter than is worth it."""

    forward_programs: int
    query_gradient_programs: int
    document_gradient_programs: int
    shortest_split: int  # in steps; a shorter one is not worth its partial
    unsplit_share: float  # of the SMs: with a tile for so many, the warp-specialised kernel, which has no splits, runs


SPLIT_RULE = fitted("maxsim", SplitRule)


@dataclass(frozen=True)
class MaxSimProblem(Call):
    """One call: all pairs of queries and documents, and which gradients will be asked for."""

    queries: int
    documents: int
    query_tokens: int  # of all queries together, masked or not
    document_tokens: int  # of all documents together
    K: int
    dtype: str
    query_layout: str = "padded"  # or "masked", or "packed"
    document_layout: str = "padded"
    needs_query_gradient: bool = False
    needs_document_gradient: bool = False

    operation = "maxsim"

    __hash__ = Call.__hash__

    @property
    def training(self) -> bool:
        return self.needs_query_gradient or self.needs_document_gradient

    @property
    def model_flops(self) -> tuple[int, int]:
        product = 2 * self.query_tokens * self.document_tokens * self.K
        return product, product * (self.needs_query_gradient + self.needs_document_gradient)

    @property
    def document_length(self) -> int:
        """Tokens of a document, of packed ones on average."""
        return -(-self.document_tokens // max(self.documents, 1))

    @property
    def kin(self) -> str:
        return "maxsim training" if self.training else "maxsim"

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.queries, self.documents, self.query_tokens, self.document_tokens, self.K

    @property
    def described(self) -> str:
        queries = f"Q={self.queries} ({self.query_tokens} tokens, {self.query_layout})"
        documents = f"D={self.documents} ({self.document_tokens} tokens, {self.document_layout})"
        return f"{queries} {documents} d={self.K}, {self.dtype}, {self.passes}"

    def plan(self, device: Device, backend: str) -> "MaxSimPlan":
        return plan(self, device, backend)


@dataclass(frozen=True, kw_only=True)
class MaxSimPlan(Decision):
    """The path is "fused" or "torch"."""

    yields: ClassVar[Yields] = {
        "forward_tiles": ("y",),
        "query_gradient_tiles": ("dqueries",),
        "document_gradient_tiles": ("ddocuments",),
    }

    forward_tiles: ReduceConfig | None = None
    query_gradient_tiles: GatherConfig | None = None
    document_gradient_tiles: OneHotConfig | None = None
    chunk: int = 0  # documents whose float32 maxima are in memory at once
    splits: int = 1  # of the tokens of each document, in the forward pass
    query_gradient_splits: int = 1  # of the documents
    document_gradient_splits: int = 1  # of the query tokens

    def kernel_facts(self) -> Facts:
        rows = []
        if self.forward_tiles is not None:
            rows.append(("forward tiles", reduce_text(self.forward_tiles, "query tokens", "document tokens")))
            rows.append(("splits", f"{self.splits} ranges of a document's tokens, {self.chunk} documents at a time"))
        if (gather := self.query_gradient_tiles) is not None:
            size = f"{gather.block_p} query tokens × {gather.block_k} columns, {gather.num_warps} warps"
            rows.append(("query gradient", f"{size}, {self.query_gradient_splits} ranges of documents"))
        if (one_hot := self.document_gradient_tiles) is not None:
            size = f"{one_hot.block_l} document tokens × {one_hot.block_k} columns, {one_hot.num_warps} warps"
            rows.append(("document gradient", f"{size}, {self.document_gradient_splits} ranges of query tokens"))
        return rows


def plan(problem: MaxSimProblem, device: Device, backend: str = "auto") -> MaxSimPlan:
    """The path that runs ``problem`` on ``device``."""
    unsupported = problem.why_no_kernels(device)
    choice = choose(problem, device, backend, {"fused": unsupported})
    p, element, by_kernels = problem, problem.element_bytes, choice.path != TORCH
    product = p.model_flops[0]
    choices = p.documents * p.query_tokens
    # The queries' gradient adds up the chosen rows alone; torch multiplies with a matrix that is mostly zeros.
    query_flops = 2 * choices * p.K if by_kernels else product
    flops = product + query_flops * p.needs_query_gradient + product * p.needs_document_gradient
    operand_elements = (p.query_tokens + p.document_tokens) * p.K
    read = operand_elements
    if not by_kernels:
        # Each operand for the gradient of the other.
        read = (p.query_tokens * p.needs_document_gradient + p.document_tokens * p.needs_query_gradient) * p.K
    io_bytes = element * (operand_elements + p.queries * p.documents) * (2 if p.training else 1)
    io_bytes += element * p.K * p.query_tokens * p.needs_query_gradient
    io_bytes += element * p.K * p.document_tokens * p.needs_document_gradient
    return MaxSimPlan.of(
        problem, device, choice, reason="the kernels keep no similarities", flops=flops, bytes=io_bytes,
        saved_bytes=(element * read + (4 if by_kernels else 8) * choices) if p.training else 0,
        unsupported=unsupported, **(_kernels(problem, device) if by_kernels else {}),
    )  # fmt: skip


def _splits(programs: int, wanted: int, steps: int, partial_bytes: int) -> int:
    """As many as make up to ``wanted`` programs; none has so few steps that its partial does not pay."""
    return filling_splits(programs, wanted, -(-steps // SPLIT_RULE.shortest_split), partial_bytes)


def choose_chunk(problem: MaxSimProblem) -> int:
    """Documents at once, so that their float32 maxima stay within the limit."""
    return max(1, min(problem.documents, PARTIALS_LIMIT // (4 * problem.query_tokens)))


def _kernels(problem: MaxSimProblem, device: Device) -> dict[str, Any]:
    """Tiles, chunk, splits and workspace of the kernels."""
    p, sms = problem, device.sms
    facts = (device.architecture, p.format.bits, p.K)
    forward, gather, one_hot = reduce_config(*facts), gather_config(*facts), one_hot_config(*facts)
    chunk = choose_chunk(p)
    maxima = 4 * chunk * p.query_tokens
    rows, steps, programs = forward.block_p, -(-p.document_length // forward.block_r), SPLIT_RULE.forward_programs
    if device.backend_for(p.dtype) != GENERIC:
        costly = p.training or p.document_layout == "masked"
        sm90 = sm90_reduce_config(p.query_tokens, p.document_length, p.K, sms, costly)
        if sm90 is not None:
            forward = replace(forward, sm90=sm90)
            rows, steps, programs = sm90.consumers * CONSUMER_ROWS, p.document_length // sm90.block, 1
    splits = _splits(chunk * -(-p.query_tokens // rows), programs * sms, steps, 2 * maxima)
    workspace = maxima * (1 if splits == 1 else 1 + splits * (2 if p.training else 1))
    options: dict[str, Any] = {"forward_tiles": forward, "chunk": chunk, "splits": splits}
    if p.needs_query_gradient:
        columns, partial = -(-p.K // gather.block_k), 4 * p.query_tokens * p.K
        found = _splits(
            -(-p.query_tokens // gather.block_p) * columns, SPLIT_RULE.query_gradient_programs * sms,
            -(-p.documents // gather.documents), partial,
        )  # fmt: skip
        options |= {"query_gradient_tiles": gather, "query_gradient_splits": found}
        workspace = max(workspace, found * partial if found > 1 else 0)
    if p.needs_document_gradient:
        pipeline = None
        if device.backend_for(p.dtype) != GENERIC and p.document_layout != "packed":
            pipeline = one_hot_pipeline(p.query_tokens, p.document_length, p.K, sms)
        one_hot = replace(one_hot, sm90=pipeline)
        columns, partial = -(-p.K // one_hot.block_k), 4 * p.document_tokens * p.K
        found = _splits(
            p.documents * -(-p.document_length // one_hot.block_l) * columns,
            SPLIT_RULE.document_gradient_programs * sms,
            -(-p.query_tokens // one_hot.block_p), partial,
        )  # fmt: skip
        sm90_tiles = p.documents * -(-p.document_length // (2 * CONSUMER_ROWS))
        if pipeline is not None and sm90_tiles >= SPLIT_RULE.unsplit_share * sms:
            found = 1  # the warp-specialised kernel has no splits
        options |= {"document_gradient_tiles": one_hot, "document_gradient_splits": found}
        workspace = max(workspace, found * partial if found > 1 else 0)
    return options | {"workspace_bytes": workspace}
