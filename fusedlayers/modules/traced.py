"""The FFN of a block while Dynamo traces it (torch.compile, strict torch.export), with no more guards than torch's own.

Dynamo adds a guard for everything that traced Python reads, and evaluates all of them at each call. So the question
which parts make an FFN, and whether they are plain, is answered outside of the trace, and its answer is a constant of
the graph. Inside, the parts are read as their own calls would read them: a child that is replaced, another weight,
another probability of dropout, ``train()`` and ``eval()`` recompile as without this library. Hooks that are added later
are not noticed: Dynamo does not look for them either, unless told to
(``torch._dynamo.config.skip_nnmodule_hook_guards``). Nor are changes of this library's environment variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..functional.ffn import FFN
from ..functional.lora_ffn import LORA_FFN
from .children import active_adapter, attributes_of, base_linear, is_adapted, is_transposed, split_gate, why_not_now
from .pieces import FFNPieces

_operation = FFN.composite.operation
_adapted_operation = LORA_FFN.composite.operation
_Method = TypeVar("_Method", bound=Callable[..., Any])
# Options that change the formula of an activation.
_OPTIONS = ("approximate", "negative_slope")


def outside_of_traces(method: _Method) -> _Method:
    """Makes Dynamo call a method that takes only self, and use its result as a constant without guards."""
    # What torch.compiler.assume_constant_result does, but without importing Dynamo, which takes seconds.
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


class TracedFFN(NamedTuple):
    """An FFN in names and numbers, which Dynamo takes for constants, as a plain tuple.

    Names are those of attributes of its block, and may have dots.
    """

    up: str
    down: str
    gate: str | None
    activation: str | None
    activation_word: str | None  # the attribute itself, if it is a str
    options: tuple[tuple[str, Any], ...]  # of the activation, if it is a module
    dropout: str | None
    dropout_is_module: bool
    transposed: tuple[bool, ...]  # of up, down and the gate: whether the weight is laid out [in, out]
    adapters: tuple[str | None, ...] | None  # of up, down and the gate, by name; None: there are none
    gate_rows: str | None  # of the up linear
    name: str  # of the activation, in this library
    switches: str
    plain: type[Tensor]
    strided: torch.layout
    recompute: Literal["auto"] | bool | int | None
    precision: str | None


def _options_of(part: object) -> tuple[tuple[str, Any], ...]:
    """The options of an activation module: those of torch's that matter, all numbers and strings of others."""
    if not isinstance(part, nn.Module):
        return ()
    own = attributes_of(part)
    if type(part).__module__.startswith("torch.nn."):
        return tuple((name, own[name]) for name in _OPTIONS if name in own)
    plain = (bool, int, float, str)
    return tuple((name, value) for name, value in own.items() if type(value) in plain and name != "training")


def part_of(block: Any, path: str) -> Any:
    """The part of ``block`` at this path."""
    for name in path.split("."):
        block = getattr(block, name)
    return block


def traceable(
    block: nn.Module,
    pieces: FFNPieces | str,
    *,
    up: str,
    down: str,
    gate: str | None,
    activation: str | None,
    dropout: str | None,
    recompute: Literal["auto"] | bool | int | None = None,
    precision: str | None = None,
) -> tuple[Any, ...] | None:
    """What :func:`traced_ffn` takes, for the pieces at these paths; None where the children must be called.

    Args:
        block: the module that has the FFN.
        pieces: the FFN, or why it must be called.
        up, down, gate, activation, dropout: paths of its parts; None: there is none, or only the name of an activation.
        recompute, precision: as in ``functional.ffn``; a ``recompute`` of None: both are attributes of the block, which
            can change.
    """
    if isinstance(pieces, str) or why_not_now() is not None:
        return None
    linears = (pieces.up, pieces.down, pieces.gate or pieces.up)
    adapted = [linear for linear in linears if is_adapted(linear)]
    # Merged or disabled adapters are called: such a model is not being trained.
    if not all(map(active_adapter, adapted)):
        return None
    part = None if activation is None else part_of(block, activation)
    facts = TracedFFN(
        up=up,
        down=down,
        gate=None if pieces.gate is None else gate,
        activation=activation,
        activation_word=part if isinstance(part, str) else None,
        options=_options_of(part),
        dropout=dropout,
        dropout_is_module=dropout is not None and isinstance(part_of(block, dropout), nn.Module),
        transposed=tuple(is_transposed(base_linear(linear)) for linear in linears),
        adapters=tuple(map(active_adapter, linears)) if adapted else None,
        gate_rows=pieces.gate_rows,
        name=pieces.activation,
        switches=FFN.composite.switches(),
        plain=Tensor,
        strided=torch.strided,
        recompute=recompute,
        precision=precision,
    )
    return tuple(facts)


def traced_dropout_p(block: Any, path: str | None, is_module: bool) -> float:
    """The probability that a dropout of ``block`` has now: an ``nn.Dropout``, or a number."""
    if path is None:
        return 0.0
    dropout = part_of(block, path)
    if not is_module:
        return dropout if block.training else 0.0
    return dropout.p if dropout.training else 0.0


