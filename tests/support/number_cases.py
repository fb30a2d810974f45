"""Operations whose numbers are compared with torch's: how their operands are drawn, and what a call gives by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.functional.operation import OPERATIONS
from fusedlayers.kernels.activations import ACTIVATIONS
from tests.support.compiled_cases import given as tensors_of
from tests.support.operands import (
    DEVICE,
    EPILOGUE,
    PATHS,
    Tensors,
    assert_draws_close,
    in_eighths,
    in_float64,
    leaves,
    mixed,
    on_path,
)

FUSED, CHUNKED, TORCH = PATHS
Draw = Callable[..., Tensor]
Results = dict[str, Tensor | None]


@dataclass(frozen=True)
class Numbers:
    """An operation with some of its options, and its operands in the letters of ``sizes``.

    ``*M`` are rows, which may have leading dims. A letter behind a slash counts the terms of a sum: the operand is
    divided by its square root.
    """

    function: str
    operands: dict[str, str]
    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    activations: tuple[str | None, ...] = ()
    paths: tuple[Any, ...] = (FUSED, TORCH)
    # The letters of what is computed between two products: so many errors are independent.
    between: str = ""
    draw: Draw = torch.randn

    @property
    def has_rows(self) -> bool:
        return any(dims.startswith("*") for dims in self.operands.values())

    @property
    def differentiates(self) -> bool:
        """Whether kernels compute a backward pass, whose numbers are compared, too."""
        return OPERATIONS[self.function].has_backward

    def ours(self, **arguments: Any) -> Any:
        return getattr(functional, self.function)(**arguments)

    def theirs(self, **arguments: Any) -> Any:
        """The oracle, which takes neither a recomputed nor a split sum."""
        arguments = {name: value for name, value in arguments.items() if name not in ("recompute", "split_k")}
        return getattr(reference, self.function)(**arguments)

    def inputs(
        self, dtype: torch.dtype = torch.float32, draw: Draw | None = None, leading: tuple[int, ...] | None = None,
        **sizes: int,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Operands by name; ``leading`` are the dims of rows, else as many as ``M`` says."""
        known, draw = self.sizes | sizes, self.draw if draw is None else draw

        def operand(described: str) -> Tensor:
            dims, _, terms = described.partition("/")
            shape: list[int] = []
            for letter in dims.split():
                rows = letter == "*M" and leading is not None
                shape += leading if rows else [known[letter.removeprefix("*")]]  # type: ignore[arg-type,list-item]
            scale = max(known[terms.strip()], 1) ** 0.5 if terms and draw is torch.randn else 1.0
            return (draw(*shape, dtype=torch.float64) / scale).to(DEVICE, dtype)

        return {name: operand(described) for name, described in self.operands.items()}

    def independent(self, tensors: Mapping[str, Tensor]) -> int | None:
        """How many errors of one draw are independent, as ``closeness`` counts them."""
        if not self.between:
            return None
        sizes: dict[str, int] = {}
        for name, tensor in tensors.items():
            letters, shape = self.operands[name].partition("/")[0].split(), tensor.shape
            sizes |= dict(zip(reversed(letters), reversed(shape), strict=False))
            if letters[0] == "*M":
                sizes["*M"] = shape[: len(shape) - len(letters) + 1].numel()
        count = 1
        for letter in self.between.split():
            count *= sizes[letter]
        return max(count, 1)


_FFN = {"x": "*M K", "w_up": "N K / K", "w_down": "O N / N", "b_up": "N", "b_down": "O", "residual": "*M O"}
_FFN_SIZES = {"M": 20, "K": 12, "N": 24, "O": 10}
_HIDDEN = {"dy": "*M O", "w_down": "O N / O", "z": "*M N"}
_HIDDEN_SIZES = {"M": 40, "N": 20, "O": 24}
_EVERY = tuple(ACTIVATIONS)
_FFN_PATHS: Any = (FUSED, CHUNKED, EPILOGUE, TORCH)
_REDUCED = {"a": "Z M K", "b": "Z K N / K", "bias": "N"}
_REDUCED_SIZES = {"Z": 2, "M": 20, "N": 21, "K": 9}

