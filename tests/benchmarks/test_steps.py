"""Whole training steps: the models, the check before the times, the record, and what is slower than without ours."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import records, step_models, step_tables, steps
from benchmarks.attention import NAME
from benchmarks.step_models import (
    AUTO,
    FP8,
    IN_16_BITS,
    KERNELS,
    LIGER,
    LIGER_AUTO,
    NORM,
    RECOMPUTE,
    STEP_MODELS,
    TORCH,
    Sizes,
    StepModel,
)
from fusedlayers import functional
from fusedlayers.bench import record, timing
from tests.support.float8_twins import in_8_bits
from tests.support.operands import patch_ffn

pytest.importorskip("transformers", reason="the models are of it")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
CPU = torch.device("cpu")


def small(tmp_path: Path, *words: object) -> tuple[int, record.Record]:
    words = ("--device", "cpu", "--small", "--seconds", 0.01, "--output", tmp_path, *words)
    status = steps.main([str(word) for word in words])
    return status, record.read(tmp_path / "steps-fp32-cpu.json")


@pytest.mark.parametrize("name", STEP_MODELS)
def test_every_model_is_built_and_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few numbers; what is published of it, on no device."""
    model = STEP_MODELS[name].small()
    plain = model.build(CPU, torch.float32)
    attention: Any = nn.functional.scaled_dot_product_attention
    seen: list[tuple[object, bool]] = []

    def noted(*tensors: Tensor, **options: Any) -> Tensor:
        seen.append((options["attn_mask"], options["is_causal"]))
        return attention(*tensors, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noted)
    loss = plain(**model.inputs(CPU, torch.float32, 0)).loss
    loss.backward()
    causal = model.kind not in ("Bert", "ViT")
    assert seen == [(None, causal)] * model.sizes.layers
    assert plain.training
    assert not any(module.p for module in plain.modules() if isinstance(module, nn.Dropout))
    assert all(parameter.grad is not None for parameter in plain.parameters() if parameter.requires_grad)
    published = STEP_MODELS[name].build(torch.device("meta"), torch.bfloat16)
    widths = {(module.weight.shape) for module in published.modules() if isinstance(module, nn.Linear)}
    sizes = STEP_MODELS[name].sizes
    up = torch.Size((sizes.hidden * (2 if name == "phi3-3072" else 1), sizes.width))  # with the gate in one matrix
    assert up in widths or name.startswith(("gpt2", "mixtral")), "other layers"
    assert sizes.tokens in (128 * 197, 16_384, 32_768, 65_536)


def test_a_compiled_model_has_the_same_attention() -> None:
    """As transformers has it, a traced model builds a dense mask, and the flash kernel is lost."""
    model = replace(STEP_MODELS["llama-256"], sizes=replace(step_models.SMALL, layers=1))
    plain = model.build(CPU, torch.float32)
    words = model.inputs(CPU, torch.float32, 0)["input_ids"]
    base: Any = plain.base_model
    masks: list[object] = []

    def noted(graph: torch.fx.GraphModule, _: object) -> Any:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        masks.extend(node.kwargs["attn_mask"] for node in calls)
        return graph.forward

    for attention, without in ((NAME, True), ("sdpa", False)):
        plain.set_attn_implementation(attention)  # type: ignore[operator]
        masks.clear()
        torch.compile(base, backend=noted, dynamic=False, fullgraph=True)(words)
        torch.compiler.reset()
        assert len(masks) == model.sizes.layers
        assert [mask is None for mask in masks] == [without] * len(masks), attention


def test_a_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = STEP_MODELS["llama-256"].small()
    plain = model.build(CPU, torch.float32)
    inputs = model.inputs(CPU, torch.float32, 0)
    batch, length = inputs["input_ids"].shape
    mask = torch.zeros(batch, 1, length, length)
    with pytest.raises(ValueError, match="attention_mask: expected None, got one of"):
        plain(**inputs, attention_mask=mask)
    monkeypatch.setattr(type(plain), "set_attn_implementation", lambda model, name: None)
    with pytest.raises(ValueError, match="LlamaForCausalLM: expected a model that takes"):
        model.build(CPU, torch.float32)
    window = StepModel("mistral", "Mistral", "Mistral", "ForCausalLM", model.sizes, model.options)
    windowed = window.build(CPU, torch.float32)
    with pytest.raises(ValueError, match="sliding_window: expected None, got"):
        windowed(**inputs)