def traced_adapter(linear: Any, name: str) -> tuple[Any, ...] | None:
    """A, B, what B adds to the bias, scale and dropout of an adapter; None unless it alone is active and unmerged."""
    if linear.merged_adapters or linear._disable_adapters or linear.lora_variant or len(linear.active_adapters) != 1:
        return None
    dropout, a, b = linear.lora_dropout[name], linear.lora_A[name], linear.lora_B[name]
    if linear.active_adapters[0] != name or a.forward is None or b.forward is None:
        return None
    dropout_p = getattr(dropout, "p", 0.0) if dropout.training else 0.0
    scale = linear.scaling[name]
    return a.weight, b.weight, None if b.bias is None else b.bias * scale, scale, dropout_p


def traced_ffn(
    block: Any, facts: tuple[Any, ...], x: Tensor, residual: Tensor | None, dropout_p: float | None
) -> Tensor | None:
    """The FFN of x, for Dynamo to trace; None where the children must be called.

    ``dropout_p``: of the hidden; None: that of the dropout which the facts name.

    It takes all it can from its arguments, and calls few functions of this library: each global costs guards.
    """
    (
        up_path, down_path, gate_path, activation_path, word, options, dropout_path, dropout_is_module, transposed,
        adapters, gate_rows, activation, switches, plain, strided, recompute,
        precision,
    ) = facts  # fmt: skip
    for tensor in (x,) if residual is None else (x, residual):
        # nn.Parameter is a global: Dynamo cannot make a constant of it.
        if type(tensor) is not plain and type(tensor) is not nn.Parameter:
            return None
        if tensor.layout is not strided or tensor.is_nested:
            return None
    parts: list[Any] = []
    for path in (up_path, down_path, gate_path, activation_path, dropout_path):
        part: Any = None if path is None else block
        # Not part_of: that global would cost a guard.
        for name in () if path is None else path.split("."):
            part = getattr(part, name)
        parts.append(part)
    up, down, gate, part, dropout = parts
    parameters = []
    factors: list[Any] = []
    # A counter, because enumerate would cost a guard.
    place = 0
    for linear in (up, down) if gate_path is None else (up, down, gate):
        # A call would read this, too: the guard makes another forward recompile.
        if linear.forward is None:
            return None
        bias = None
        if adapters is not None:
            adapter = None if adapters[place] is None else traced_adapter(linear, adapters[place])
            if adapter is None and adapters[place] is not None:
                return None
            factors.append((None, None, None, 1.0, 0.0) if adapter is None else adapter)
            linear = linear if adapter is None else linear.base_layer
            bias = factors[place][2]
        bias = linear.bias if bias is None else bias if linear.bias is None else linear.bias + bias
        parameters += [linear.weight.t() if transposed[place] else linear.weight, bias]
        place += 1  # noqa: SIM113
    w_up, b_up, w_down, b_down, w_gate, b_gate = parameters if len(parameters) == 6 else (*parameters, None, None)
    # The module that was replaced may do something else with another width.
    if x.dim() == 0 or x.shape[-1] != w_up.shape[1]:
        return None
    if gate_rows is not None:
        w_gate, w_up = split_gate(w_up, gate_rows)
        b_gate, b_up = (None, None) if b_up is None else split_gate(b_up, gate_rows)
    if activation_path is not None:
        if (part != word) if word is not None else (getattr(part, "forward", part) is None):
            return None
        for name, value in options:
            if getattr(part, name) != value:
                return None
    if dropout_p is None:
        if dropout_path is None:
            dropout_p = 0.0
        elif dropout_is_module:
            dropout_p = dropout.p if dropout.training else 0.0
        else:
            dropout_p = dropout if block.training else 0.0
    if recompute is None:
        recompute, precision = block.recompute, block.precision
        # A Float8 that was assigned: the graph takes its word.
        precision = getattr(precision, "word", precision)
    if adapters is not None:
        (up_a, up_b, _, up_scale, _), (down_a, down_b, _, down_scale, _) = factors[:2]
        gate_a, gate_b, _, gate_scale, _ = factors[2] if gate_path is not None else (None, None, None, 1.0, 0.0)
        drops = [factor[4] for factor in factors if factor[0] is not None]
        # A probability that changes becomes a SymFloat, for which this is the only guard.
        for p in drops:
            if p != drops[0]:
                return None
        if gate_rows is not None and up_b is not None:
            gate_a, gate_scale = up_a, up_scale
            gate_b, up_b = split_gate(up_b, gate_rows)
        if dropout_p:
            return None
        y = _adapted_operation(
            x, w_up, w_down, b_up, b_down, w_gate, b_gate, up_a, up_b, down_a, down_b, gate_a, gate_b, activation,
            up_scale, down_scale, gate_scale, drops[0], gate_rows is not None, None, precision, switches,
        )[0]  # fmt: skip
        return y if residual is None else y + residual
    y = _operation(
        x, w_up, w_down, b_up, b_down, w_gate, b_gate, activation, dropout_p, f"{recompute}", residual, None,
        precision, switches,
    )  # fmt: skip
    return y[0]
