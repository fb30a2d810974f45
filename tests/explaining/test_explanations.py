"""What ``explain`` returns and prints in five lines, of blocks and of models, here and for another machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import functional, planning
from fusedlayers.functional.operation import OPERATIONS
from fusedlayers.planning import CARDS

HALF = torch.bfloat16
pytestmark = pytest.mark.usefixtures("without_kernels_here")
NO_GPU = "the kernels need a CUDA or ROCm GPU, and the tensors are on device type {}"


def wide(device: str = "meta", **options: Any) -> tuple[fl.FusedFFN, Tensor]:
    ffn = fl.FusedFFN(1024, 4096, device=device, dtype=HALF, **options)
    return ffn, torch.empty(4, 4096, 1024, device=device, dtype=HALF, requires_grad=True)


def test_five_lines_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of the plan: 2 bytes of 16,384 tokens, of x (1024), z (4096), and torch's second hidden."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    found = fl.explain(*wide(), on="H200")
    assert str(found).splitlines() == [
        "Runs in the epilogue kernels, forward and backward: keeps 10,240 bytes a token instead of 18,432.",
        "  call            M=16384 (tokens) K=1024 (d_model) N=4096 (d_ff) O=1024, bfloat16, forward and backward, "
        "on NVIDIA H200, at least 1,043.8 µs",
        "  keeps           160 MiB, torch 288 MiB for the backward pass",
        "  recompute=True  would keep 32 MiB, compute 1.17 times the FLOPs and take 192 MiB of temporary memory "
        "instead of 128 MiB",
        "  elsewhere       an H100 would do the same",
    ]
    assert f"{found}" == repr(found) == str(found)
    assert (found.path, found.saved_bytes, found.saved_by_torch) == ("epilogue", 160 * 2**20, 288 * 2**20)
    assert found.reason.startswith("activations and bias gradients are computed with the products")


def test_the_details_are_the_text_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    ffn, x = wide()
    text = fl.explain(ffn, x, on="H200", details=True)
    assert text == fl.explain(ffn, x, on="H200").details
    first, formula, *rows = text.splitlines()
    assert first == fl.explain(ffn, x, on="H200").lines[0]
    assert formula.startswith("ffn: act(x W_upᵀ + b_up) W_downᵀ + b_down, act = gelu")
    assert len(rows) == 17
    assert rows[1].split() == ["device", "NVIDIA", "H200", "sm_90"]
    assert rows[-1].split() == ["not", "torch", "the", "epilogue", "path", "comes", "first"]


@pytest.mark.parametrize("card", CARDS)
def test_seconds_are_the_floor_where_peak_rates_are_on_record(card: str) -> None:
    ffn, x = wide()
    tensors = planning.plan(OPERATIONS["ffn"].problem_of(**ffn.call_arguments(x)), CARDS[card])
    rates = CARDS[card].ceilings
    assert fl.explain(ffn, x, on=card).seconds == max(tensors.flops / rates[0], tensors.bytes / rates[1])
    assert fl.explain(ffn, x).seconds is None, "nobody measured the peak rates of a CPU"
    assert fl.explain(ffn.float(), x.float(), on=card).seconds is None
    assert "at least" not in str(fl.explain(ffn.float(), x.float(), on=card))


@pytest.mark.parametrize("name", CARDS)
def test_the_machine_counts_and_not_where_the_tensors_lie(name: str) -> None:
    ffn = fl.FusedFFN(64, 256, dtype=HALF)
    x = torch.empty(2**17, 64, dtype=HALF, requires_grad=True)
    there = fl.explain(ffn, x, on=name)
    assert there.path == "fused"
    assert CARDS[name].name in there.lines[1]
    here = fl.explain(ffn, x)
    assert here.path == "torch"
    assert here.reason == NO_GPU.format("cpu")
    assert here.lines[-1].split("  ")[-1].strip() == "an H100 or H200 would run it in the fused kernels"
    assert fl.explain(ffn.to("meta"), x.to("meta"), on=name) == there


def test_the_cards_are_those_that_were_measured() -> None:
    """A plan for a card is the plan of such a GPU as it describes itself, before anybody calibrates it."""
    assert list(CARDS) == ["H100", "H200"]
    for each in CARDS.values():
        assert (each.kind, each.architecture, each.sms, each.triton, each.backend) == (
            "cuda",
            "sm_90",
            132,
            True,
            "sm90",
        )
        assert each.record is not None
        assert each.calibration is None
        assert each.ceilings is not None


@pytest.mark.parametrize("name", ["A100", "h100", "", 3, torch.device("cuda")])
def test_an_unknown_machine_is_an_error_that_names_the_known_ones(name: Any) -> None:
    ffn, x = wide()
    for call in (
        lambda: fl.explain(ffn, x, on=name),
        lambda: fl.explain(nn.Sequential(ffn), x, on=name),
        lambda: fl.replace(nn.Sequential(ffn), dry_run=True, on=name),
    ):
        with pytest.raises(ValueError, match=r"^on must be the name of a GPU, one of H100, H200; got "):
            call()


def test_the_switches_count_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ffn, x = wide()
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "torch")
    assert fl.explain(ffn, x, on="H200").reason == "the backend is set to torch"
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    few = torch.empty(3, 1024, device="meta", dtype=HALF)
    assert fl.explain(ffn, few, on="H200").path == "epilogue"
    with pytest.raises(RuntimeError, match="FUSEDLAYERS_BACKEND=triton is set, but ffn cannot run in Triton"):
        fl.explain(ffn.double(), few.double(), on="H200")
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "auto")
    monkeypatch.setenv("FUSEDLAYERS_STRICT", "1")
    with pytest.raises(RuntimeError, match="FUSEDLAYERS_STRICT=1 is set, but ffn cannot run in Triton"):
        fl.explain(ffn.double(), few.double(), on="H200")


def test_float32_may_be_tf32_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch is told for its own products there, although on a CPU it does not matter."""
    monkeypatch.setenv("FUSEDLAYERS_BACKEND", "triton")
    seen = []
    whole = planning.Problem.plan

    def plan(problem: planning.Problem, device: planning.Device, backend: str) -> Any:
        seen.append((device.kind, problem.input_precision))
        return whole(problem, device, backend)

    monkeypatch.setattr(planning.Problem, "plan", plan)
    ffn, x = wide()
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        fl.explain(ffn.float(), x.float(), on="H200")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert set(seen) == {("cuda", "tf32")}


