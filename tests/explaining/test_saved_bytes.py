"""The bytes that ``explain`` says are kept for the backward pass are those that autograd keeps, whatever the path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import functional
from fusedlayers.kernels.activations import ACTIVATIONS

ROWS, WIDTH, HIDDEN, RANK, EXPERTS, CLASSES = 72, 64, 96, 8, 3, 200
SHAPES = {
    "x": (ROWS, WIDTH), "w_up": (HIDDEN, WIDTH), "w_gate": (HIDDEN, WIDTH), "w_down": (WIDTH, HIDDEN),
    "b_up": (HIDDEN,), "b_down": (WIDTH,), "up_a": (RANK, WIDTH), "up_b": (HIDDEN, RANK), "gate_a": (RANK, WIDTH),
    "gate_b": (HIDDEN, RANK), "down_a": (RANK, HIDDEN), "down_b": (WIDTH, RANK), "weight": (HIDDEN, WIDTH),
    "a": (2, ROWS, WIDTH), "b": (2, WIDTH, HIDDEN), "c": (2, HIDDEN, WIDTH), "queries": (3, 20, WIDTH),
    "documents": (4, 40, WIDTH), "dy": (ROWS, WIDTH), "z": (ROWS, HIDDEN), "z_gate": (ROWS, HIDDEN),
    "input": (ROWS, WIDTH), "linear_weight": (CLASSES, WIDTH), "linear_bias": (CLASSES,),
}  # fmt: skip
# The parameters of a layer, which are not counted.
OF_A_LAYER = re.compile("w_(up|gate|down)|b_(up|gate|down)|(up|gate|down)_[ab]|linear_(weight|bias)")
# The operands that want no gradient: the input of a network, or what is trained before or elsewhere.
CONSTANT = re.compile("x|a|queries|dy|input")
FROZEN = re.compile("w_(up|gate|down)|b_(up|gate|down)|linear_(weight|bias)|weight|b|c|documents")


class Case(NamedTuple):
    function: Callable[..., Any]
    operands: str
    options: dict[str, Any]


def tensors(case: Case, without: re.Pattern[str] | None) -> dict[str, Any]:
    """The operands of the call, all of which want a gradient but those of such names."""
    shapes = SHAPES
    if case.function is functional.moe_ffn:
        shapes = SHAPES | {name: (EXPERTS, *SHAPES[name]) for name in ("w_up", "w_gate", "w_down")}
    made: dict[str, Any] = {}
    for name in case.operands.split():
        if name == "target":
            made[name] = torch.randint(CLASSES, (ROWS,))
        elif name == "probabilities":
            made["target"] = torch.rand(ROWS, CLASSES).softmax(-1)
        elif name == "routing":
            made["top_k_weights"], made["top_k_index"] = torch.rand(ROWS, EXPERTS).topk(2)
            made["top_k_weights"].requires_grad_()
        elif name == "mask":
            made[name] = torch.rand(2, HIDDEN) < 0.8
        else:
            made[name] = (torch.randn(shapes[name]) / 8).requires_grad_(not (without and without.fullmatch(name)))
    return made


def kept_bytes(case: Case, given: dict[str, Any]) -> int:
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = case.function(**given, **case.options)
    for name, tensor in given.items():
        # hidden_gradient is no layer: its weight is an operand as others are.
        if OF_A_LAYER.fullmatch(name) and case.function is not functional.hidden_gradient:
            storages.pop(tensor.untyped_storage().data_ptr(), None)
    del results
    return sum(storage.nbytes() for storage in storages.values())


def cases() -> Iterator[tuple[str, Case]]:
    """By name: every operation, and every activation and option that changes what is kept."""
    adapters = "up_a up_b down_a down_b"
    for activation in ("gelu", "relu", "quick_gelu"):
        for gate in ("", " gated"):
            layer = "x w_up w_down b_up b_down" + (" w_gate" if gate else "")
            both = f"{adapters} gate_a gate_b" if gate else adapters
            for name, function, operands, options in (
                ("ffn", functional.ffn, layer, {}),
                ("ffn dropout", functional.ffn, layer, {"dropout_p": 0.25}),
                ("ffn recompute", functional.ffn, layer, {"recompute": True}),
                ("lora_ffn", functional.lora_ffn, f"{layer} {both}", {}),
                ("lora_ffn up", functional.lora_ffn, f"{layer} up_a up_b", {}),
                ("lora_ffn dropout", functional.lora_ffn, f"{layer} {both}", {"adapter_dropout_p": 0.25}),
            ):
                yield f"{name} {activation}{gate}", Case(function, operands, {"activation": activation, **options})
        chosen = {"activation": activation}
        yield f"gemm_gemm {activation}", Case(functional.gemm_gemm, "a b c", chosen)
        yield f"gemm_reduce {activation}", Case(functional.gemm_reduce, "a b", {**chosen, "op": "sum", "dim": -1})
        yield f"hidden_gradient {activation}", Case(functional.hidden_gradient, "dy w_down z z_gate", chosen)
        yield f"moe_ffn {activation}", Case(functional.moe_ffn, "x routing w_up w_down w_gate", chosen)
    for activation in ACTIVATIONS:
        yield f"linear {activation}", Case(functional.linear, "x weight", {"activation": activation})
    for op in ("sum", "mean", "sumsq", "max", "min", "absmax", "logsumexp"):
        for mask in ("", " mask"):
            yield f"gemm_reduce {op}{mask}", Case(functional.gemm_reduce, f"a b{mask}", {"op": op, "dim": -1})
        yield f"gemm_reduce {op} rows", Case(functional.gemm_reduce, "a b", {"op": op, "dim": -2})
    yield "maxsim", Case(functional.maxsim, "queries documents", {})
    yield "weight_gradient", Case(functional.weight_gradient, "dy x", {})
    for recompute in (False, True):
        for name, options in (
            ("mean", {}),
            ("none", {"reduction": "none"}),
            ("softcap", {"softcap": 5.0}),
            ("z_loss", {"z_loss": 0.1}),
        ):
            given = "input linear_weight target linear_bias"
            more = {**options, "recompute": recompute}
            yield f"linear_cross_entropy {name} {recompute}", Case(functional.linear_cross_entropy, given, more)
        for entropy in (False, True):
            more = {"return_entropy": entropy, "recompute": recompute}
            name = f"linear_log_probs {entropy} {recompute}"
            yield name, Case(functional.linear_log_probs, "input linear_weight target", more)
        yield (
            f"moe_ffn {recompute}",
            Case(functional.moe_ffn, "x routing w_up w_down", {"activation": "relu", "recompute": recompute}),
        )
    yield (
        "linear_cross_entropy probabilities",
        Case(functional.linear_cross_entropy, "input linear_weight probabilities", {}),
    )
    limited = {"limit": 7.0, "up_offset": 1.0, "activation": "quick_gelu"}
    yield "moe_ffn limited", Case(functional.moe_ffn, "x routing w_up w_down w_gate", limited)


def calls() -> Iterator[Any]:
    """Every case on every path, trained whole, with frozen weights, and with an input that wants no gradient."""
    for name, case in cases():
        backends = ["torch", "triton"]
        if case.options.get("op") in ("sum", "mean"):
            backends.append("auto")  # without a product
        if case.function is functional.gemm_gemm and case.options["activation"] == "identity":
            backends.append("auto")  # reassociated
        if "probabilities" in case.operands:
            backends.remove("triton")  # which takes classes alone
        if case.function is functional.hidden_gradient:
            backends.remove("torch")  # gradients of gradients keep what torch happens to need for each activation
        for backend in backends:
            marks = [pytest.mark.interpreter] if backend == "triton" else []
            for wanted, without in (("all", None), ("frozen", FROZEN), ("constant input", CONSTANT)):
                yield pytest.param(case, backend, without, id=f"{name}, {backend}, {wanted}", marks=marks)


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize(("case", "backend", "without"), list(calls()))
def test_explain_says_what_is_kept(
    case: Case, backend: str, without: re.Pattern[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    given = tensors(case, without)
    text = fl.explain(case.function, **given, **case.options, details=True)
    found = re.search(r"\n  saved bytes +([\d,]+) ", text)
    said = int(found[1].replace(",", ""))
    assert said == pytest.approx(kept_bytes(case, given), rel=0.01)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("op", "backend", "gain"),
    [
        ("logsumexp", "triton", "keeps 87,168 bytes for the backward pass instead of 141,888"),
        ("max", "triton", "the kernels never write the product"),
        ("sum", "auto", "no product of matrices"),
    ],
)
def test_bytes_are_a_gain_where_they_are_clearly_fewer(
    op: str, backend: str, gain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a maximum torch keeps no product either, and a sum gains more than the bytes of an operand."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    case = Case(functional.gemm_reduce, "a b", {"op": op, "dim": -1})
    assert gain in fl.explain(case.function, **tensors(case, None), **case.options, details=True).splitlines()[0]
