"""What `moe_ffn` and `FusedMoE` say of arguments that are wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import functional
from tests.support.moe_operands import moe_inputs
from tests.support.operands import DEVICE


def tensors(**options: Any) -> dict[str, Tensor | None]:
    return moe_inputs((2, 5), 8, 6, 3, 2, **options)


def refused(error: type[Exception], words: str, changed: dict[str, Any], **options: Any) -> None:
    with pytest.raises(error, match=re.escape(words)):
        functional.moe_ffn(**(tensors(**options) | changed))


def test_layouts_have_their_own_shapes() -> None:
    with pytest.raises(ValueError, match="w_gate must be None, because gate_and_up='interleaved'"):
        functional.moe_ffn(**tensors(), gate_and_up="interleaved")
    merged = tensors(layout="concatenated")
    with pytest.raises(ValueError, match=re.escape("expected [E, 2 N, K], where 2 N is even")):
        functional.moe_ffn(**(merged | {"w_up": torch.zeros(3, 7, 8, device=DEVICE)}), gate_and_up="concatenated")
    with pytest.raises(ValueError, match=re.escape("expected [E, K, N] = [3, 8, 12]")):
        functional.moe_ffn(**merged)
    with pytest.raises(
        ValueError, match=re.escape("expected [*B, M, K] with K = 12, as w_up is [E, K, 2 N] = [3, 12, 8], unless")
    ):
        functional.moe_ffn(**merged, gate_and_up="concatenated", transposed=True)


def test_dtypes_and_devices() -> None:
    index = tensors()["top_k_index"]
    refused(TypeError, "expected torch.int64 or torch.int32", {"top_k_index": index.to(torch.int16)})
    refused(TypeError, "expected a real floating-point dtype", {"top_k_weights": index})
    refused(TypeError, "expected the dtype of x, torch.float32", {"w_down": torch.zeros(3, 8, 6, dtype=torch.float16)})
    refused(ValueError, "expected the device of x", {"top_k_index": torch.zeros(2, 5, 2, dtype=int, device="meta")})
    refused(TypeError, "has the layout torch.sparse_coo", {"top_k_weights": torch.zeros(2, 5, 2).to_sparse()})


@pytest.mark.parametrize(
    ("option", "value", "error", "words"),
    [
        ("activation", "swish2", ValueError, "activation"),
        ("gate_and_up", "merged", ValueError, "gate_and_up must be one of separate, concatenated, interleaved"),
        ("transposed", 1, TypeError, "transposed must be True or False"),
        ("recompute", "auto", TypeError, "recompute must be True or False"),
        ("limit", -1.0, ValueError, "limit must be a positive number or None, got -1.0"),
        ("limit", 0, ValueError, "limit must be a positive number or None"),
        ("limit", "7", TypeError, "limit must be a positive number or None"),
        ("limit", float("nan"), ValueError, "limit must be a positive number or None"),
        ("up_offset", True, TypeError, "up_offset must be a finite number"),
        ("up_offset", float("inf"), ValueError, "up_offset must be a finite number"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: Any, error: type[Exception], words: str) -> None:
    refused(error, words, {option: value})


@pytest.mark.parametrize(("option", "value"), [("limit", 7.0), ("up_offset", 1.0)])
def test_what_applies_to_a_gate_needs_one(option: str, value: float) -> None:
    refused(ValueError, f"{option} needs a gate", {option: value}, gated=False)
    b_gate = torch.zeros(3, 6, device=DEVICE)
    refused(ValueError, "b_gate must be None, because w_gate is None", {"b_gate": b_gate}, gated=False)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"d_model": 0}, ValueError, "d_model must be a positive int"),
        ({"d_ff": 2.5}, TypeError, "d_ff must be a positive int"),
        ({"num_experts": -1}, ValueError, "num_experts must be a positive int"),
        ({"top_k": 5}, ValueError, "top_k must be at most num_experts = 4, got 5"),
        ({"scores": "linear"}, ValueError, "scores must be one of softmax, sigmoid, got 'linear'"),
        ({"normalize": 1}, TypeError, "normalize must be True or False"),
        ({"gated": None}, TypeError, "gated must be True or False"),
        ({"bias": 0}, TypeError, "bias must be True or False"),
        ({"recompute": "auto"}, TypeError, "recompute must be True or False"),
        ({"shared_d_ff": 0}, ValueError, "shared_d_ff must be a positive int"),
        ({"activation": "nothing"}, ValueError, "activation"),
    ],
)
def test_arguments_of_the_module(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        fl.FusedMoE(**({"d_model": 8, "d_ff": 6, "num_experts": 4, "top_k": 2} | options))
