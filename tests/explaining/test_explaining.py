"""``explain``: every line of it, for functions, modules and replaced modules, here and as it would be on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace as changed
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers import explaining, functional, planning
from fusedlayers.functional import dispatch
from fusedlayers.planning import Device, Problem
from tests.support.records import where

H200 = Device("cuda", "NVIDIA H200", "sm_90", sms=132, triton=True)
A100 = Device("cuda", "NVIDIA A100", "sm_80", sms=108, triton=True)
CPU = Device("cpu", "cpu")
SM90 = changed(H200, backend="sm90")


def ffn_problem(tokens: int, width: int, hidden: int, **options: Any) -> Problem:
    """That of a training step with gelu."""
    options = {"dtype": "bfloat16", "activation": "gelu", "needs_data_gradient": True} | options
    options = {"needs_weight_gradient": options["needs_data_gradient"]} | options
    return Problem("ffn", 1, tokens, width, hidden, width, **options)


def faster(path: str, *sizes: int, ratio: float = 0.5, **options: Any) -> Device:
    """An H200 on which ``path`` of an FFN was measured, and takes so many times as long as torch."""
    return where(SM90, ffn_problem(*sizes, **options), {path: ratio})


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], None]:
    """``pretend(device)``: from now on every tensor is said to lie on that device."""

    def describe(device: Device) -> None:
        for module in (dispatch, explaining):
            monkeypatch.setattr(module, "describe", lambda where: device)

    return describe


def lines(text: str) -> dict[str, str]:
    """The text without its sentence and its title, by the names in the left column."""
    sentence, title, *rest = text.splitlines()
    assert sentence.startswith("Runs ")
    assert sentence.endswith(".")
    assert not title.startswith(" ")
    found, starts = {}, set()
    for line in rest:
        name, words = line.removeprefix("  ").split("  ", 1)
        found[name] = words.strip()
        starts.add(len(line) - len(words.lstrip()))
    assert len(starts) == 1, "one column of names, one of words"
    assert len(found) == len(rest)
    return found


def tensors(tokens: int, width: int, hidden: int, *, gradients: bool = True, **options: Any) -> dict[str, Tensor]:
    """On the meta device: nothing of these sizes is there."""
    shapes = {"x": (tokens, width), "w_up": (hidden, width), "w_down": (width, hidden)}
    options = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": gradients} | options
    return {name: torch.empty(shape, **options) for name, shape in shapes.items()}


def call(operands: dict[str, Tensor], **options: Any) -> dict[str, str]:
    x, w_up, w_down = operands.values()
    return lines(fl.explain(functional.ffn, x, w_up, w_down, **options, details=True))


def test_every_line_on_a_cpu(pretend: Callable[[Device], None]) -> None:
    pretend(CPU)
    x, w_up, w_down = tensors(5, 16, 24, dtype=torch.float32).values()
    text = fl.explain(functional.ffn, x, w_up, w_down, activation="relu2", details=True)
    assert text.splitlines()[:2] == [
        "Runs through torch: the kernels need a CUDA or ROCm GPU, and the tensors are on device type cpu.",
        "ffn: act(x W_upᵀ) W_downᵀ, act = relu2: max(z, 0)²",
    ]
    plan = planning.plan(
        Problem("ffn", 1, 5, 16, 24, 16, "float32", "relu2", needs_data_gradient=True, needs_weight_gradient=True), CPU
    )
    assert lines(text) == {
        "problem": "M=5 (tokens) K=16 (d_model) N=24 (d_ff) O=16, float32, forward and backward",
        "device": "cpu",
        "path": "torch: no other path is both possible and faster",
        "GEMM units": "2 forward, 4 backward; a unit is one matrix product of M × K × N",
        "FLOPs": f"{6 * 2 * 5 * 16 * 24:,}",
        "bytes moved": f"at least {plan.bytes:,}",
        "saved bytes": f"{plan.saved_bytes:,} for the backward pass",
        "workspace": "0 bytes of temporary memory",
        "floor": "unknown, as no peak rates of this device are on record",
        "if save, torch": "keeps 1,280 bytes, computes nothing again, takes 0 bytes of temporary memory (chosen)",
        "if save, epilogue": "the kernels need a CUDA or ROCm GPU, and the tensors are on device type cpu",
        "if recompute, fused": "the kernels need a CUDA or ROCm GPU, and the tensors are on device type cpu",
        "if chunked": "keeps 320 bytes, computes 1 GEMM unit again, takes 2,560 bytes of temporary memory",
        "not fused": "the kernels need a CUDA or ROCm GPU, and the tensors are on device type cpu",
        "not epilogue": "the kernels need a CUDA or ROCm GPU, and the tensors are on device type cpu",
    }


def test_what_the_kernels_would_do_on_an_h200(
    pretend: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(H200)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    found = call(tensors(2**20, 64, 256), activation="gelu_tanh")
    shape = {"batch": 1, "M": 2**20, "K": 64, "N": 256, "O": 64, "dtype": "bfloat16", "activation": "gelu_tanh"}
    plan = planning.plan(Problem("ffn", **shape, needs_data_gradient=True, needs_weight_gradient=True), H200, "triton")
    assert plan.path == "fused"
    assert found["device"] == "NVIDIA H200 sm_90"
    assert found["path"] == f"fused: {plan.reason}"
    for kernel in ("forward", "data_gradient", "weight_gradient"):
        tiles = getattr(plan, f"{kernel}_tiles")
        assert found[f"{kernel.replace('_', '-')} tiles"] == (
            f"{tiles.block_m} rows × {tiles.block_n} hidden columns, {tiles.num_warps} warps, {tiles.num_stages} stages"
        )
    assert plan.splits > 1
    passes = plan.weight_gradient_tiles.passes
    assert found["splits"] == f"{plan.splits} token ranges of the weight gradients, in {passes} launch(es)"
    assert found["GEMM units"].startswith(f"2 forward, {plan.backward_units:g} backward; ")
    assert found["FLOPs"] == f"{plan.flops:,}"
    assert found["saved bytes"] == f"{2 * 2**20 * 64:,} for the backward pass"
    assert found["workspace"] == f"{plan.workspace_bytes:,} bytes of temporary memory"
    least = 1e6 * max(plan.flops / 790e12, plan.bytes / 4.3e12)
    assert found["floor"] == f"at least {least:.1f} µs at the device's measured peak rates"
    assert {name for name in found if name.startswith("not ")} == {"not epilogue", "not torch"}
    assert "chunks" not in found


def test_sm90_kernels_are_named(pretend: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(SM90)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    found = call(tensors(2**20, 128, 512), activation="gelu_tanh")
    size = "sm90: 64 rows × {} hidden columns for each consumer, consumers 2, stages {}"
    assert found["forward tiles"] == size.format(128, 2)
    assert found["data-gradient tiles"] == size.format(64, 3)
    assert found["weight-gradient tiles"] == (
        "sm90: 64 hidden units × 32 rows for each consumer, consumers 2, stages 4"
    )
    assert found["splits"] == "33 token ranges of the weight gradients, in 1 launch(es)"


def test_a_stored_backward_pass_is_named(pretend: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(SM90)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    operands = tensors(2**20, 256, 1024)
    found = call(operands, activation="gelu_tanh")
    assert found["backward"].startswith("stores what is hidden")
    assert found["hidden-gradient tiles"] == "sm90: 128 rows × 64 hidden columns, stages 4 and 4"
    assert found["weight-gradient tiles"] == "sm90: 128 × 256 of a matrix, stages 4"
    assert found["splits"] == "8 token ranges of the weight gradients, in 1 launch(es)"
    assert "data-gradient tiles" not in found
    recomputed = call(operands, activation="gelu_tanh", recompute=True)
    assert "backward" not in recomputed
    assert "data-gradient tiles" in recomputed


def test_lines_follow_the_call(pretend: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(H200)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    operands = tensors(2**20, 64, 256)
    with torch.no_grad():
        inference = call(operands)
    assert inference["problem"].endswith(", bfloat16, forward")
    assert inference["saved bytes"] == "0 (no gradient is wanted)"
    assert {"data-gradient tiles", "weight-gradient tiles", "splits"}.isdisjoint(inference)
    operands["w_up"].requires_grad_(False)
    operands["w_down"].requires_grad_(False)
    frozen = call(operands)
    assert "data-gradient tiles" in frozen
    assert "weight-gradient tiles" not in frozen
    assert call(operands, recompute=True)["path"].startswith("fused: ")
    wide = call(tensors(2**16, 1024, 4096), recompute=True)
    assert wide["path"].startswith("chunked: recompute=True forbids keeping the hidden")
    assert wide["chunks"] == "16384 tokens at a time; backward 2048 hidden units at a time"
    assert "does not fit on chip" in wide["not fused"]
    pretend(SM90)
    grouped = call(tensors(8192, 2048, 8192), recompute=True)
    assert grouped["chunks"] == "4096 tokens at a time; backward 4096 hidden units at a time"
    assert grouped["data-gradient tiles"].startswith("sm90: 128 × 128 of the product")
    assert wide["not torch"] == "recompute=True forbids keeping the hidden"


@pytest.mark.parametrize(
    ("device", "sizes", "options", "reason"),
    [
        (CPU, (100, 64, 256), {}, "the kernels need a CUDA or ROCm GPU, and the tensors are on device type cpu"),
        (changed(H200, triton=False), (100, 64, 256), {}, "Triton is not installed"),
        (
            A100,
            (2**22, 64, 256),
            {},
            "the kernels were not measured on sm_80; python -m fusedlayers.bench calibrate does that",
        ),
        (faster("fused", 100, 64, 256, ratio=1.5), (100, 64, 256), {}, "torch is expected to be "),
        (faster("epilogue", 100, 64, 256, ratio=1.5), (100, 64, 256), {}, "nothing like it was measured: python -m"),
        (H200, (2**20, 1024, 4096), {}, "width 1024 (padded 1024) of bfloat16 does not fit on chip in forward"),
        (SM90, (2**20, 64, 256), {"dtype": torch.float32}, "float32 products in IEEE precision"),
        (H200, (2**20, 64, 256), {"dtype": torch.float64}, "the kernels take float16, bfloat16, float32, not float64"),
        (H200, (0, 64, 256), {}, "there is nothing to compute"),
    ],
)
def test_every_rejection_is_explained(
    device: Device, sizes: tuple[int, int, int], options: dict[str, Any], reason: str, pretend: Callable[[Device], None]
) -> None:
    pretend(device)
    found = call(tensors(*sizes, **options))
    assert found["path"].startswith("torch: ")
    assert found["not fused"].startswith(reason)


def test_the_backend_that_the_user_set(pretend: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(H200)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    assert call(tensors(2**20, 64, 256))["not fused"] == "the backend is set to torch"
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    assert call(tensors(3, 64, 256))["path"].startswith("fused: ")
    pretend(CPU)
    with pytest.raises(RuntimeError, match="FUSEDLAYERS_BACKEND=triton is set, but ffn cannot run in Triton"):
        call(tensors(3, 64, 256))


@pytest.mark.parametrize(
    ("device", "sizes", "options", "sentence"),
    [
        (
            faster("fused", 2**20, 64, 256),
            (2**20, 64, 256),
            {},
            "Runs in the fused kernels, forward and backward: keeps 128 bytes a token instead of 1,152.",
        ),
        (
            faster("fused", 2**20, 64, 256, dropout=True),
            (2**20, 64, 256),
            {"dropout_p": 0.1},
            "Runs in the fused kernels, forward and backward: keeps 128 bytes a token instead of 1,408.",
        ),
        (
            faster("epilogue", 2**14, 1024, 4096),
            (2**14, 1024, 4096),
            {},
            "Runs in the epilogue kernels, forward and backward: keeps 10,240 bytes a token instead of 18,432.",
        ),
        (
            faster("epilogue", 2**14, 1024, 4096, needs_data_gradient=False),
            (2**14, 1024, 4096),
            {"gradients": False},
            "Runs in the epilogue kernels, forward: activations are computed with the products.",
        ),
        (
            CPU,
            (100, 64, 256),
            {"recompute": True},
            "Runs in chunks, through torch, forward and backward: keeps 128 bytes a token instead of 1,152.",
        ),
        (
            A100,
            (2**22, 64, 256),
            {},
            "Runs through torch: the kernels were not measured on sm_80; python -m fusedlayers.bench calibrate does "
            "that, FUSEDLAYERS_BACKEND=triton runs them.",
        ),
    ],
)
def test_the_first_line_says_what_runs_and_what_that_gains(
    device: Device,
    sizes: tuple[int, int, int],
    options: dict[str, Any],
    sentence: str,
    pretend: Callable[[Device], None],
) -> None:
    """Of gelu torch keeps x and twice the hidden, and the mask of ``nn.Dropout`` in a byte for each element."""
    pretend(device)
    call_options = {name: value for name, value in options.items() if name != "gradients"}
    operands = tensors(*sizes, gradients=options.get("gradients", True))
    assert fl.explain(functional.ffn, *operands.values(), **call_options, details=True).splitlines()[0] == sentence


def test_the_first_line_has_the_times_that_decided(pretend: Callable[[Device], None]) -> None:
    pretend(faster("fused", 100, 64, 256, ratio=1.5))
    sentence = fl.explain(functional.ffn, *tensors(100, 64, 256).values(), details=True).splitlines()[0]
    assert re.fullmatch(
        r"Runs through torch: expected \(launched, torch [\d.]+ ms \(measured: 1 ms\), fused [\d.]+ ms "
        r"\(measured: 1\.5 ms\); measured at 100 × 64 × 256\)\.",
        sentence,
    )


def test_the_formula_has_the_operands_of_the_call() -> None:
    x, w_up, w_down = tensors(5, 16, 24).values()
    hidden, result = torch.zeros(24, device="meta", dtype=x.dtype), torch.zeros(16, device="meta", dtype=x.dtype)
    for formula, options in (
        ("act(x W_upᵀ + b_up) W_downᵀ", {"b_up": hidden}),
        ("dropout(act(x W_upᵀ)) W_downᵀ + b_down", {"b_down": result, "dropout_p": 0.1}),
        ("(act(x W_gateᵀ) ⊙ (x W_upᵀ + b_up)) W_downᵀ", {"w_gate": w_up, "b_up": hidden}),
        ("act(x W_upᵀ) W_downᵀ + residual", {"residual": x}),
    ):
        text = fl.explain(functional.ffn, x, w_up, w_down, activation="relu", **options, details=True)
        assert text.splitlines()[1] == f"ffn: {formula}, act = relu: max(z, 0)"


def test_gemm_gemm(pretend: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(H200)
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    a, b, c = (
        torch.empty(s, device="meta", dtype=torch.bfloat16)
        for s in ((128, 1024, 128), (128, 128, 1024), (128, 1024, 64))
    )
    text = fl.explain(functional.gemm_gemm, a, b, c, activation="swish", details=True)
    assert text.splitlines()[1] == "gemm_gemm: act(a @ b) @ c, act = silu: z σ(z)"
    found = lines(text)
    assert found["problem"] == "B=128 M=1024 K=128 N=1024 O=64, bfloat16, forward"
    assert found["path"].startswith("fused: ")
    assert found["GEMM units"].startswith("1.5 forward, 0 backward; ")
    assert found["not reassociated"] == "silu stands between the products"
    with pytest.raises(ValueError, match=r"^b of shape"):
        fl.explain(functional.gemm_gemm, a, c, b)


def test_a_fused_ffn(pretend: Callable[[Device], None]) -> None:
    pretend(CPU)
    layer = fl.FusedFFN(16, 24, "silu", gated=True, dropout=0.25)
    x = torch.zeros(2, 3, 16)
    text = fl.explain(layer, x, details=True)
    hidden = "dropout(act(x W_gateᵀ + b_gate) ⊙ (x W_upᵀ + b_up))"
    assert text.splitlines()[1] == f"ffn: {hidden} W_downᵀ + b_down, act = silu: z σ(z)"
    found = lines(text)
    assert found["problem"] == "M=6 (tokens) K=16 (d_model) N=24 (d_ff) O=16, float32, forward and backward"
    assert found["GEMM units"].startswith("3 forward, 4 backward; "), "x wants no gradient"
    layer.recompute = True
    assert lines(fl.explain(layer, x, details=True))["path"].startswith("chunked: ")
    with torch.no_grad():
        assert lines(fl.explain(layer.eval(), x, details=True))["problem"].endswith("float32, forward")


def test_a_copy_is_announced(pretend: Callable[[Device], None]) -> None:
    pretend(A100)
    layer = fl.FusedFFN(16, 24, recompute=True)
    x = torch.zeros(3, 5, 16)
    assert "copies" not in lines(fl.explain(layer, x, details=True))
    found = lines(fl.explain(layer, x.transpose(0, 1), details=True))
    assert found["copies"] == "x of shape [5, 3, 16] and strides [16, 80, 1] has no uniform rows: one contiguous copy"
