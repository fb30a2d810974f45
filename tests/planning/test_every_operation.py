"""What holds of the plans of every operation: what kernels do not take, and what auto mode takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fusedlayers.planning import (
    Call,
    Device,
    HiddenGradientProblem,
    LinearProblem,
    MaxSimProblem,
    Problem,
    ReduceProblem,
    WeightGradientProblem,
    plan,
)
from fusedlayers.planning.linear_cross_entropy import LossProblem
from fusedlayers.planning.lora_ffn import LoRAProblem
from fusedlayers.planning.moe_ffn import MoeProblem
from tests.support.records import A100, CPU, H200, where

BF16, GELU = "bfloat16", "gelu_tanh"
BOTH = {"needs_data_gradient": True, "needs_weight_gradient": True}
_FFN = Problem("ffn", batch=1, M=2**20, K=64, N=256, O=64, dtype=BF16, activation=GELU)
_LORA = LoRAProblem("lora_ffn", 1, 8192, 512, 2048, 512, BF16, GELU, rank_up=16, rank_down=16)
_REDUCED = ReduceProblem(batch=64, kept=1024, reduced=1024, K=128, dtype=BF16, op="max")
_LOSS = LossProblem(4096, 64, 4096, BF16, reduction="mean", **BOTH)
_MAXSIM = MaxSimProblem(queries=128, documents=128, query_tokens=4096, document_tokens=38_400, K=128, dtype=BF16)
_EXPERTS = MoeProblem(16_384, 2048, 768, 128, 8, BF16, gated=True)
# A call by its name, and the path that kernels take it on.
CALLS: dict[str, tuple[Call, str]] = {
    "ffn": (_FFN, "fused"),
    "ffn, training": (replace(_FFN, **BOTH), "fused"),
    "ffn, epilogue": (_FFN, "epilogue"),
    "ffn, training, epilogue": (replace(_FFN, **BOTH), "epilogue"),
    "lora_ffn": (_LORA, "epilogue"),
    "lora_ffn, training": (replace(_LORA, needs_data_gradient=True, needs_adapter_gradient=True), "epilogue"),
    "gemm_gemm": (Problem("gemm_gemm", 128, 1024, 128, 1024, 128, BF16, "relu"), "fused"),
    "linear": (LinearProblem(M=64, N=64, K=65_536, dtype=BF16), "fused"),
    "weight_gradient": (WeightGradientProblem(M=65_536, O=1024, K=256, dtype=BF16), "fused"),
    "hidden_gradient": (HiddenGradientProblem(M=8192, N=2048, O=512, dtype=BF16, activation=GELU), "fused"),
    **{f"gemm_reduce, {op}": (replace(_REDUCED, op=op), "fused") for op in ("max", "sumsq", "logsumexp")},
    "gemm_reduce, training": (replace(_REDUCED, needs_kept_gradient=True), "fused"),
    "loss head": (_LOSS, "chunked"),
    "loss head, single tokens": (replace(_LOSS, reduction="none"), "fused"),
    "loss head, recomputed": (replace(_LOSS, recompute=True), "fused"),
    "maxsim": (_MAXSIM, "fused"),
    "maxsim, training": (replace(_MAXSIM, needs_query_gradient=True, needs_document_gradient=True), "fused"),
    "moe_ffn": (_EXPERTS, "epilogue"),
    "moe_ffn, training": (replace(_EXPERTS, training=True), "epilogue"),
}
every_call = pytest.mark.parametrize(("call", "path"), CALLS.values(), ids=CALLS)


def changed(call: Call, **change: Any) -> Call:
    return replace(call, **change)


def rejected(call: Call, device: Device, path: str, backend: str = "auto") -> str:
    """Why this path does not run a call that torch runs."""
    made = plan(call, device, backend)
    assert made.path == "torch"
    assert made.workspace_bytes == 0
    return dict(made.rejected)[path]


@pytest.mark.parametrize(
    ("change", "device", "words"),
    [
        ({}, replace(H200, triton=False), "Triton is not installed"),
        ({}, CPU, "the kernels need a CUDA or ROCm GPU, and the tensors are on device type cpu"),
        ({"dtype": "float64"}, H200, "the kernels take float16, bfloat16, float32, not float64"),
        ({"subclass": "DTensor"}, H200, "an operand is a DTensor"),
        ({"empty": True}, H200, "there is nothing to compute"),
    ],
    ids=["no Triton", "CPU", "float64", "DTensor", "empty"],
)
@every_call
def test_what_the_kernels_do_not_take(
    call: Call, path: str, change: dict[str, Any], device: Device, words: str
) -> None:
    if "empty" in change:
        change = {next(name for name in ("M", "document_tokens", "reduced") if hasattr(call, name)): 0}
    wishes = [{}, {"split_k": 3}, {"atomic": True}] if isinstance(call, LinearProblem) else [{}]
    for backend in ("auto", "triton"):
        for wish in wishes:
            other = changed(call, **change, **wish)
            assert words in rejected(other, device, path, backend)
            assert words in str(plan(other, device, backend).unsupported)


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@every_call
def test_auto_mode_takes_what_was_measured_faster(call: Call, path: str, captured: bool) -> None:
    call = changed(call, captured=captured)
    made = plan(call, where(H200, call, {path: 0.5}))
    assert made.path == path
    if not isinstance(call, LinearProblem):  # of whose products each has its own reason
        assert dict(made.rejected)["torch"].startswith(f"{path} is expected to be ")
    assert rejected(call, where(H200, call, {path: 1.5}), path).startswith("torch is expected to be ")
    # Launched and replayed calls are two questions, and compiled code is asked both.
    for launched, replayed in ((0.5, 1.5), (1.5, 0.5)):
        apart = where(H200, call, {path: launched}, {path: replayed})
        assert plan(call, apart).path == (path if (replayed if captured else launched) < 1 else "torch")
        if hasattr(call, "compiled"):
            assert plan(changed(call, captured=False, compiled=True), apart).path == "torch"


@every_call
def test_what_was_not_measured_is_left_to_torch(call: Call, path: str) -> None:
    device = where(H200, call, {path: 0.5})
    assert rejected(call, device, path, "torch") == "the backend is set to torch"
    assert "float32 products in IEEE precision" in rejected(changed(call, dtype="float32"), device, path)
    another = where(H200, LinearProblem(9, 8, 9, "bfloat16", needs_bias_gradient=True), {"fused": 0.5})
    assert "nothing like it was measured" in rejected(call, another, path)
    for unlike in (A100, replace(H200, backend="generic")):
        words = f"not measured on {unlike.architecture}"
        if isinstance(call, Problem) and path == "epilogue":
            words = "only the warp-specialised kernels were measured"
        assert words in rejected(call, unlike, path)
        assert plan(call, unlike, "triton").path != "torch"
