"""The FFN under autograd is as torch's: frozen inputs, saved tensors, autocast, repetition, second derivatives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedlayers import functional, reference
from fusedlayers.functional.operation import OPERATIONS
from fusedlayers.kernels import gemm_gemm as kernels
from fusedlayers.kernels.activations import ACTIVATIONS
from fusedlayers.kernels.gemm_gemm import Operands, WeightGradients
from tests.support.operands import (
    DEVICE,
    EPILOGUE,
    INTEGERS,
    ON_GPU,
    PATHS,
    assert_equal,
    ffn_inputs,
    in_float64,
    leaves,
    like_result,
    on_path,
    results,
    saved,
)
from tests.support.selection import FULL

# Of subsets that are neither one input nor all but one, every third must do: on a GPU each compiles the kernels anew.
STEP = 1 if FULL and not ON_GPU else 3


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The gradients that the backward kernels are asked for, in the order of the calls."""
    names: list[str] = []
    data_gradient, weight_gradients = kernels.data_gradient, kernels.weight_gradients

    def recorded_data(*args: Any, **options: Any) -> Any:
        names.append("x")
        return data_gradient(*args, **options)

    def recorded_weights(operands: Operands, dy: Tensor, wanted: WeightGradients, *args: Any) -> WeightGradients:
        roles = ("w_up", "w_gate", "w_down", "b_up", "b_gate")
        asked = [role for role, want in zip(roles, wanted, strict=True) if want]
        assert asked, "a launch for nothing"
        names.extend(asked)
        return weight_gradients(operands, dy, wanted, *args)

    monkeypatch.setattr(kernels, "data_gradient", recorded_data)
    monkeypatch.setattr(kernels, "weight_gradients", recorded_weights)
    return names


@pytest.mark.parametrize("frozen_count", range(9))
@pytest.mark.parametrize("path", PATHS)
def test_every_subset_of_frozen_inputs(path: str, frozen_count: int, launched: list[str]) -> None:
    """The same gradients as with nothing frozen, None for the frozen ones, no kernel for a gradient nobody wants."""
    inputs = ffn_inputs(5, 4, 6, 4, gated=True, residual=True, draw=INTEGERS[torch.float32])
    dy = like_result(inputs, INTEGERS[torch.float32])
    with on_path(path) as options:
        everything = results(functional.ffn, inputs, dy, activation="relu", **options)
        for frozen in list(itertools.combinations(inputs, frozen_count))[:: STEP if 1 < frozen_count < 7 else 1]:
            launched.clear()
            if frozen_count == len(inputs):
                y = functional.ffn(**leaves(inputs, frozen), activation="relu", **options)
                assert not y.requires_grad
                assert torch.equal(y, everything["y"])
                continue
            ours = results(functional.ffn, inputs, dy, frozen, activation="relu", **options)
            assert_equal(ours, everything | {f"d{name}": None for name in frozen})
            needed = [name for name in inputs if name not in {*frozen, "b_down", "residual"}]
            assert sorted(launched) == (sorted(needed) if path == "kernels" else [])


@pytest.mark.parametrize("path", PATHS[:2])
def test_the_hidden_is_not_saved(path: str) -> None:
    """What is kept is inputs (no new memory) and the seed."""
    inputs = leaves(ffn_inputs(15, 4, 6, 4, gated=True, residual=True))
    with on_path(path) as options:
        new = saved(lambda: functional.ffn(**inputs, dropout_p=0.5, **options), *inputs.values())
    assert [(tensor.shape, tensor.dtype) for tensor in new] == [((1,), torch.int64)]


@pytest.mark.parametrize("path", [*PATHS, EPILOGUE])
def test_autocast_leaves_a_residual_as_it_is(path: str) -> None:
    """As in torch, an addition is not cast: a float32 residual stream stays float32, whatever path runs."""
    inputs = ffn_inputs(20, 9, 21, 7, residual=True)
    with torch.autocast(DEVICE.type, torch.float16):
        expected = reference.ffn(**inputs)
        with on_path(path) as options:
            y = functional.ffn(**inputs, **options)
            half = functional.ffn(**inputs | {"residual": inputs["residual"].half()}, **options)
    assert expected.dtype == y.dtype == torch.float32
    assert half.dtype == torch.float16
    assert y.sub(expected).abs().max() <= torch.finfo(torch.float16).eps * expected.abs().max()


@pytest.mark.parametrize("path", [*PATHS, EPILOGUE])
def test_autocast_casts_mixed_parameters_and_never_float64(path: str) -> None:
    inputs = ffn_inputs(20, 9, 21, 7)
    mixed = inputs | {"w_up": inputs["w_up"].half(), "b_down": inputs["b_down"].bfloat16()}
    named = leaves(mixed)
    with on_path(path) as options, torch.autocast(DEVICE.type, torch.float16):
        y = functional.ffn(**named, **options)
    y.sum().backward()
    for name, tensor in named.items():
        assert tensor is None or (tensor.grad.dtype, tensor.grad.shape) == (tensor.dtype, tensor.shape), name
    # float64 runs through torch, whatever the switch says of the kernels.
    with on_path("chunked" if path == "chunked" else "torch") as options, torch.autocast(DEVICE.type, torch.float16):
        assert functional.ffn(**in_float64(inputs), **options).dtype == torch.float64


def test_autocast_is_as_it_was_after_a_call_and_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, seen = ffn_inputs(20, 9, 21, 7), list[bool]()
    forward = type(OPERATIONS["ffn"]).forward

    def watched(*arguments: Any) -> Any:
        seen.append(torch.is_autocast_enabled(DEVICE.type))
        if len(seen) > 1:
            raise ValueError("no memory")
        return forward(*arguments)

    monkeypatch.setattr(type(OPERATIONS["ffn"]), "forward", watched)
    with on_path("kernels") as options, torch.autocast(DEVICE.type, torch.float16):
        functional.ffn(**inputs, **options)
        assert torch.is_autocast_enabled(DEVICE.type)
        with pytest.raises(ValueError, match="no memory"):
            functional.ffn(**inputs, **options)
        assert torch.is_autocast_enabled(DEVICE.type)
    assert not torch.is_autocast_enabled(DEVICE.type)
    assert seen == [False, False]


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("path", PATHS[1:])
def test_gradcheck_in_float64(path: str, activation: str, gated: bool) -> None:
    """First and second derivatives against finite differences, of the torch path and of the chunked one."""
    inputs = ffn_inputs((3, 3), 3, 4, 2, torch.float64, gated=gated, residual=True, device=torch.device("cpu"))
    named = {name: leaf for name, leaf in leaves(inputs).items() if leaf is not None}
    with on_path(path) as options:

        def call(*values: Tensor) -> Tensor:
            return functional.ffn(**dict(zip(named, values, strict=True)), activation=activation, **options)

        assert torch.autograd.gradcheck(call, [*named.values()])
        assert torch.autograd.gradgradcheck(call, [*named.values()], fast_mode=True)