def test_check_time_record_plot_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    names = [name for name in step_models.NAMES if name not in (LIGER, LIGER_AUTO)]
    words = ("--models", "llama-256,gpt2-768", "--contenders", ",".join(names), "--plot")
    status, found = small(tmp_path, *words)
    assert status == 0
    assert (tmp_path / "steps-fp32-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert [(row["grid"], row["direction"]) for row in found["rows"]] == [("gpt2-768", "eager"), ("llama-256", "eager")]
    assert found["method"]["attention"] == NAME
    assert found["versions"]["transformers"] == metadata.version("transformers")
    assert found["versions"]["liger_kernel"] is None
    row = found["rows"][1]
    entries = row["contenders"]
    untimed = {name: entries[name]["reason"] for name in names if entries[name]["status"] != "timed"}
    assert untimed.keys() == {KERNELS, FP8}
    assert f"  skip eager, {KERNELS}: {untimed[KERNELS]}\n" in capsys.readouterr().out
    assert (entries[AUTO]["path"], entries[RECOMPUTE]["path"]) == ("torch", "chunked")
    assert 0 < entries[AUTO]["gradients_error"] < 1e-4
    assert entries[AUTO]["launched"]["repeats"] >= timing.FEWEST_ROUNDS
    parameters = STEP_MODELS["llama-256"].small().build(CPU, torch.float32).parameters()
    # AdamW keeps two numbers of each weight, and a count for each tensor.
    weights = [parameter.numel() for parameter in parameters]
    assert row["held_bytes"] == 4 * (3 * sum(weights) + len(weights))
    assert {verdict["status"] for verdict in row["verification"]} == {"green"}
    capsys.readouterr()
    assert records.main(["table", str(tmp_path / "steps-fp32-cpu.json")]) == 0
    assert capsys.readouterr().out == step_tables.markdown(found)


def test_a_model_of_which_nothing_is_replaced_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = types.SimpleNamespace(replaced=[])
    monkeypatch.setattr(step_models, "replace_layers", lambda *args, **kwargs: report)
    _, found = small(tmp_path, "--models", "bert-128")
    assert found["rows"][0]["contenders"][AUTO]["reason"] == "nothing of it is replaced"


def test_compiled_modes_are_rows_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str | None] = []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic, mode: modes.append(mode) or model)
    began: list[None] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: began.append(None))
    _, found = small(tmp_path, "--models", "llama-512", "--modes", "eager,compile,reduce-overhead")
    assert [row["direction"] for row in found["rows"]] == list(step_tables.MODES)
    # Torch, auto, auto-norm and auto-fp8, each once in each mode.
    assert modes == [None] * 4 + ["reduce-overhead"] * 4
    assert len(began) >= 2 * steps.FIRST_STEPS
    for row in found["rows"]:
        timed = [name for name, entry in row["contenders"].items() if entry["status"] == "timed"]
        assert timed == [TORCH, AUTO, NORM]


