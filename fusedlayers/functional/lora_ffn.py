"""The feed-forward block with adapters of low rank (LoRA): the public function, and its operation.

Its passes are those of the FFN, whose products have further terms: see ``ffn/adapters.py``.
"""

from typing import Any

from torch import Tensor

from .. import reference
from ..kernels.activations import canonical_activation
from ..kernels.gemm_epilogue import aligned_columns
from ..kernels.gemm_gemm import Arithmetic
from ..planning import Plan
from ..planning.float8 import Float8LoRAProblem
from ..planning.lora_ffn import LoRAProblem
from .call import subclass_of, wants_gradient
from .custom_ops import Result, Results
from .ffn import dropping
from .ffn.adapters import FACTORS, Adapted
from .ffn.arguments import check_lora_ffn, checked_dropout, ffn_problem
from .ffn.passes import FFNOperation
from .float8 import Float8Operation
from .operation import Operation, Tensors, formula
from .options import checked_flag, checked_number
from .precision import Float8, precision_word
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
    adapter_dropout_p: float = 0.0,
    shared_dropout: bool = False,
    dropout_seed: Tensor | None = None,
    precision: str | Float8 | None = None,
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
        precision: None, or "fp8" or a :class:`fusedlayers.Float8`: the products with w_up, w_gate and w_down, and those
            of the gradients of x and the hidden, run in 8 bits where they can and where that is faster, else as with
            None; ``explain`` says which. Adapters stay in 16 bits, and so do the gradients of adapters and weights.

    Returns:
        ``[*B, M, O]`` in the dtype of x (under autocast: in autocast's dtype). float16, bfloat16 and float32 can run in
        Triton kernels; every floating dtype runs through torch. Everything that requires a gradient has one.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not real floating or differs from that of x.
        ValueError: shapes that do not fit together, tensors on different devices, an unknown activation or
            ``precision``, half of an adapter, a scale that is not finite, ``adapter_dropout_p`` outside [0, 1),
            ``shared_dropout`` without gate.
        RuntimeError: ``FUSEDLAYERS_BACKEND=triton`` or ``FUSEDLAYERS_STRICT=1`` where the kernels cannot run.
    """
    layer, adapters = (w_up, w_down, b_up, b_down, w_gate, b_gate), (up_a, up_b, down_a, down_b, gate_a, gate_b)
    options = activation, up_scale, down_scale, gate_scale, adapter_dropout_p, shared_dropout, precision
    return LORA_FFN.call((x, *layer, *adapters, dropout_seed), options)


class _LoRAFFN(FFNOperation):
    """The FFN of x ``[*B, M, K]`` with adapters."""

    problem_type = LoRAProblem
    # Neither a residual nor a dropout of the hidden is ever given.
    operands = f"{FFNOperation.operands} {' '.join(f'{name}?' for name in FACTORS)} adapter_seed?"

    def check(self, tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...]:
        activation, *scales, dropout_p, shared, precision = options
        activation = canonical_activation(activation)
        check_lora_ffn(tensors)
        checked_dropout("adapter_dropout_p", dropout_p)
        w_gate = tensors[5]
        if checked_flag("shared_dropout", shared) and w_gate is None:
            raise ValueError("shared_dropout must be False, because w_gate is None")
        names = self.option_names[1:4]
        checked = [checked_number(name, each, "a finite number") for name, each in zip(names, scales, strict=True)]
        return activation, *checked, float(dropout_p), shared, precision_word(precision)

    def variant(self, options: tuple[Any, ...]) -> Operation:
        return self if options[-1] is None else FLOAT8_LORA_FFN

    def problem(self, tensors: Tensors, options: tuple[Any, ...]) -> LoRAProblem:
        _, w_up, w_down, _, _, w_gate, _, *factors, _ = tensors
        plain = ffn_problem(*tensors[:7], activation=options[0], dropout_p=0.0, recompute="auto")
        rank_up, rank_down, rank_gate = (0 if a is None else a.shape[0] for a in factors[::2])
        facts = plain.__getstate__() | {"operation": "lora_ffn", "subclass": subclass_of(*tensors)}
        facts["needs_weight_gradient"] = wants_gradient(w_up, w_down, w_gate)
        dropout = options[4] > 0 and any((rank_up, rank_down, rank_gate))
        return LoRAProblem(
            **facts, rank_up=rank_up, rank_gate=rank_gate, rank_down=rank_down, adapter_dropout=dropout,
            shared_dropout=dropout and options[5], needs_adapter_gradient=wants_gradient(*factors),
        )  # fmt: skip

    def title(self, problem: LoRAProblem, tensors: Tensors, options: tuple[Any, ...]) -> str:
        _, _, _, b_up, b_down, _, b_gate, *_ = tensors

        def product(x: str, name: str, bias: Tensor | None, rank: int) -> str:
            taken = f"dropout({x})" if problem.adapter_dropout else x
            adapter = f" + s ({taken} Aᵀ) Bᵀ" if rank else ""
            return f"{x} W_{name}ᵀ{'' if bias is None else f' + b_{name}'}{adapter}"

        up = product("x", "up", b_up, problem.rank_up)
        hidden = f"act({up})"
        if problem.gated:
            hidden = f"act({product('x', 'gate', b_gate, problem.rank_gate)}) ⊙ ({up})"
        y = product("h", "down", b_down, problem.rank_down)
        return f"lora_ffn: {y}, h = {hidden}, act = {formula(problem.activation)}"

    def through_torch(self, call: Prepared, tensors: Tensors) -> Tensor:
        return self._expression(call, self.flattened(call, tensors), drop=dropping.dropped)

    def flattened(self, call: Prepared, tensors: Tensors) -> Tensors:
        *given, seed = tensors
        if not call.problem.adapter_dropout:
            seed = None
        elif seed is None:
            # Drawn on every path, as for the FFN.
            seed = dropping.draw_seed(*tensors)
        return *given[:7], None, None, *given[7:], seed

    def extras(self, options: tuple[Any, ...]) -> dict[str, Any]:
        return {"scales": list(options[1:4]), "dropout_p": options[4]}

    def details(self, plan: Plan, extras: dict[str, Any]) -> Arithmetic:
        problem = plan.problem
        return Arithmetic(problem.activation, 0.0, problem.input_precision, plan.accuracy)

    def adapted(self, call: Prepared, operands: Tensors) -> Adapted:
        *factors, seed = operands[9:]
        extras = call.extras
        return Adapted.of(factors, extras["scales"], seed, extras["dropout_p"], call.problem.shared_dropout)

    def expression(self, call: Prepared, operands: Tensors) -> Tensors:
        return (self._expression(call, operands),)

    def _expression(self, call: Prepared, operands: Tensors, **options: Any) -> Tensor:
        up_scale, down_scale, gate_scale = call.extras["scales"]
        return reference.lora_ffn(
            *operands[:7], *operands[9:15], activation=call.problem.activation,
            up_scale=up_scale, down_scale=down_scale, gate_scale=gate_scale,
            adapter_dropout_p=call.extras["dropout_p"], shared_dropout=call.problem.shared_dropout, seed=operands[15],
            **options,
        )  # fmt: skip

    def results(self, operands: Tensors, problem: Any, path: str, extras: dict[str, Any], saving: bool) -> Results:
        given, made = super().results(operands, problem, path, extras, saving)
        x = next(operand for operand in operands if operand is not None)
        up, gate, down = (aligned_columns(x, R) for R in (problem.rank_up, problem.rank_gate, problem.rank_down))
        inner = [
            Result((problem.M, columns), x.dtype) if columns and problem.training else None
            for columns in (up + gate, down)
        ]
        return given, [*made, *inner]


class _Float8LoRAFFN(Float8Operation, _LoRAFFN):
    """The FFN with adapters in 8 bits."""

    problem_type = Float8LoRAProblem

    @property
    def plain(self) -> Operation:
        return LORA_FFN


LORA_FFN = _LoRAFFN(lora_ffn)
FLOAT8_LORA_FFN = _Float8LoRAFFN(lora_ffn, "float8_")