NUMBERS: dict[str, Numbers] = {
    "ffn": Numbers("ffn", _FFN, _FFN_SIZES, {}, _EVERY, _FFN_PATHS, "*M N"),
    "gated ffn": Numbers(
        "ffn", _FFN | {"w_gate": "N K / K", "b_gate": "N"}, _FFN_SIZES, {}, _EVERY, _FFN_PATHS, "*M N"
    ),
    "gemm_gemm": Numbers(
        "gemm_gemm", {"a": "Z M K", "b": "Z K N / K", "c": "Z N O / N"}, {"Z": 2, **_FFN_SIZES}, {}, (None, *_EVERY),
        between="Z M N",
    ),
    "linear": Numbers(
        "linear", {"x": "*M K", "weight": "N K / K", "bias": "N"}, {"M": 20, "N": 24, "K": 70}, {"split_k": 2},
        (None, *_EVERY),
    ),
    "weight_gradient": Numbers("weight_gradient", {"dy": "*M O", "x": "*M K"}, {"M": 40, "O": 20, "K": 24}),
    "hidden_gradient": Numbers("hidden_gradient", _HIDDEN, _HIDDEN_SIZES, {"activation": "gelu"}, (None, *_EVERY)),
    "gated hidden_gradient": Numbers(
        "hidden_gradient", _HIDDEN | {"z_gate": "*M N"}, _HIDDEN_SIZES, {"activation": "gelu"}, (None, *_EVERY)
    ),
    "max": Numbers("gemm_reduce", _REDUCED, _REDUCED_SIZES, {"op": "max"}, between="Z N", draw=in_eighths(3.0)),
    "sumsq": Numbers("gemm_reduce", _REDUCED, _REDUCED_SIZES, {"op": "sumsq", "dim": -1}, between="Z M"),
    "maxsim": Numbers(
        "maxsim", {"queries": "Q S K", "documents": "D T K"}, {"Q": 3, "S": 9, "D": 4, "T": 21, "K": 24},
        draw=in_eighths(3.0),
    ),
}  # fmt: skip


def cases(*without: str) -> list[Any]:
    """Every operation on every path that its kernels take part in, but for these operations; and on torch's path."""
    found = []
    for name, numbers in NUMBERS.items():
        for path in numbers.paths if name not in without else ():
            value, marks = (path.values[0], path.marks) if hasattr(path, "values") else (path, ())
            found.append(pytest.param(name, value, marks=marks, id=f"{name}-{value}"))
    return found


def in_kernels(found: list[Any]) -> list[Any]:
    """Of these cases those that torch's path alone does not compute."""
    return [case for case in found if case.values[1] != "torch"]


def upstream(results: list[Tensor], draw: Draw = torch.randn) -> list[Tensor]:
    """Gradients that depend on the shapes alone, rounded to what every dtype holds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drawn = [draw(*each.shape, dtype=torch.float64) for each in results]
    return [each.to(torch.bfloat16).to(torch.float16).to(result) for each, result in zip(drawn, results, strict=True)]


def outcome(
    numbers: Numbers,
    call: Callable[..., Any],
    tensors: Tensors,
    given: list[Tensor] | None = None,
    draw: Draw = torch.randn,
    **options: Any,
) -> Results:
    """Every result, and where kernels compute them the gradients of all operands for those of the results."""
    named = leaves(tensors) if numbers.differentiates else tensors
    found = call(**named, **{**numbers.options, **options})
    results = tensors_of(found)
    if numbers.differentiates:
        torch.autograd.backward(results, upstream(results, draw) if given is None else given)
    gradients = {f"d{name}": None if each is None else each.grad for name, each in named.items()}
    return {f"result {place}": each.detach() for place, each in enumerate(results)} | gradients


def assert_numbers_close(
    name: str, path: str, *draws: dict[str, Tensor], seed: Callable[[], Tensor] | None = None, **options: Any
) -> None:
    """Results and gradients pass the closeness rule, all draws together; what fails is judged again by as many others.

    ``seed`` is called before each call, seeds the dropout of ours, and returns the seed that the references replay.
    """
    numbers = NUMBERS[name]

    def compared(tensors: dict[str, Tensor]) -> tuple[Tensors, Tensors, Tensors]:
        replay = {} if seed is None else {"seed": seed()}
        with on_path(path) as own:
            ours = outcome(numbers, numbers.ours, tensors, **options, **(own if numbers.function == "ffn" else {}))
        theirs, truth = (
            outcome(numbers, numbers.theirs, each, **options, **replay) for each in (tensors, in_float64(tensors))
        )
        return ours, theirs, truth

    found = [compared(tensors) for tensors in draws]
    again = (compared(mixed(tensors)) for tensors in draws)  # type: ignore[arg-type]
    independent = numbers.independent(draws[0])
    assert_draws_close(found, independent=independent, again=again)