@pytest.mark.parametrize("wide", [True, False])
def test_what_runs_in_8_bits_is_timed(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and compiled; where no product does, there is nothing that "auto-norm" does not show."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(steps, "_COMPILE_MODES", {"compile": None})
    model = replace(STEP_MODELS["llama-256"], sizes=Sizes(64, 128, 2, 61, batch=2, length=32, layers=1))
    with in_8_bits() if wide else nullcontext():
        rows = steps.measured(model, ("eager", "compile"), (TORCH, NORM, FP8), torch.bfloat16, CPU, 0, 0.01)
    assert [row["direction"] for row in rows] == ["eager", "compile"]
    for row in rows:
        entry = row["contenders"][FP8]
        assert {verdict["status"] for verdict in row["verification"]} == {"green"}
        found = entry["status"], entry["reason"], entry["path"]
        assert found == (("timed", "", "float8") if wide else ("not timed", IN_16_BITS, "torch"))
        assert row["contenders"][NORM]["path"] == "torch"


def test_what_is_wrong_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def wrong(x: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
        y = functional.ffn(x, *tensors, **options)
        # The value is right, the gradient is not.
        return y + 0.01 * (y - y.detach())

    patch_ffn(monkeypatch, wrong)
    status, found = small(tmp_path, "--models", "llama-256")
    entries = found["rows"][0]["contenders"]
    assert status == 1
    assert (entries[TORCH]["status"], entries[AUTO]["status"], entries[AUTO]["reason"]) == (
        "timed", "not timed", "it is wrong",
    )  # fmt: skip
    assert "error" in found["rows"][0]["verification"][1]["reason"]


def test_a_contender_that_fails_is_named_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*tensors: Tensor, **options: Any) -> Tensor:
        raise RuntimeError("an illegal memory access")

    patch_ffn(monkeypatch, fails)
    status, found = small(tmp_path, "--models", "llama-256")
    assert status == 1
    assert found["rows"][0]["contenders"][AUTO]["reason"] == "RuntimeError: an illegal memory access"
    assert found["rows"][0]["contenders"][TORCH]["status"] == "timed"


@pytest.mark.parametrize("name", ["llama-256", "llama-2048-lora"])
def test_liger_changes_the_library_for_its_own_model_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = STEP_MODELS[name].small().build(CPU, torch.float32)
    library = sys.modules["transformers.models.llama.modeling_llama"]
    rotary = library.apply_rotary_pos_emb
    seen: list[nn.Module] = []

    def other(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return rotary(*tensors, **options)

    given: list[dict[str, bool]] = []

    def apply(model: nn.Module, **options: bool) -> None:
        seen.append(model)
        given.append(options)
        library.apply_rotary_pos_emb = other

    fake = types.ModuleType("liger_kernel.transformers")
    fake._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", fake)
    variant = step_models.variants(plain, (TORCH, LIGER))[LIGER]
    assert [type(each).__name__ for each in seen] == ["LlamaForCausalLM"]
    assert seen[0] in set(variant.model.modules()) - set(plain.modules())
    assert next(seen[0].parameters()) is next(plain.parameters())
    assert library.apply_rotary_pos_emb is rotary
    with variant.around():
        assert library.apply_rotary_pos_emb is other
    assert library.apply_rotary_pos_emb is rotary
    both = step_models.variants(plain, (LIGER_AUTO,))[LIGER_AUTO]
    assert given == [{}, {**given[1], "swiglu": False, "fused_linear_cross_entropy": False}]
    assert "FusedLlamaMLP" in {type(module).__name__ for module in both.model.modules()}
    with both.around():
        assert library.apply_rotary_pos_emb is other
    fake._apply_liger_kernel_to_instance = None  # type: ignore[attr-defined]
    assert "TypeError" in step_models.variants(plain, (LIGER,))[LIGER].reason
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN.clear()
    assert step_models.variants(plain, (LIGER,))[LIGER].reason == "Liger-Kernel has no layers for it"


def timed(milliseconds: float, peak: int) -> dict[str, Any]:
    quartiles = {"first_quartile": milliseconds / 1e3 - 1e-4, "third_quartile": milliseconds / 1e3 + 3e-4}
    entry = {"status": "timed", "launched": {"median": milliseconds / 1e3, **quartiles}, "host_bound": False}
    return entry | {"peak_bytes": peak * 2**20, "over_torch": milliseconds / 10}


def steps_record(**rows: dict[str, Any]) -> Any:
    """Rows of BERT, by mode, with their contenders."""
    shared = {"grid": "bert-768", "title": "BERT", "shape": [16_384], "held_bytes": 2**20, "dtype": "bf16"}
    return {
        "rows": [{**shared, "direction": mode, "contenders": entries} for mode, entries in rows.items()],
        "device": {"name": "NVIDIA H100 80GB HBM3"}, "started": "2026-01-02T00:00:00", "commit": "0123456789ab",
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0", "liger_kernel": None},
    }  # fmt: skip


def test_steps_that_take_longer_than_they_may_are_named() -> None:
    slow = {TORCH: timed(10, 3), AUTO: timed(10.3, 1), NORM: timed(10.1, 1)}
    found = steps_record(eager={TORCH: timed(10, 0), AUTO: timed(10.1, 0), NORM: timed(10.4, 0)}, compile=slow)
    assert step_tables.over_limits(found) == [
        "bert-768, eager, auto-norm: 1.04 of its time, at most 1.02",
        "bert-768, compile, auto: 1.03 of its time, at most 1.02",
    ]
    cells = ("10.0 ± 0.2 / 4", "10.3 ± 0.2 (1.03) / 2", "10.1 ± 0.2 (1.01) / 2")
    assert step_tables.table(found).rows[1] == ("BERT", "16,384", "compile", *cells)


def test_the_first_page_has_a_line_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_tables, "FIRST_PAGE", ("bert-768", "gpt2-768"))
    eager = {TORCH: timed(10, 1023), LIGER: timed(6, 511), AUTO: timed(5, 1)}
    compiled = {TORCH: timed(7, 1023), NORM: timed(6.5, 511)}
    shown = step_tables.overview(steps_record(eager=eager, compile=compiled))
    assert shown.columns == ("ms / GiB on one H100", "torch", "torch, compiled", "Liger", "fusedlayers, compiled")
    assert shown.rows == (("BERT", "10.0 / 1.0", "7.0 / 1.0", "**6.0** / 0.5", "6.5 / 0.5"),)


def test_a_model_that_runs_as_in_bf16_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_tables, "FIRST_PAGE", ("bert-768", "llama-512"))
    faster = {TORCH: timed(10, 1023), FP8: timed(6, 511)}
    found = steps_record(eager={TORCH: timed(10, 1023)}, compile=faster)
    narrow = {TORCH: timed(10, 1023), FP8: record.untimed_entry(IN_16_BITS) | {"peak_bytes": 1}}
    others = steps_record(eager={TORCH: timed(10, 1023)}, compile=narrow)["rows"]
    found["rows"] += [row | {"grid": "llama-512", "title": "Llama"} for row in others]
    shown = step_tables.overview(found)
    assert shown.columns[-1] == "fusedlayers, fp8, compiled"
    assert [line[-1] for line in shown.rows] == ["**6.0** / 0.5", "as bf16"]
    assert [line[-1] for line in step_tables.table(found).rows] == [
        step_tables.NONE,
        "6.0 ± 0.2 (0.60) / 512",
        step_tables.NONE,
        "as bf16",
    ]
    # Nothing was timed in 8 bits: the column is left out.
    found["rows"] = found["rows"][2:]
    assert step_tables.overview(found).columns[-1] == "torch, compiled"


