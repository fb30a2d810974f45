"""Bad input of ``maxsim``: masks and offsets that do not fit, named with what was expected, before anything happens."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fusedlayers as fl
from fusedlayers import functional
from tests.functional.test_arguments import refused
from tests.support.operands import needs_kernels

# As valid_maxsim of test_arguments: three queries of five tokens, four documents of eighteen, six dimensions.
QUERY_MASK = torch.ones(3, 5, dtype=torch.bool)
DOCUMENT_MASK = torch.ones(4, 18, dtype=torch.bool)
PACKED = {
    "queries": torch.randn(15, 6),
    "documents": torch.randn(36, 6),
    "cu_seqlens_queries": torch.tensor([0, 5, 5, 15]),
    "cu_seqlens_documents": torch.tensor([0, 18, 36], dtype=torch.int32),
}


def test_what_the_errors_are_measured_against_is_right() -> None:
    queries, documents = torch.randn(3, 5, 6), torch.randn(4, 18, 6)
    assert functional.maxsim(queries, documents, QUERY_MASK, DOCUMENT_MASK).shape == (3, 4)
    assert functional.maxsim(**PACKED).shape == (3, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"query_mask": QUERY_MASK[:, 1:]},
            r"query_mask of shape \[3, 4\] .*: expected \[Q, Lq\] = \[3, 5\], as queries is .* = \[3, 5, 6\]$",
        ),
        (
            {"document_mask": DOCUMENT_MASK[0]},
            r"document_mask of shape \[18\] .*: expected \[D, Ld\] = \[4, 18\], as documents is .* = \[4, 18, 6\]$",
        ),
        ({"query_mask": QUERY_MASK.to("meta")}, r"query_mask .* on meta: expected the device of queries, cpu$"),
        (
            {"cu_seqlens_queries": torch.tensor([0, 5])},
            r"queries of shape \[3, 5, 6\] .*: expected \[ΣLq, d\], two .*, because cu_seqlens_queries packs queries$",
        ),
    ],
)
def test_padded_shapes(changes: dict[str, Any], words: str) -> None:
    refused("maxsim", ValueError, f"^{words}", **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"document_mask": DOCUMENT_MASK},
            r"document_mask must be None, because cu_seqlens_documents packs documents$",
        ),
        (
            {"query_mask": QUERY_MASK},
            r"query_mask must be None, because cu_seqlens_queries packs queries$",
        ),
        (
            {"cu_seqlens_documents": torch.tensor([[0, 36]])},
            r"cu_seqlens_documents of shape \[1, 2\] .*: expected \[D\+1\], one dimension, because cu_seqlens_",
        ),
        (
            {"cu_seqlens_documents": torch.tensor([], dtype=torch.int64)},
            r"cu_seqlens_documents of shape \[0\] .*: expected the offsets 0, …, total$",
        ),
        (
            {"cu_seqlens_queries": PACKED["cu_seqlens_queries"].to("meta")},
            r"cu_seqlens_queries .* on meta: expected the device of queries, cpu$",
        ),
        (
            {"cu_seqlens_queries": torch.tensor([1, 5, 15])},
            r"cu_seqlens_queries of shape \[3\] and dtype torch.int64 on cpu: expected 0 first, got 1$",
        ),
        (
            {"cu_seqlens_documents": torch.tensor([0, 7, 6, 36])},
            r"cu_seqlens_documents of .*: expected values that never decrease, got 7, 6 at 1 and 2$",
        ),
        (
            {"cu_seqlens_documents": torch.tensor([0, 18, 35])},
            r"cu_seqlens_documents of .*: expected 36 last, the number of packed tokens, got 35$",
        ),
        ({"queries": torch.randn(0, 6), "cu_seqlens_queries": torch.tensor([0, 1])}, r"cu_seqlens_queries .* 0 last"),
    ],
)
def test_packed_shapes_and_values(changes: dict[str, Any], words: str) -> None:
    refused("maxsim", ValueError, f"^{words}", **PACKED | changes)


@pytest.mark.parametrize("observed", [False, True], ids=["plain", "observed"])
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_kernels)])
def test_values_of_offsets_in_a_call_like_the_last_one(
    backend: str, observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every path: a call that is recognised by its shapes has other offsets."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", backend)
    with FlopCounterMode(display=False) if observed else nullcontext():
        for _ in range(3):
            functional.maxsim(**PACKED)
        for name, wrong in (("cu_seqlens_queries", [1, 6, 6, 16]), ("cu_seqlens_documents", [0, -18, 18])):
            offsets = torch.tensor(wrong, dtype=PACKED[name].dtype)
            for function in (functional.maxsim, fl.MaxSim()):
                with pytest.raises(ValueError, match=rf"^{name} of shape .*: expected (0 first|values that never)"):
                    function(**PACKED | {name: offsets})


@pytest.mark.parametrize("name", ["query_mask", "document_mask", "cu_seqlens_queries", "cu_seqlens_documents"])
def test_what_is_no_tensor(name: str) -> None:
    refused("maxsim", TypeError, rf"^{name} must be a torch.Tensor or None, got list$", **{name: [True]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8], ids=str)
def test_masks_that_are_not_boolean(dtype: torch.dtype) -> None:
    for name, mask in (("query_mask", QUERY_MASK), ("document_mask", DOCUMENT_MASK)):
        words = rf"^{name} of .* dtype {re.escape(str(dtype))} .*: expected torch.bool, True where an element"
        refused("maxsim", TypeError, words, **{name: mask.to(dtype)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool], ids=str)
def test_offsets_that_are_not_integers(dtype: torch.dtype) -> None:
    for name in ("cu_seqlens_queries", "cu_seqlens_documents"):
        words = rf"^{name} of .* dtype {re.escape(str(dtype))} .*: expected torch.int64 or torch.int32$"
        refused("maxsim", TypeError, words, **PACKED | {name: PACKED[name].to(dtype)})
