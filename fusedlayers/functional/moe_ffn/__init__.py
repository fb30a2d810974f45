"""Mixture of experts: several FFNs, of which each token runs through the few that its router chose."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.activations import canonical_activation
from ...kernels.grouped_gemm import Arithmetic, sizes
from ...planning import Float8MoeProblem
from ...planning.moe_ffn import MoePlan, MoeProblem
from ..call import call_facts, wants_gradient
from ..custom_ops import Result, Results
from ..float8 import Float8Operation
from ..operands import rows
from ..operation import Operation, Tensors, formula
from ..precision import Float8, precision_word
from ..prepared import Prepared
from . import epilogue
from .arguments import check_gate, checked_options, expert_shapes
from .by_torch import experts_by_torch
from .experts import B_DOWN, B_GATE, B_UP, SCORES, W_DOWN, W_GATE, W_UP


def moe_ffn(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    w_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    b_gate: Tensor | None = None,
    *,
    activation: str = "silu",
    gate_and_up: str = "separate",
    transposed: bool = False,
    limit: float | None = None,
    up_offset: float = 0.0,
    recompute: bool = False,
    precision: str | Float8 | None = None,
) -> Tensor:
    """``y[m] = Σ_j top_k_weights[m, j] · ffn_e(x[m])`` with ``e = top_k_index[m, j]``, without a loop over experts.

    ``ffn_e(x) = act(x W_upᵀ + b_up) W_downᵀ + b_down`` with the weights of expert e; with a gate the hidden is
    ``act(x W_gateᵀ + b_gate) ⊙ (x W_upᵀ + b_up)``. The letters: M tokens, K d_model, N d_ff, E experts, k experts per
    token. Kernels sort rows by expert on the device: the host never synchronises, and a CUDA graph serves any routing.
    Deterministic.

    Args:
        x: ``[*B, M, K]``, any strides.
        top_k_index: int64 or int32 ``[*B, M, k]``: the experts of every token. One outside 0 ... E - 1 (a masked token,
            an expert of another process) adds nothing, and its weight's gradient is 0.
        top_k_weights: ``[*B, M, k]``, of any floating dtype, which autocast leaves alone.
        w_up, w_gate: ``[E, N, K]``, ``nn.Linear``'s layout for every expert; no gate without w_gate.
        w_down: ``[E, K, N]``.
        b_up, b_gate: ``[E, N]`` or None.
        b_down: ``[E, K]`` or None.
        activation: a name in ``fusedlayers.kernels.activations``, or Hugging Face's name for it.
        gate_and_up: "separate", "concatenated" or "interleaved". With the latter two w_up is ``[E, 2 N, K]`` (and b_up
            ``[E, 2 N]``), with the gate in its first half or in its even rows, and w_gate and b_gate are None.
        transposed: whether the last two dimensions of every weight are swapped: w_up ``[E, K, N]``, w_down
            ``[E, N, K]``.
        limit, up_offset: the hidden is ``act(min(gate, limit)) ⊙ (clamp(up, -limit, limit) + up_offset)``. gpt-oss has
            the activation "quick_gelu" with a limit of 7 and an offset of 1.
        recompute: save only x and the routing for the backward pass, which recomputes the pre-activations. The default
            saves them.
        precision: None, or "fp8" or a :class:`fusedlayers.Float8`: products run in 8 bits where they can and where that
            is faster, else as with None; ``explain`` says which.

    Returns:
        ``[*B, M, K]`` in the dtype of x (under autocast: in autocast's dtype). float16, bfloat16 and float32 can run in
        Triton kernels; every floating dtype runs through torch.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of x, an index
            that is no int32 or int64.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation, layout or
            ``precision``, a number outside of its range, a limit or an offset without a gate.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    tensors = x, top_k_index, top_k_weights, w_up, w_down, w_gate, b_up, b_down, b_gate
    return MOE_FFN.call(tensors, (activation, gate_and_up, transposed, limit, up_offset, recompute, precision))


class _MoeFFN(Operation):
    """The experts of x ``[*B, M, K]``, whose tokens are rows of one matrix."""

    problem_type = MoeProblem
    operands = "x top_k_index top_k_weights w_up w_down w_gate? b_up? b_down? b_gate?"
    row_operands = ("x",)
    torch_takes_cast = True

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        activation, gate_and_up, transposed, limit, up_offset, recompute, precision = options
        w_gate, b_gate = tensors[5], tensors[8]
        activation, precision = canonical_activation(activation), precision_word(precision)
        checked = checked_options(gate_and_up, transposed, limit, up_offset, recompute, gated=w_gate is not None)
        check_gate(gate_and_up, w_gate, b_gate)
        expert_shapes(gate_and_up, transposed).check(*tensors)
        return activation, *checked, precision

    def variant(self, options: tuple[Any, ...]) -> Operation:
        return self if options[-1] is None else FLOAT8_MOE_FFN

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> MoeProblem:
        x, top_k_index, _, w_up, w_down, w_gate, b_up, b_down, _ = tensors
        activation, gate_and_up, transposed, limit, up_offset, recompute, _ = options
        return MoeProblem(
            M=math.prod(x.shape[:-1]),
            K=x.shape[-1],
            N=w_down.shape[1 if transposed else 2],
            E=w_up.shape[0],
            top_k=top_k_index.shape[-1],
            activation=activation,
            gated=w_gate is not None or gate_and_up != "separate",
            biased=b_up is not None or b_down is not None,
            clamped=limit is not None or up_offset != 0,
            recompute=recompute,
            training=wants_gradient(x, *tensors[2:]),
            frozen=not wants_gradient(w_up, w_down, w_gate),
            **call_facts(*tensors),
        )

    def title(self, problem: MoeProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        _, _, _, limit, up_offset, *_ = options
        gate = "x W_gateᵀ" + (" + b_gate" if problem.gated and problem.biased else "")
        up = "x W_upᵀ" + (" + b_up" if problem.biased else "")
        if limit is not None:
            gate, up = f"min({gate}, {limit:g})", f"clamp({up}, ±{limit:g})"
        if up_offset:
            up = f"{up} + {up_offset:g}"
        hidden = f"act({gate}) ⊙ ({up})" if problem.gated else f"act({up})"
        down = "W_downᵀ" + (" + b_down" if problem.biased else "")
        return f"moe_ffn: y = Σ_j top_k_weights_j (({hidden}) {down}), act = {formula(problem.activation)}"

    def extras(self, options: tuple[Any, ...]) -> dict[str, Any]:
        _, gate_and_up, transposed, limit, up_offset, *_ = options
        return {"gate_and_up": gate_and_up, "transposed": transposed, "limit": limit, "up_offset": up_offset}

    def details(self, plan: MoePlan, extras: dict[str, Any]) -> Arithmetic:
        problem = plan.problem
        return Arithmetic(
            problem.activation, plan.accuracy, problem.input_precision, extras["limit"], extras["up_offset"]
        )

    def cast(self, call: Prepared, tensors: Tensors) -> Tensors:
        # top_k_weights are no operand of a product.
        x, index, scores, *experts = tensors
        return *super().cast(call, (x, index)), scores, *super().cast(call, experts)

    def through_torch(self, call: Prepared, tensors: Tensors) -> Tensor:
        return experts_by_torch(call, tensors)

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        x, index, scores, *experts = tensors
        return rows(x), index.reshape(-1).contiguous(), scores.reshape(-1).contiguous(), *experts

    def unread(self, call: Prepared, wanted: Sequence[bool]) -> Sequence[int]:
        biases = [] if call.problem.recompute else [B_UP, B_GATE]
        # The gradient of top_k_weights needs the experts' results, which include b_down.
        return biases if wanted[SCORES] else [*biases, B_DOWN]

    def forward(self, call: Prepared, operands: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensors]:
        y, made = epilogue.forward(call, operands, any(wanted))
        return (y,), made

    def backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        return epilogue.gradients(call, operands, made, wanted, upstream[0])

    def last_backward(
        self, call: Prepared, operands: Tensors, made: Tensors, wanted: Sequence[bool], upstream: Tensors
    ) -> Tensors:
        return epilogue.gradients(call, operands, made, wanted, upstream[0], in_place=True)

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        dtype = operands[0].dtype
        made: list[Result | None] = [None] * 3
        if saving:
            made[0] = Result((sum(sizes(problem.slots, problem.E, problem.block)),), torch.int32)
            if not problem.recompute:
                made[1] = Result((problem.capacity, problem.N), dtype)
                made[2] = made[1] if problem.gated else None
        return [Result((problem.M, problem.K), dtype)], made

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        x, index, scores, *experts = operands
        index, scores = (each.view(-1, call.problem.top_k) for each in (index, scores))
        return [experts_by_torch(call, (x, index, scores, *experts))]

    def finished(self, call: Prepared, tensors: Tensors, results: Tensor) -> Tensor:
        return results.view(tensors[0].shape)


class _Float8MoeFFN(Float8Operation, _MoeFFN):
    """The experts in 8 bits."""

    problem_type = Float8MoeProblem
    weight_positions = (W_UP, W_DOWN, W_GATE)

    @property
    def plain(self) -> Operation:
        return MOE_FFN


MOE_FFN = _MoeFFN(moe_ffn)
FLOAT8_MOE_FFN = _Float8MoeFFN(moe_ffn, "float8_")