def test_the_record_says_where_and_when_it_was_measured() -> None:
    found = step_tables.markdown(steps_record(eager={TORCH: timed(10, 3)}))
    assert "torch 2.11.0, Triton 3.6.0, transformers 5.17.0, 2026-01-02, commit" in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--models", "llama-7"], "argument --models: 'llama-7': expected names out of llama-2048"),
        (["--modes", "fast"], "argument --modes: 'fast': expected names out of eager,compile"),
        (["--contenders", "auto"], "argument --contenders: expected torch among them"),
        (["--output", f"{__file__}/records"], "expected a folder that files can be written into"),
    ],
)
def test_a_bad_command_line_names_the_argument(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as stopped:
        small(tmp_path, *words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", [LIGER, LIGER_AUTO])
def test_a_contender_that_is_not_installed_is_an_error_that_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(SystemExit) as stopped:
        small(tmp_path, "--models", "llama-256", "--contenders", f"torch,{name}")
    assert stopped.value.code == 2
    assert "argument --contenders: liger cannot run here" in (said := capsys.readouterr().err)
    assert ": pip install liger-kernel" in said


def test_norms_are_replaced_for_one_contender() -> None:
    plain = STEP_MODELS["llama-256"].small().build(CPU, torch.float32)
    found = step_models.variants(plain, (AUTO, NORM))
    norms = [[type(module).__name__ for module in variant.model.modules()] for variant in found.values()]  # type: ignore[union-attr]
    assert ["FusedLlamaRMSNorm" in names for names in norms] == [False, True]
    assert ["LlamaRMSNorm" in names for names in norms] == [True, False]


def test_another_library_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is right, the gradients are not."""

    class Wrong(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Tensor) -> Any:
            loss = self.model(**inputs).loss
            return types.SimpleNamespace(loss=loss + 0.01 * (loss - loss.detach()))

    monkeypatch.setattr(step_models, "_with_liger", lambda model, options: step_models.Variant(Wrong(model)))
    model = STEP_MODELS["llama-256"].small()
    [row] = steps.measured(model, ("eager",), (TORCH, LIGER), torch.float32, CPU, 0, 0.01)
    assert row["contenders"][LIGER]["reason"] == "it is wrong"
    assert "of the median parameter: error 0.01" in row["verification"][1]["reason"]


def test_liger_is_compiled_for_those_who_ask() -> None:
    said = "timed as it is, eager, without --compile-liger"
    assert steps._why_untimed(LIGER, "compile", CPU, compile_liger=False) == said
    assert steps._why_untimed(LIGER, "compile", CPU, compile_liger=True) == ""


def test_models_of_several_runs_make_one_record(tmp_path: Path) -> None:
    paths = []
    for name in ("bert-128", "llama-256"):
        _, found = small(tmp_path, "--models", name, "--contenders", "torch,auto", "--commit", "c" * 40)
        paths.append(tmp_path / f"{name}.json")
        record.write(found, paths[-1])
    assert records.main(["update", *map(str, paths)]) == 0
    assert [row["grid"] for row in record.read(paths[0])["rows"]] == ["bert-128", "llama-256"]


def test_first_steps_are_not_kept() -> None:
    """No contender starts from the gradients of another."""
    model = STEP_MODELS["llama-256"].small()
    rows = steps.measured(model, ("eager",), (TORCH, AUTO), torch.float32, CPU, 0, 0.01)
    assert [verdict["contender"] for verdict in rows[0]["verification"]] == [TORCH, AUTO]
    assert rows[0]["contenders"][TORCH]["loss_error"] == rows[0]["contenders"][AUTO]["loss_error"]