class TestRecompute:
    """The line of what ``recompute=True`` would keep and cost."""

    @staticmethod
    def line(found: Any) -> str:
        [line] = (line for line in found.lines if line.startswith("  recompute="))
        return " ".join(line.split())

    def test_it_is_what_a_call_with_it_says(self) -> None:
        ffn, x = wide()
        line = self.line(fl.explain(ffn, x, on="H200"))
        ffn.recompute = True
        again = fl.explain(ffn, x, on="H200")
        assert again.saved_bytes == 32 * 2**20
        assert "would keep 32 MiB" in line
        assert self.line(again) == (
            "recompute='auto' would keep 160 MiB, compute 0.86 times the FLOPs and take 128 MiB of temporary memory "
            "instead of 192 MiB"
        )

    def test_a_narrow_layer_keeps_its_input_alone_anyway(self) -> None:
        x = torch.empty(2**20, 64, device="meta", dtype=HALF, requires_grad=True)
        found = fl.explain(fl.FusedFFN(64, 256, device="meta", dtype=HALF), x, on="H200")
        assert self.line(found) == "recompute=True would change nothing"

    def test_of_inference_it_costs_memory_alone(self) -> None:
        ffn, x = wide()
        with torch.no_grad():
            found = fl.explain(ffn, x, on="H200")
        assert " ".join(found.lines[2].split()) == "keeps nothing, as no gradient is wanted"
        assert self.line(found).startswith("recompute=True would compute as much and take ")

    def test_of_a_loss_head(self) -> None:
        x = torch.empty(8192, 1024, device="meta", dtype=HALF, requires_grad=True)
        weight = torch.empty(32000, 1024, device="meta", dtype=HALF, requires_grad=True)
        target = torch.empty(8192, device="meta", dtype=torch.int64)
        found = fl.explain(functional.linear_cross_entropy, x, weight, target, on="H100")
        recomputed = fl.explain(functional.linear_cross_entropy, x, weight, target, recompute=True, on="H100")
        assert recomputed.saved_bytes < found.saved_bytes
        assert f"would keep {recomputed.saved_bytes / 2**20:.3g} MiB, compute " in self.line(found)
        assert self.line(recomputed).startswith(f"recompute=False would keep {found.saved_bytes / 2**20:,.0f} MiB, ")

    def test_an_operation_without_it_has_four_lines(self) -> None:
        tokens = torch.empty(4, 32, 128, device="meta", dtype=HALF)
        found = fl.explain(fl.MaxSim(), tokens, tokens, on="H200")
        assert len(found.lines) == 4
        assert "recompute" not in str(found)


def test_a_block_that_runs_its_children() -> None:
    ffn, x = wide()
    with ffn.up_proj.register_forward_hook(lambda *_: None):
        found = fl.explain(ffn, x, on="H200")
    assert str(found) == "FusedFFN calls its children instead of fusing them: the up linear has a forward hook"
    assert (found.path, found.seconds, found.saved_bytes) == ("torch", None, None)
    assert found.reason == "the up linear has a forward hook"


class TestReplace:
    """``replace(dry_run=True, on=...)``: the report of another machine."""

    @staticmethod
    def model() -> nn.Module:
        given: dict[str, Any] = {"device": "meta", "dtype": HALF}
        block = nn.Sequential(nn.Linear(1024, 4096, **given), nn.GELU(), nn.Linear(4096, 1024, **given))
        return nn.ModuleList([block, nn.Linear(4096, 64, **given)])

    def test_it_says_what_runs_there(self) -> None:
        model = self.model()
        rules = [fl.LinearRule(out_features=64)]
        here = fl.replace(model, dry_run=True, rules=rules)
        there = fl.replace(model, dry_run=True, rules=rules, on="H200")
        assert [entry.plan for entry in here.replaced] == ["torch", None]
        assert [entry.plan for entry in there.replaced] == ["epilogue", None]
        assert [entry.why_no_kernels for entry in here.replaced] == [NO_GPU.format("meta")] * 2
        assert [entry.why_no_kernels for entry in there.replaced] == [None, None]
        assert there.replaced[0].saved_bytes == (2 * (1024 + 2 * 4096), 2 * (1024 + 4096))
        title, *_, last = str(there).splitlines()
        assert "2 replaced, 0 skipped (dry run: nothing changed, as on an H200)" in title
        assert "As the model is now" not in last
        assert (there.on, here.on) == ("H200", None)
        assert type(model[0]) is nn.Sequential  # type: ignore[index]

    def test_it_needs_a_dry_run(self) -> None:
        model = self.model()
        with pytest.raises(ValueError, match=r"^on='H200' tells what another GPU would do: expected dry_run=True"):
            fl.replace(model, on="H200")
        assert type(model[0]) is nn.Sequential  # type: ignore[index]
