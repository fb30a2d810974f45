"""The feed-forward block with adapters of low rank (LoRA): the public function, and its operation.

With u = s x Aᵀ the adapted product is ``x Wᵀ + u Bᵀ``, and with v = s dz B its gradients are dx = dz W + v A,
dA = vᵀ x and dB = dzᵀ u. u and v have few columns, and so cuBLAS computes them, and the gradients of A and B. What has
the width of the hidden is never written for an adapter: u Bᵀ of the up and gate projections, and v A of the down
projection, join the large product on chip.

Gated, forward and backward, rank 16, frozen weights, µs on an H200: 2,590 at 8192 × 2048 × 8192, where torch.compile
takes 3,342 and the same FFN without adapters 2,185; 8,196, 9,447 and 7,532 at 8192 × 4096 × 14336.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..kernels import gemm_epilogue as kernels
from ..kernels.activations import canonical_activation
from ..kernels.column_sums import column_sums
from ..kernels.gemm_epilogue import LowRank, aligned_columns
from ..kernels.gemm_gemm import Arithmetic
from ..kernels.tuning import COLUMN_SUM_TILES
from ..planning import Plan
from ..planning.lora_ffn import LoRAProblem
from .call import subclass_of, wants_gradient
from .custom_ops import Result, Results
from .ffn.arguments import check_ffn, ffn_problem
from .operands import check_shape, check_tensors, checked_number, rows, said, with_leading_dims
from .operation import Operation, Tensors, formula
from .prepared import Prepared


def lora_ffn(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
    up_a: Tensor | None = None,
    up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    gate_a: Tensor | None = None,
    gate_b: Tensor | None = None,
    *,
    activation: str = "gelu",
    up_scale: float = 1.0,
    down_scale: float = 1.0,
    gate_scale: float = 1.0,
) -> Tensor:
    """Feed-forward block whose linear layers compute ``x Wᵀ + b + scale (x Aᵀ) Bᵀ`` (Hu et al., "LoRA", 2021).

    Otherwise ``act(up(x))``, with ``w_gate`` ``act(gate(x)) ⊙ up(x)``, and then down, as :func:`ffn`. W is not
    changed, and what is added to it never written; x, the pre-activations and ``x Aᵀ`` are kept for the backward pass.

    Args:
        x: ``[*B, M, K]`` or ``[K]``: any leading dims, any strides.
        w_up: ``[N, K]``, ``nn.Linear``'s layout.
        w_down: ``[O, N]``.
        b_up: ``[N]`` or None.
        b_down: ``[O]`` or None.
        w_gate: ``[N, K]`` or None (no gate).
        b_gate: ``[N]`` or None.
        up_a: ``[R, K]`` or None (no adapter); every adapter has a rank R of its own.
        up_b: ``[N, R]``, given with ``up_a``.
        down_a: ``[R, N]`` or None.
        down_b: ``[O, R]``.
        gate_a: ``[R, K]`` or None.
        gate_b: ``[N, R]``.
        activation: a name of ``fusedlayers.kernels.activations.ACTIVATIONS``, or Hugging Face's name of one.
        up_scale: what the adapter's product is multiplied by; so ``down_scale`` and ``gate_scale``.

    Returns:
        ``[*B, M, O]`` in the dtype of x (under autocast: in autocast's dtype). float16, bfloat16 and float32 can run in
        Triton kernels; every floating dtype runs through torch. Everything that requires a gradient has one.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of x.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation, half of an
            adapter, a scale that is not finite.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    return LORA_FFN(
        x, w_up, w_down, b_up, b_down, w_gate, b_gate, up_a, up_b, down_a, down_b, gate_a, gate_b, activation,
        up_scale, down_scale, gate_scale,
    )  # fmt: skip


class _Operands(NamedTuple):
    """The operands, or their gradients, by name."""

    x: Any = None
    w_up: Any = None
    w_down: Any = None
    b_up: Any = None
    b_down: Any = None
    w_gate: Any = None
    b_gate: Any = None
    up_a: Any = None
    up_b: Any = None
    down_a: Any = None
    down_b: Any = None
    gate_a: Any = None
    gate_b: Any = None


class _Details(NamedTuple):
    """What kernels and products are told beside the plan."""

    arithmetic: Arithmetic
    up_scale: float
    down_scale: float
    gate_scale: float


class _LoRAFFN(Operation):
    """The FFN of x ``[*B, M, K]`` with adapters; it keeps inputs, pre-activations and the products with A."""

    problem_type = LoRAProblem
    operands = "x w_up w_down b_up? b_down? w_gate? b_gate? up_a? up_b? down_a? down_b? gate_a? gate_b?"
    row_operands = ("x",)

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        given = _Operands(*tensors)
        activation, *scales = options
        activation = canonical_activation(activation)
        x, w_up, w_down, b_up, b_down, w_gate, b_gate = tensors[:7]
        check_ffn(x, w_up, w_down, b_up, b_down, w_gate, b_gate, 0.0, "auto", None)
        check_tensors({"x": x, **dict(zip(_Operands._fields[7:], tensors[7:], strict=True))})
        (N, K), O = w_up.shape, w_down.shape[0]
        for name, a, b, inner, outer in (
            ("up", given.up_a, given.up_b, K, N),
            ("down", given.down_a, given.down_b, N, O),
            ("gate", given.gate_a, given.gate_b, K, N),
        ):
            _check_adapter(name, a, b, inner, outer)
        if given.gate_a is not None and w_gate is None:
            raise ValueError(f"{said('gate_a', given.gate_a)}: expected None, because w_gate is None")
        names = self.option_names[1:]
        checked = [checked_number(name, each, "a finite number") for name, each in zip(names, scales, strict=True)]
        return activation, *checked

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> LoRAProblem:
        given = _Operands(*tensors)
        plain = ffn_problem(*tensors[:7], activation=options[0], dropout_p=0.0, recompute="auto")
        ranks = [0 if a is None else a.shape[0] for a in (given.up_a, given.gate_a, given.down_a)]
        facts = plain.__getstate__() | {"operation": self.name, "subclass": subclass_of(*tensors)}
        facts["needs_weight_gradient"] = wants_gradient(given.w_up, given.w_down, given.w_gate)
        return LoRAProblem(
            **facts, rank_up=ranks[0], rank_gate=ranks[1], rank_down=ranks[2],
            needs_adapter_gradient=wants_gradient(*tensors[7:]),
        )  # fmt: skip

    def title(self, problem: LoRAProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        given = _Operands(*tensors)

        def product(x: str, name: str, bias: Tensor | None, rank: int) -> str:
            adapter = f" + s ({x} Aᵀ) Bᵀ" if rank else ""
            return f"{x} W_{name}ᵀ{'' if bias is None else f' + b_{name}'}{adapter}"

        hidden = f"act({product('x', 'up', given.b_up, problem.rank_up)})"
        if problem.gated:
            gate = product("x", "gate", given.b_gate, problem.rank_gate)
            hidden = f"act({gate}) ⊙ ({product('x', 'up', given.b_up, problem.rank_up)})"
        y = product("h", "down", given.b_down, problem.rank_down)
        return f"lora_ffn: {y}, h = {hidden}, act = {formula(problem.activation)}"

    def through_torch(self, call: Prepared, tensors: Tensors) -> Tensor:
        return self._expression(tensors, *call.options)

    def extras(self, options: tuple[Any, ...]) -> dict[str, Any]:
        return {"scales": list(options[1:])}

    def details(self, plan: Plan, extras: dict[str, Any]) -> _Details:
        problem = plan.problem
        return _Details(
            Arithmetic(problem.activation, 0.0, problem.input_precision, plan.accuracy), *extras["scales"]
        )  # fmt: skip

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        given, details = _Operands(*operands), call.details
        tiles, arithmetic, keep = call.plan.epilogue, details.arithmetic, any(wanted)
        x = rows(given.x)
        inner = _inner((x, given.up_a, details.up_scale), (x, given.gate_a, details.gate_scale))
        hidden, z, z_gate = kernels.hidden(
            x, given.w_up, given.b_up, given.w_gate, given.b_gate, keep, arithmetic.activation, arithmetic.accuracy,
            arithmetic.input_precision, tiles.hidden_tiles, tiles.hidden_pipeline, ready=call.ready,
            low_rank=_into_hidden(given, inner),
        )  # fmt: skip
        inner_down = None
        if given.down_a is None:
            y = F.linear(hidden, given.w_down, given.b_down)
        else:
            inner_down = _inner((hidden, given.down_a, details.down_scale))
            y = F.linear(inner_down, _aligned(given.down_b, 1), given.b_down)
            y.addmm_(hidden, given.w_down.t())
        made = (z, z_gate, inner, inner_down) if keep else (None,) * 4
        return (with_leading_dims(y, given.x),), made

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        given, want, p = _Operands(*operands), _Operands(*wanted), call.problem
        inner_down = made[3]
        dy = rows(upstream[0])
        found: dict[str, Any] = {}
        if want.b_down:
            found["b_down"] = column_sums(dy, COLUMN_SUM_TILES, call.ready).to(dy.dtype)
        if want.down_b:
            found["down_b"] = dy.t() @ inner_down[:, : p.rank_down]
        if any(getattr(want, name) for name in _Operands._fields if name not in ("b_down", "down_b")):
            d_pre = self._through_hidden(call, given, want, dy, made, found)
            self._through_products(call, given, want, d_pre, made[2], found)
        return _Operands(**found)

    def _through_hidden(
        self,
        call: Prepared,
        given: _Operands,
        want: _Operands,
        dy: Tensor,
        made: Tensors,
        found: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """dz and dz_gate; ``found`` gets their sums, and what follows from the hidden, which is freed again."""
        tiles, details = call.plan.epilogue.gradient, call.details
        z, z_gate, *_ = made
        low_rank: LowRank | None = None
        v: Any = None
        if given.down_a is not None:
            v = _inner((dy, given.down_b.t(), details.down_scale))
            low_rank = LowRank(v, given.down_a)
        hidden: Any
        dz, dz_gate, up_sums, gate_sums, hidden, _ = kernels.hidden_gradient(
            dy, given.w_down, z, z_gate, want.b_up or want.b_gate, tiles.row_tiles, details.arithmetic.activation,
            details.arithmetic.accuracy, details.arithmetic.input_precision, tiles.tiles, tiles.pipeline,
            keep_hidden=want.w_down or want.down_a, ready=call.ready, low_rank=low_rank,
        )  # fmt: skip
        if want.b_up:
            found["b_up"] = up_sums
        if want.b_gate:
            found["b_gate"] = gate_sums
        if want.w_down:
            found["w_down"] = dy.t() @ hidden
        if want.down_a:
            found["down_a"] = v[:, : call.problem.rank_down].t() @ hidden
        return dz, dz_gate

    def _through_products(
        self,
        call: Prepared,
        given: _Operands,
        want: _Operands,
        d_pre: tuple[Any, Any],
        inner: Any,
        found: dict[str, Any],
    ) -> None:
        """The gradients of x and of what it is multiplied with, which ``found`` gets."""
        p, details, x = call.problem, call.details, rows(given.x)
        dz, dz_gate = d_pre
        v: Any = None
        first = aligned_columns(x, p.rank_up)
        parts = {"up": (dz, slice(0, p.rank_up)), "gate": (dz_gate, slice(first, first + p.rank_gate))}
        if want.x or want.up_a or want.gate_a:
            of_up = (dz, None if given.up_b is None else given.up_b.t(), details.up_scale)
            of_gate = (dz_gate, None if given.gate_b is None else given.gate_b.t(), details.gate_scale)
            v = _inner(of_up, of_gate)
        for name, (d_pre_activation, columns) in parts.items():
            if getattr(want, f"{name}_b"):
                found[f"{name}_b"] = d_pre_activation.t() @ inner[:, columns]
            if getattr(want, f"{name}_a"):
                found[f"{name}_a"] = v[:, columns].t() @ x
            if getattr(want, f"w_{name}"):
                found[f"w_{name}"] = d_pre_activation.t() @ x
        if want.x:
            terms = [(dz, given.w_up)] if dz_gate is None else [(dz, given.w_up), (dz_gate, given.w_gate)]
            factors = [a for a in (given.up_a, given.gate_a) if a is not None]
            if v is not None:
                # First, as it is the smallest: each sum is rounded.
                terms.insert(0, (v, torch.cat([_aligned(a, 0) for a in factors])))
            dx = torch.mm(*terms[0])
            for term in terms[1:]:
                dx.addmm_(*term)
            found["x"] = dx.view(given.x.shape)

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        return (self._expression(operands, call.problem.activation, *call.extras["scales"]),)

    def _expression(self, operands: Tensors, activation: str, *scales: float) -> Tensor:
        named: dict[str, Any] = dict(zip(self.option_names, (activation, *scales), strict=True))
        return reference.lora_ffn(*operands, **named)

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        x = operands[0]
        y = Result((*x.shape[:-1], problem.O), x.dtype)
        if not saving:
            return [y], [None] * 4
        z = Result((problem.M, problem.N), x.dtype)
        up, gate, down = (aligned_columns(x, R) for R in (problem.rank_up, problem.rank_gate, problem.rank_down))
        inner = [Result((problem.M, columns), x.dtype) if columns else None for columns in (up + gate, down)]
        return [y], [z, z if problem.gated else None, *inner]


def _check_adapter(name: str, a: Tensor | None, b: Tensor | None, inner: int, outer: int) -> None:
    given, missing = (f"{name}_a", f"{name}_b") if b is None else (f"{name}_b", f"{name}_a")
    if (a is None) != (b is None):
        raise ValueError(f"{missing} must be given with {given}: an adapter has both")
    if a is None or b is None:
        return
    if a.dim() != 2 or not a.shape[0]:
        raise ValueError(f"{said(f'{name}_a', a)}: expected [R, {inner}], of rank R >= 1")
    rank = a.shape[0]
    check_shape(f"{name}_a", a, (rank, inner), "[R, in]", f"as w_{name} has {inner} columns")
    check_shape(f"{name}_b", b, (outer, rank), "[out, R]", f"as w_{name} has {outer} rows, and {name}_a {rank}")


def _inner(*products: tuple[Tensor | None, Tensor | None, float]) -> Any:
    """``scale · x Aᵀ`` for every (x, A, scale) that there is, side by side, each where TMA can copy it by itself.

    What lies between them is zeros; None if there is none.
    """
    there = [(x, a, scale) for x, a, scale in products if x is not None and a is not None]
    if not there:
        return None
    x = there[0][0]
    found = x.new_empty(x.shape[0], sum(aligned_columns(x, a.shape[0]) for _, a, _ in there))
    first = 0
    for x, a, scale in there:
        rank, end = a.shape[0], first + aligned_columns(x, a.shape[0])
        part = found[:, first : first + rank]
        torch.addmm(part, x, a.t(), beta=0, alpha=scale, out=part)
        if first + rank < end:
            found[:, first + rank : end] = 0
        first = end
    return found


def _aligned(factor: Tensor, axis: int) -> Tensor:
    """The factor, with zeros behind its ranks where the products with x have zeros."""
    rank = factor.shape[axis]
    behind = aligned_columns(factor, rank) - rank
    return factor if not behind else F.pad(factor, (0, behind) if axis else (0, 0, 0, behind))


def _into_hidden(given: _Operands, inner: Tensor | None) -> LowRank | None:
    """What joins the pre-activations; the projection of a gated FFN that has no adapter gets one of zeros."""
    if inner is None:
        return None
    up, gate = given.up_b, given.gate_b
    first = 0 if up is None or gate is None else aligned_columns(inner, up.shape[1])
    if given.w_gate is not None:
        up, gate = (torch.zeros_like(gate) if up is None else up), (torch.zeros_like(up) if gate is None else gate)
    assert up is not None
    return LowRank(inner, up, gate, first)


LORA_FFN = _LoRAFFN(lora_ffn)
