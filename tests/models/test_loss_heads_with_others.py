"""Models without logits under torch.compile, the Trainer, adapters and wrappers for several processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fusedlayers as fl
from fusedlayers.closeness import assert_all_close
from fusedlayers.replacing.loss.lazy_logits import LazyLogits
from fusedlayers.replacing.loss.logits import Logits, NoLogits
from tests.models.loss_heads import IGNORED, WORDS, build, in_kernels, losses, replaced, results, text, truth
from tests.models.small import InFloat64
from tests.support import seeds
from tests.support.ffn_blocks import assert_same

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'fusedlayers[models]'"
)
pytestmark = pytest.mark.interpreter


def compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    found: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    return found


def gradients_named_plainly(found: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in found.items()}


@pytest.mark.sampled
# Granite and Cohere scale their logits, which Gemma 2 caps: in eager mode test_loss_heads.py has them all.
@pytest.mark.parametrize(
    "name",
    ["Llama", "GPT-2", "Gemma 2", *(pytest.param(name, marks=pytest.mark.full) for name in ("Granite", "Cohere"))],
)
@pytest.mark.parametrize("case", ["mean", "items", "tuple"])
def test_it_compiles(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, whose results are the same, without logits."""
    options: dict[str, Any] = {"items": {"num_items_in_batch": torch.tensor(31)}, "tuple": {"return_dict": False}}
    given = options.get(case, {})
    model: Any = build(name).train()
    inputs = text()
    # Where transformers does not know it, it warns, which Dynamo does not trace.
    model.loss_type = "ForCausalLM"
    exact = truth(copy.deepcopy(model), inputs, **given)
    expected = results(model, inputs, **given)
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        fast = compiled(model)
        found = gradients_named_plainly(results(fast, inputs, **given))
        assert losses(paths) > 0
        assert_all_close(found, expected, exact)
        logits = fast(**inputs, **given)[1]
    assert type(logits) is NoLogits
    why = "a compiled model in training computes the loss alone.*loss=False"
    for use in (lambda: logits[0], lambda: torch.softmax(logits, -1)):
        with pytest.raises(RuntimeError, match=why):
            use()
    with pytest.raises(AttributeError, match=why):
        logits.argmax(-1)
    assert not hasattr(logits, "dtype")
    assert "computes the loss alone" in repr(logits)


def test_where_dynamo_gives_up_on_the_call_evaluation_has_logits() -> None:
    """transformers warns of a loss that it does not know, which Dynamo does not trace: the call runs as Python."""
    model, inputs = build("GPT-2").eval(), text()
    with torch.no_grad():
        expected = model(**inputs)
        replaced(model)
        torch._dynamo.reset()
        found = torch.compile(model, backend="eager")(**inputs)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.logits, expected.logits)


def test_in_evaluation_it_compiles_with_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("Llama").eval(), text()
    with torch.no_grad():
        expected = model(**inputs)
        replaced(model)
        with in_kernels(monkeypatch):
            found = compiled(model)(**inputs)
    assert type(found.logits) is Tensor
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_where_torch_computes_the_loss_it_compiles_with_logits() -> None:
    model, inputs = build("Llama").train(), text()
    expected = model(**inputs)
    replaced(model)
    found = compiled(model)(**inputs)
    torch.testing.assert_close(found.logits, expected.logits)


def test_another_loss_function_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("Llama").train()
    inputs = text()
    expected = model(**inputs).loss
    replaced(model)
    with in_kernels(monkeypatch):
        fast = compiled(model)
        assert type(fast(**inputs).logits) is NoLogits
        original = model.loss_function
        model.loss_function = lambda *args, **options: 2 * original(*args, **options)
        outputs = fast(**inputs)
    assert type(outputs.logits) is Tensor
    torch.testing.assert_close(outputs.loss, 2 * expected)


def test_a_compiled_function_reads_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are compiled by themselves leave the model's forward as it is: its logits wait for their reader."""
    model: Any = build("Llama").train()
    inputs = text()
    expected = model(**inputs).logits
    replaced(model)
    with in_kernels(monkeypatch):
        model.model = compiled(model.model)
        outputs = model(**inputs)
    assert type(outputs.logits) is LazyLogits
    torch.testing.assert_close(torch.clone(outputs.logits), expected)


def trainer(model: nn.Module, folder: Path, **options: Any) -> Any:
    pytest.importorskip("accelerate", exc_type=ImportError)
    generator = seeds.generator()
    lines = []
    for place in range(8):
        words = torch.randint(3, WORDS, (7,), generator=generator)
        labels = words.clone()
        # As many targets in no two of them.
        labels[: place % 5] = IGNORED
        lines.append({"input_ids": words, "labels": labels})
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
        logging_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=0.01, **options,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=arguments, train_dataset=lines, eval_dataset=lines)


def forbid_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(self: Logits, *given: object) -> Tensor:
        raise AssertionError("logits were computed")

    monkeypatch.setattr(Logits, "_computed_from", compute)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning", "ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
