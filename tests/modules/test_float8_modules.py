"""Modules with a precision: their arguments, their calls, copies and pickles, and what ``explain`` says of them."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch

import fusedlayers as fl
from fusedlayers.functional.dispatch import decisions
from tests.support.float8_twins import in_8_bits

BFLOAT16 = torch.bfloat16
M, K, N = 40, 64, 96


def blocks(**options: Any) -> list[torch.nn.Module]:
    return [
        fl.FusedFFN(K, N, dtype=BFLOAT16, **options),
        fl.FusedFFN(K, N, "silu", gated=True, bias=False, dtype=BFLOAT16, **options),
        fl.SplitKLinear(K, N, dtype=BFLOAT16, **options),
    ]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: fl.Float8("delayed"), "recipe must be one of 'rowwise', 'rowwise_with_gw_hp', got 'delayed'"),
        (lambda: fl.Float8(weight_gradient="e5m2"), "weight_gradient must be one of 'auto', 'fp8', 'bf16', got 'e5m2'"),
        (lambda: fl.Float8("rowwise_with_gw_hp", "fp8"), 'weight_gradient must be "auto" or "bf16" with'),
        (lambda: fl.FusedFFN(K, N, precision="int8"), "precision must be None, 'fp8', .* or a fusedlayers.Float8"),
        (lambda: fl.FusedFFN(K, N, precision=fl.Float8(skip="a")), "expected no skip, .*, got 'a'"),
        (lambda: fl.SplitKLinear(K, N, precision=8), r"precision must be .*, got 8 \(int\)"),  # type: ignore[arg-type]
        (lambda: fl.functional.linear(torch.ones(2, 2), torch.ones(2, 2), precision="x"), "precision must be .*'x'"),
    ],
)
def test_wrong_values_are_named(make: Any, named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        make()


def test_a_recipe_is_plain_data() -> None:
    assert fl.Float8() == fl.Float8("rowwise")
    assert (fl.Float8().word, fl.Float8(weight_gradient="fp8").word) == ("fp8", "rowwise")
    assert fl.Float8(weight_gradient="bf16").word == fl.Float8("rowwise_with_gw_hp").word == "rowwise_with_gw_hp"
    assert hash(fl.Float8()) == hash(copy.deepcopy(fl.Float8()))
    assert pickle.loads(pickle.dumps(fl.Float8())) == fl.Float8()
    assert fl.FusedFFN(K, N, precision=fl.Float8()).precision == "fp8"
    assert "precision='fp8'" in repr(fl.SplitKLinear(K, N, precision="fp8"))
    assert "precision" not in repr(fl.SplitKLinear(K, N))


@pytest.mark.parametrize("place", range(3))
def test_calls_again_and_again(place: int) -> None:
    """In 8 bits once they can, and as without a precision elsewhere."""
    torch.manual_seed(0)
    block = blocks(precision="fp8")[place]
    torch.manual_seed(0)
    plain = blocks()[place]
    x, few = torch.randn(M, K).to(BFLOAT16), torch.randn(2, K).to(BFLOAT16)
    for _ in range(4):
        assert torch.equal(block(x), plain(x))
    with in_8_bits():
        expected = block(x)
        for _ in range(4):
            with decisions() as taken:
                assert torch.equal(block(x), expected)
                assert torch.equal(block(few), plain(few))
            assert sum(count for name, count in taken.items() if "float8" in name) == 1
            with torch.no_grad():
                assert torch.equal(block(x), expected)
        for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
            assert torch.equal(twin(x), expected)
        # Set between two calls.
        block.precision = None
        assert torch.equal(block(x), plain(x))
        block.precision = "fp8"
        assert torch.equal(block(x), expected)
    assert not torch.equal(expected, plain(x))


def test_a_pickle_from_before_runs_in_16_bits() -> None:
    for block in blocks():
        del block.__dict__["precision"]
        assert block.precision is None
        assert block(torch.randn(M, K).to(BFLOAT16)).dtype == BFLOAT16


@pytest.mark.parametrize("place", range(3))
def test_what_explain_says(place: int) -> None:
    block = blocks(precision="fp8")[place]
    x = torch.randn(M, K).to(BFLOAT16)
    text = fl.explain(block, x)
    # The interpreter counts as Triton.
    assert re.match(r"Runs in 16 bits \(.* (do not run here|need a CUDA)", text.lines[0])
    assert re.search(r"precision  .* (do not run here|need a CUDA)", fl.explain(block, x, details=True))
    with in_8_bits():
        found = fl.explain(block, x)
        assert found.path == "float8"
        assert "weight gradients in 8 bits" in found.lines[0]
        assert "fp8, a scale for each row" in fl.explain(block, x, details=True)
        assert "the call is too small" in fl.explain(block, x[:2]).lines[0]
        assert fl.explain(block.to(torch.float32), x.float()).path != "float8"


def test_reasons_on_a_gpu_that_is_not_there() -> None:
    def said(width: int, hidden: int, rows: int = 65_536, dtype: torch.dtype = BFLOAT16, **options: Any) -> str:
        block = fl.FusedFFN(width, hidden, precision="fp8", device="meta", dtype=dtype, **options)
        x = torch.empty(rows, width, device="meta", dtype=dtype)
        return str(fl.explain(block, x, on="H100").lines[0])

    assert "in the float8 kernels" in said(1024, 4096)
    assert "in the float8 kernels" in said(2048, 8192, dtype=torch.float16, gated=True)
    assert "a width of 1032 is no multiple of 16" in said(1032, 4096)
    assert "a width of 512 is below 1,024" in said(512, 4096)
    assert "too small: 8,589,934,592 FLOPs in a kernel of the forward pass, launched" in said(1024, 4096, 1024)
    assert "operands of float32 are not quantised" in said(1024, 4096, dtype=torch.float32)
    assert "recompute=True forbids" in said(1024, 4096, recompute=True)
    assert "keep more bytes than recompute= allows" in said(1024, 4096, recompute=2**20)


def test_what_another_gpu_would_do_in_8_bits() -> None:
    """A CPU cannot, and explains the call in 16 bits; an H100 would run it in 8."""
    for width, expected in (
        (2048, "would run it in the float8 kernels"),
        (512, "would run it in the epilogue kernels"),
    ):
        block = fl.FusedFFN(width, 4 * width, precision="fp8", device="meta", dtype=BFLOAT16, bias=False)
        x = torch.empty(65_536, width, device="meta", dtype=BFLOAT16)
        assert expected in fl.explain(block, x).lines[-1]
