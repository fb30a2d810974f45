"""The feed-forward block with adapters of low rank (LoRA): the public function, and its operation.

With u = s x Aᵀ the adapted product is ``x Wᵀ + u Bᵀ``, and with v = s dz B its gradients are dx = dz W + v A,
dA = vᵀ x and dB = dzᵀ u. u and v have few columns: cuBLAS computes them, and the gradients of A and B. No adapter
writes a matrix as wide as the hidden: u Bᵀ of the up and gate projections, and v A of the down projection, are added to
the large product on chip.

With dropout u = s drop(x) Aᵀ, dx = dz W + drop(v A) and dA = vᵀ drop(x). Each adapter has its own mask, or gate and up
projection share one; the backward pass redraws it. drop(x) and drop(v A) are in memory while a product reads them, each
as large as x, or for the down projection as large as the hidden: the only matrix of that width that an adapter writes.

Gated, forward and backward, rank 16, frozen weights, µs on an H200: 2,590 at 8192 × 2048 × 8192, where torch.compile
takes 3,342 and the same FFN without adapters 2,185; 8,196, 9,447 and 7,532 at 8192 × 4096 × 14336.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import reference
from ...kernels import gemm_epilogue as kernels
from ...kernels.activations import canonical_activation
from ...kernels.column_sums import column_sums
from ...kernels.dropout import NO_DROPOUT, Dropout, adapter_places
from ...kernels.gemm_epilogue import LowRank, aligned_columns
from ...kernels.gemm_gemm import Arithmetic
from ...kernels.tuning import COLUMN_SUM_TILES
from ...planning import Plan
from ...planning.lora_ffn import LoRAProblem
from ..call import subclass_of, wants_gradient
from ..custom_ops import Result, Results
from ..ffn import dropping
from ..ffn.arguments import check_lora_ffn, checked_dropout, ffn_problem
from ..operands import rows, with_leading_dims
from ..operation import Operation, Tensors, formula
from ..options import checked_flag, checked_number
from ..prepared import Prepared
from .arguments import Operands
from .products import Product, aligned, dropped, into_hidden, side_by_side


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
    adapter_dropout_p: float = 0.0,
    shared_dropout: bool = False,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Feed-forward block whose linear layers compute ``x Wᵀ + b + scale (dropout(x) Aᵀ) Bᵀ`` (Hu et al., "LoRA", 2021).

    Otherwise as :func:`ffn`: ``down(act(up(x)))``, with ``w_gate`` ``down(act(gate(x)) ⊙ up(x))``. ``W + scale B A`` is
    never formed; x, the pre-activations and ``x Aᵀ`` are saved for the backward pass.

    Args:
        x: ``[*B, M, K]`` or ``[K]``: any leading dims, any strides.
        w_up: ``[N, K]``, ``nn.Linear``'s layout.
        w_down: ``[O, N]``.
        b_up: ``[N]`` or None.
        b_down: ``[O]`` or None.
        w_gate: ``[N, K]`` or None (no gate).
        b_gate: ``[N]`` or None.
        up_a: ``[R, K]`` or None (no adapter); every adapter has its own rank R.
        up_b: ``[N, R]``, given with ``up_a``.
        down_a: ``[R, N]`` or None.
        down_b: ``[O, R]``.
        gate_a: ``[R, K]`` or None.
        gate_b: ``[N, R]``.
        activation: a name of ``fusedlayers.kernels.activations.ACTIVATIONS``, or Hugging Face's name of one.
        up_scale, down_scale, gate_scale: factors of the adapters' products.
        adapter_dropout_p: probability of dropping an element of an adapter's input. Each adapter has its own mask,
            which is not saved: the backward pass redraws it.
        shared_dropout: whether the adapters of gate and up projection drop the same elements of x, as the adapter of
            one linear layer that holds both does.
        dropout_seed: int64 ``[1]`` on the device of x, which alone determines the masks; None draws one from the
            default generator. DTensors draw their own masks instead.

    Returns:
        ``[*B, M, O]`` in the dtype of x (under autocast: in autocast's dtype). float16, bfloat16 and float32 can run in
        Triton kernels; every floating dtype runs through torch. Everything that requires a gradient has one.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of x.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation, half of an
            adapter, a scale that is not finite, ``adapter_dropout_p`` outside [0, 1), ``shared_dropout`` without gate.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    return LORA_FFN(
        x, w_up, w_down, b_up, b_down, w_gate, b_gate, up_a, up_b, down_a, down_b, gate_a, gate_b, activation,
        up_scale, down_scale, gate_scale, adapter_dropout_p, shared_dropout, dropout_seed,
    )  # fmt: skip


class _Details(NamedTuple):
    """What kernels and products need beside the plan."""

    arithmetic: Arithmetic
    dropout_p: float
    places: dict[str, tuple[int, int]]  # where the masks begin
    up_scale: float
    down_scale: float
    gate_scale: float


class _LoRAFFN(Operation):
    """The FFN of x ``[*B, M, K]`` with adapters; it saves inputs, pre-activations and the products with A."""

    problem_type = LoRAProblem
    operands = "x w_up w_down b_up? b_down? w_gate? b_gate? up_a? up_b? down_a? down_b? gate_a? gate_b? seed?"
    row_operands = ("x",)

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        given = Operands(*tensors)
        activation, *scales, dropout_p, shared = options
        activation = canonical_activation(activation)
        check_lora_ffn(tensors)
        checked_dropout("adapter_dropout_p", dropout_p)
        if checked_flag("shared_dropout", shared) and given.w_gate is None:
            raise ValueError("shared_dropout must be False, because w_gate is None")
        names = self.option_names[1:4]
        checked = [checked_number(name, each, "a finite number") for name, each in zip(names, scales, strict=True)]
        return activation, *checked, float(dropout_p), shared

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> LoRAProblem:
        given = Operands(*tensors)
        plain = ffn_problem(*tensors[:7], activation=options[0], dropout_p=0.0, recompute="auto")
        ranks = [0 if a is None else a.shape[0] for a in (given.up_a, given.gate_a, given.down_a)]
        facts = plain.__getstate__() | {"operation": self.name, "subclass": subclass_of(*tensors)}
        facts["needs_weight_gradient"] = wants_gradient(given.w_up, given.w_down, given.w_gate)
        dropout = options[4] > 0 and any(ranks)
        return LoRAProblem(
            **facts, rank_up=ranks[0], rank_gate=ranks[1], rank_down=ranks[2], adapter_dropout=dropout,
            shared_dropout=dropout and options[5], needs_adapter_gradient=wants_gradient(*tensors[7:13]),
        )  # fmt: skip

    def reference(self, **arguments: Any) -> Tensor:
        return super().reference(**arguments, seed=arguments["dropout_seed"])

    def title(self, problem: LoRAProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        given = Operands(*tensors)

        def product(x: str, name: str, bias: Tensor | None, rank: int) -> str:
            taken = f"dropout({x})" if problem.adapter_dropout else x
            adapter = f" + s ({taken} Aᵀ) Bᵀ" if rank else ""
            return f"{x} W_{name}ᵀ{'' if bias is None else f' + b_{name}'}{adapter}"

        hidden = f"act({product('x', 'up', given.b_up, problem.rank_up)})"
        if problem.gated:
            gate = product("x", "gate", given.b_gate, problem.rank_gate)
            hidden = f"act({gate}) ⊙ ({product('x', 'up', given.b_up, problem.rank_up)})"
        y = product("h", "down", given.b_down, problem.rank_down)
        return f"lora_ffn: {y}, h = {hidden}, act = {formula(problem.activation)}"

    def through_torch(self, call: Prepared, tensors: Tensors) -> Tensor:
        return self._expression(self.flattened(call, tensors), *call.options, drop=dropping.dropped)

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        given = tensors[-1]
        if not call.problem.adapter_dropout:
            return tensors if given is None else (*tensors[:-1], None)
        # Drawn on every path, as for the FFN.
        return tensors if given is not None else (*tensors[:-1], dropping.draw_seed(*tensors))

    def extras(self, options: tuple[Any, ...]) -> dict[str, Any]:
        return {"scales": list(options[1:4]), "dropout_p": options[4]}

    def details(self, plan: Plan, extras: dict[str, Any]) -> _Details:
        problem = plan.problem
        arithmetic = Arithmetic(problem.activation, 0.0, problem.input_precision, plan.accuracy)
        places = adapter_places(problem.shared_dropout)
        return _Details(arithmetic, extras["dropout_p"], places, *extras["scales"])

    def unread(self, call: Prepared, wanted: Sequence[bool]) -> Sequence[int]:
        # What the biases were added to is saved, or not needed.
        return [place for place, name in enumerate(Operands._fields) if name in ("b_up", "b_down", "b_gate")]

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        given, details = Operands(*operands), call.details
        tiles, arithmetic, keep = call.plan.epilogue, details.arithmetic, any(wanted)
        x = rows(given.x)
        inner = side_by_side(
            Product(x, given.up_a, details.up_scale, _dropout(call, given, "up")),
            Product(x, given.gate_a, details.gate_scale, _dropout(call, given, "gate")),
        )
        hidden, z, z_gate = kernels.hidden(
            x, given.w_up, given.b_up, given.w_gate, given.b_gate, keep, arithmetic, tiles.hidden_tiles,
            tiles.hidden_pipeline, ready=call.ready, low_rank=into_hidden(given, inner),
        )  # fmt: skip
        inner_down = None
        if given.down_a is None:
            y = F.linear(hidden, given.w_down, given.b_down)
        else:
            down = _dropout(call, given, "down")
            inner_down = side_by_side(Product(hidden, given.down_a, details.down_scale, down))
            y = F.linear(inner_down, aligned(given.down_b, 1), given.b_down)
            y.addmm_(hidden, given.w_down.t())
        made = (z, z_gate, inner, inner_down) if keep else (None,) * 4
        return (with_leading_dims(y, given.x),), made

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        return self._gradients(call, operands, made, wanted, upstream, False)

    def last_backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        return self._gradients(call, operands, made, wanted, upstream, True)

    def _gradients(
        self,
        call: Prepared,
        operands: Tensors,
        made: Tensors,
        wanted: Sequence[bool],
        upstream: Tensors,
        in_place: bool,
    ) -> Tensors:
        given, want, p = Operands(*operands), Operands(*wanted), call.problem
        inner_down = made[3]
        dy = rows(upstream[0])
        found: dict[str, Any] = {}
        if want.b_down:
            found["b_down"] = column_sums(dy, COLUMN_SUM_TILES, call.ready).to(dy.dtype)
        if want.down_b:
            found["down_b"] = dy.t() @ inner_down[:, : p.rank_down]
        if any(getattr(want, name) for name in Operands._fields if name not in ("b_down", "down_b")):
            d_pre = self._through_hidden(call, given, want, dy, made, found, in_place)
            self._through_products(call, given, want, d_pre, made[2], found)
        return Operands(**found)

    def _through_hidden(
        self,
        call: Prepared,
        given: Operands,
        want: Operands,
        dy: Tensor,
        made: Tensors,
        found: dict[str, Any],
        in_place: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """dz and dz_gate; ``found`` gets their sums, and the gradients that need the hidden, which is then freed.

        ``in_place``: they overwrite the pre-activations.
        """
        tiles, details = call.plan.epilogue.gradient, call.details
        z, z_gate, *_ = made
        low_rank: LowRank | None = None
        v: Any = None
        added: Tensor | None = None
        dropout, rank = _dropout(call, given, "down"), call.problem.rank_down
        if given.down_a is not None:
            v = side_by_side(Product(dy, given.down_b.t(), details.down_scale))
            if dropout.seed is None:
                low_rank = LowRank(v, given.down_a)
            else:
                added = torch.mm(v[:, :rank], given.down_a)
                dropped(added, dropout, added)
        hidden: Any
        dz, dz_gate, up_sums, gate_sums, hidden, _ = kernels.hidden_gradient(
            dy, given.w_down, z, z_gate, want.b_up or want.b_gate, tiles.row_tiles, details.arithmetic, tiles.tiles,
            tiles.pipeline, keep_hidden=want.w_down or want.down_a, in_place=in_place, ready=call.ready,
            low_rank=low_rank, added=added,
        )  # fmt: skip
        if want.b_up:
            found["b_up"] = up_sums
        if want.b_gate:
            found["b_gate"] = gate_sums
        if want.w_down:
            found["w_down"] = dy.t() @ hidden
        if want.down_a:
            # The last use of the hidden: dropout may overwrite it.
            found["down_a"] = v[:, :rank].t() @ dropped(hidden, dropout, hidden)
        return dz, dz_gate

    def _through_products(
        self,
        call: Prepared,
        given: Operands,
        want: Operands,
        d_pre: tuple[Any, Any],
        inner: Any,
        found: dict[str, Any],
    ) -> None:
        """Puts the gradients of x and of its factors into ``found``."""
        p, details, x = call.problem, call.details, rows(given.x)
        dz, dz_gate = d_pre
        v: Any = None
        taken: Tensor | None = None  # x after an adapter's dropout
        first = aligned_columns(x, p.rank_up)
        parts = {"up": (dz, slice(0, p.rank_up)), "gate": (dz_gate, slice(first, first + p.rank_gate))}
        if want.x or want.up_a or want.gate_a:
            of_up = Product(dz, None if given.up_b is None else given.up_b.t(), details.up_scale)
            of_gate = Product(dz_gate, None if given.gate_b is None else given.gate_b.t(), details.gate_scale)
            v = side_by_side(of_up, of_gate)
        for name, (d_pre_activation, columns) in parts.items():
            if getattr(want, f"{name}_b"):
                found[f"{name}_b"] = d_pre_activation.t() @ inner[:, columns]
            if getattr(want, f"{name}_a"):
                if taken is None:
                    taken = dropped(x, _dropout(call, given, name))
                found[f"{name}_a"] = v[:, columns].t() @ taken
                # Gate and up projection may share a mask.
                taken = taken if name == "up" and p.shared_dropout else None
            if getattr(want, f"w_{name}"):
                found[f"w_{name}"] = d_pre_activation.t() @ x
        del taken
        if want.x:
            terms = [(dz, given.w_up)] if dz_gate is None else [(dz, given.w_up), (dz_gate, given.w_gate)]
            factors = {name: a for name, a in (("up", given.up_a), ("gate", given.gate_a)) if a is not None}
            dx: Any = None
            # The adapters' terms come first, as they are the smallest and every sum is rounded.
            if p.adapter_dropout:
                for name, a in factors.items():
                    added = torch.mm(v[:, parts[name][1]], a)
                    dropped(added, _dropout(call, given, name), added)
                    dx = added if dx is None else dx.add_(added)
            elif v is not None:
                terms.insert(0, (v, torch.cat([aligned(a, 0) for a in factors.values()])))
            for term in terms:
                dx = torch.mm(*term) if dx is None else dx.addmm_(*term)
            found["x"] = dx.view(given.x.shape)

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        extras = call.extras
        options = *extras["scales"], extras["dropout_p"], call.problem.shared_dropout
        return (self._expression(operands, call.problem.activation, *options),)

    def _expression(self, operands: Tensors, *options: Any, **more: Any) -> Tensor:
        *tensors, seed = operands
        named: dict[str, Any] = dict(zip(self.option_names, options, strict=True)) | {"seed": seed} | more
        return reference.lora_ffn(*tensors, **named)

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        x = operands[0]
        y = Result((*x.shape[:-1], problem.O), x.dtype)
        if not saving:
            return [y], [None] * 4
        z = Result((problem.M, problem.N), x.dtype)
        up, gate, down = (aligned_columns(x, R) for R in (problem.rank_up, problem.rank_gate, problem.rank_down))
        inner = [Result((problem.M, columns), x.dtype) if columns else None for columns in (up + gate, down)]
        return [y], [z, z if problem.gated else None, *inner]


def _dropout(call: Prepared, given: Operands, name: str) -> Dropout:
    """The dropout of the input of this adapter; may be none."""
    return NO_DROPOUT if given.seed is None else Dropout(given.seed, call.details.dropout_p, call.details.places[name])


LORA_FFN = _LoRAFFN(lora_ffn)