def test_the_trainer(mixed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two steps of several batches each, of unequal numbers of targets: the same losses, and no logits at any time."""
    plain = build("Llama")
    ours = copy.deepcopy(plain)
    theirs = trainer(plain, tmp_path, bf16=mixed)
    theirs.train()
    expected = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    assert len(expected) == 2
    replaced(ours)
    forbid_logits(monkeypatch)
    tolerance = 2e-2 if mixed else 1e-5
    with in_kernels(monkeypatch) as paths:
        mine = trainer(ours, tmp_path, bf16=mixed)
        mine.train()
        assert losses(paths) == 4
        # Of products inside of kernels the interpreter is wrong in bfloat16.
        evaluated = None if mixed else mine.evaluate()["eval_loss"]
    assert [entry["loss"] for entry in mine.state.log_history if "loss" in entry] == pytest.approx(expected, tolerance)
    if not mixed:
        assert evaluated == pytest.approx(theirs.evaluate()["eval_loss"], tolerance)
        for parameter, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning", "ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_the_trainer_reads_logits_in_evaluation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = build("Llama")
    theirs = trainer(model, tmp_path)
    expected = theirs.predict(theirs.eval_dataset)
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        mine = trainer(model, tmp_path)
        found = mine.predict(mine.eval_dataset)
    assert losses(paths) > 0
    assert found.predictions.shape == (8, 7, WORDS)
    assert (found.predictions == expected.predictions).all()
    # Label smoothing makes its own loss of the logits, for which the Trainer looks the model's name up.
    smoothed = trainer(model, tmp_path, label_smoothing_factor=0.1)
    fl.restore(model)
    assert (
        smoothed.evaluate()["eval_loss"] == trainer(model, tmp_path, label_smoothing_factor=0.1).evaluate()["eval_loss"]
    )


@pytest.mark.parametrize("first", ["replace", "adapters"])
def test_a_model_with_adapters(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    inputs, model = text(), build("Llama")
    ours = copy.deepcopy(model)
    torch.manual_seed(5)
    theirs = peft.get_peft_model(model, config)
    exact = truth(copy.deepcopy(theirs), inputs)
    expected = results(theirs, inputs)
    if first == "replace":
        fl.replace(ours)
    torch.manual_seed(5)
    ours = peft.get_peft_model(ours, config)
    if first == "adapters":
        assert "FusedLossHead" in [entry.became for entry in fl.replace(ours).replaced]
    with in_kernels(monkeypatch) as paths:
        found = results(ours, inputs)
    assert losses(paths) == 1
    assert_all_close(found, expected, exact)


def test_outputs_of_accelerate_are_cast_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets a forward on the model that casts what 16-bit autocast gave to float32."""
    accelerate = pytest.importorskip("accelerate.utils.operations", exc_type=ImportError)
    model: Any = build("Llama").bfloat16()
    inputs = text()
    expected = model(**inputs).logits.float()
    replaced(model)
    with in_kernels(monkeypatch):
        outputs = accelerate.convert_outputs_to_fp32(model)(**inputs)
    assert type(outputs.logits) is LazyLogits
    assert outputs.logits._logits._values is None
    assert outputs.logits.dtype is torch.float32
    assert torch.equal(torch.clone(outputs.logits), expected)


def test_a_hook_of_the_model_sees_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("Llama"), text()
    seen: list[Any] = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.logits[0, 0].detach()))
    expected = results(model, inputs)
    replaced(model)
    results(model, inputs)
    assert_same(results(model, inputs), expected)
    with in_kernels(monkeypatch):
        results(model, inputs)
    assert all(torch.equal(each, seen[0]) for each in seen)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_all_of_it(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("Llama"), text()

    def run(model: Any, checkpointed: bool = True) -> dict[str, Tensor | None]:
        # A reentrant checkpoint has a gradient if an input of its has one.
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        function = lambda x: model(inputs_embeds=x, labels=inputs["labels"], return_dict=False)  # noqa: E731
        if checkpointed:
            loss, logits = torch.utils.checkpoint.checkpoint(function, embedded, use_reentrant=reentrant)
        else:
            loss, logits = function(embedded)
        model.zero_grad()
        (loss + (logits * 1).square().mean()).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = run(model)
    with InFloat64():
        exact = run(copy.deepcopy(model).double(), checkpointed=False)
    replaced(model)
    with in_kernels(monkeypatch) as paths:
        found = run(model)
    assert losses(paths) == 2 - reentrant
    assert_all_close(found, expected, exact)


def test_transforms_and_modes_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("Llama"), text()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, given, (), inputs).loss

    def operations() -> int:
        with FlopCounterMode(display=False) as counter:
            model(**inputs).loss.backward()
        return counter.get_total_flops()

    expected, count = torch.func.grad(loss)(parameters), operations()
    replaced(model)
    with in_kernels(monkeypatch):
        found = torch.func.grad(loss)(parameters)
        assert operations() == count
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient)
