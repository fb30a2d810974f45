"""The models whose whole training steps are timed, with random weights: nothing is downloaded.

They are Hugging Face's, with six layers each if nothing else is said, without dropout, so that all contenders compute
the same, and with one attention for all (:mod:`.attention`). Texts are random; their labels are the texts themselves.
"""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusedlayers.replacing import replace as replace_layers

from .attention import use_without_mask
from .peers import PEERS

TORCH, AUTO, KERNELS, RECOMPUTE, LIGER = "torch", "auto", "kernels", "recompute", "liger"
# Auto mode with norms; and Liger-Kernel's norms and rotary embedding with our FFN and loss.
NORM, LIGER_AUTO = "auto-norm", "liger-auto"
# Auto mode with norms, whose wide products run in 8 bits; and why it is not timed where none of them is wide enough.
FP8, IN_16_BITS = "auto-fp8", "no product of it runs in 8 bits"
NAMES = (TORCH, AUTO, NORM, KERNELS, RECOMPUTE, LIGER, LIGER_AUTO, FP8)
OURS = (AUTO, NORM, KERNELS, RECOMPUTE, LIGER_AUTO)
# What Liger-Kernel leaves to us: names of its options, of which a model's function has some.
_LEFT_TO_US = dict.fromkeys(("swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy"), False)


@dataclass(frozen=True)
class Sizes:
    """Of a model and of one step: ``batch`` texts of ``length`` words, or images."""

    width: int
    hidden: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    layers: int = 6

    @property
    def tokens(self) -> int:
        return self.batch * self.length


# To try all of it without a GPU.
SMALL = Sizes(32, 48, 2, 61, batch=2, length=16, layers=2)
SMALL_IMAGE, SMALL_PATCH = 12, 4


@dataclass(frozen=True)
class StepModel:
    """``kind`` is the library's name before ``Config``; with ``task`` behind it, that of the model's class.

    With ``rank`` the linear layers of the FFNs have peft's adapters of this rank, and all else is frozen.
    """

    name: str
    title: str
    kind: str
    task: str
    sizes: Sizes
    options: Callable[[Sizes], dict[str, Any]]
    rank: int = 0

    def small(self) -> StepModel:
        """The same with few numbers."""
        return replace(self, sizes=SMALL)

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model, in training mode."""
        library = importlib.import_module("transformers")
        config = getattr(library, f"{self.kind}Config")(**self.options(self.sizes))
        # What generates texts keeps keys and values; training does not.
        config.use_cache = False
        with torch.device(device):
            model: nn.Module = getattr(library, f"{self.kind}{self.task}")(config)
        model = model.to(dtype)
        use_without_mask(model)
        if self.rank:
            peft = importlib.import_module("peft")
            # Random factors, so that every gradient has something to be compared with.
            adapters = peft.LoraConfig(
                r=self.rank, lora_alpha=2 * self.rank, target_modules=_ADAPTED, init_lora_weights=False
            )
            model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
        return model.train()

    def inputs(self, device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
        """Of one step."""
        generator = torch.Generator().manual_seed(seed)
        s = self.sizes
        if self.task == "ForImageClassification":
            size = _image(s)[0]
            pixels = torch.randn(s.batch, 3, size, size, generator=generator).to(device, dtype)
            return {
                "pixel_values": pixels,
                "labels": torch.randint(0, s.vocabulary, (s.batch,), generator=generator).to(device),
            }
        # Below 4 lie the words for padding, beginning and end.
        words = torch.randint(4, s.vocabulary, (s.batch, s.length), generator=generator).to(device)
        return {"input_ids": words, "labels": words}


def _image(s: Sizes) -> tuple[int, int]:
    """Pixels of an image's side, and of a patch's."""
    return (SMALL_IMAGE, SMALL_PATCH) if s == SMALL else (224, 16)


def _llama(s: Sizes, shared_heads: int = 1) -> dict[str, Any]:
    return _encoder(s) | {"num_key_value_heads": max(1, s.heads // shared_heads), "vocab_size": s.vocabulary}


def _phi3(s: Sizes) -> dict[str, Any]:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), 0.0)
    # Its own numbers for the ends of a text lie beyond a small vocabulary.
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return _llama(s) | {"max_position_embeddings": s.length} | dropout | ends


def _mixtral(s: Sizes) -> dict[str, Any]:
    # Two of eight experts for each token, in transformers' default implementation.
    return _llama(s, shared_heads=2) | {"num_local_experts": 8, "num_experts_per_tok": 2}


def _encoder(s: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": s.width, "intermediate_size": s.hidden, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
    }  # fmt: skip


def _bert(s: Sizes) -> dict[str, Any]:
    kept = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _encoder(s) | kept | {"vocab_size": s.vocabulary, "max_position_embeddings": s.length}


def _gpt2(s: Sizes) -> dict[str, Any]:
    return {
        "n_embd": s.width, "n_inner": s.hidden, "n_layer": s.layers, "n_head": s.heads, "n_positions": s.length,
        "vocab_size": s.vocabulary, "bos_token_id": 1, "eos_token_id": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }  # fmt: skip


def _opt(s: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": s.width, "ffn_dim": s.hidden, "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
        "word_embed_proj_dim": s.width, "vocab_size": s.vocabulary, "max_position_embeddings": s.length, "dropout": 0.0,
    }  # fmt: skip


def _vit(s: Sizes) -> dict[str, Any]:
    size, patch = _image(s)
    return _encoder(s) | {"image_size": size, "patch_size": patch, "num_labels": s.vocabulary}


_LM, _MASKED = "ForCausalLM", "ForMaskedLM"
_ADAPTED = ["gate_proj", "up_proj", "down_proj"]
STEP_MODELS: dict[str, StepModel] = {
    model.name: model
    for model in (
        StepModel("llama-2048", "Llama, 2048 × 8192", "Llama", _LM, Sizes(2048, 8192, 32, 32_000, 8, 2048), _llama),
        StepModel(
            "qwen2-896", "Qwen2, 896 × 4864", "Qwen2", _LM, Sizes(896, 4864, 14, 32_000, 8, 2048),
            partial(_llama, shared_heads=7),
        ),
        StepModel(
            "gpt2-768", "GPT-2, 768 × 3072", "GPT2", "LMHeadModel", Sizes(768, 3072, 12, 50_257, 16, 1024), _gpt2
        ),
        StepModel("bert-768", "BERT, 768 × 3072", "Bert", _MASKED, Sizes(768, 3072, 12, 30_522, 32, 512), _bert),
        # 196 patches and the class; 1,000 classes.
        StepModel(
            "vit-768", "ViT-B, 768 × 3072, 128 images", "ViT", "ForImageClassification",
            Sizes(768, 3072, 12, 1000, 128, 197), _vit,
        ),
        StepModel("opt-1024", "OPT, 1024 × 4096", "OPT", _LM, Sizes(1024, 4096, 16, 50_272, 8, 2048), _opt),
        StepModel("phi3-3072", "Phi-3, 3072 × 8192", "Phi3", _LM, Sizes(3072, 8192, 32, 32_064, 8, 2048), _phi3),
        StepModel(
            "mixtral-1024", "Mixtral, 8 experts of 1024 × 2048", "Mixtral", _LM, Sizes(1024, 2048, 16, 32_000, 8, 2048),
            _mixtral,
        ),
        # The widths of Mixtral 8x7B.
        StepModel(
            "mixtral-4096", "Mixtral, 8 experts of 4096 × 14,336, two layers", "Mixtral", _LM,
            Sizes(4096, 14_336, 32, 32_000, 8, 2048, layers=2), _mixtral,
        ),
        StepModel("bert-128", "BERT, 128 × 512", "Bert", _MASKED, Sizes(128, 512, 2, 4096, 128, 512), _bert),
        StepModel("llama-256", "Llama, 256 × 768", "Llama", _LM, Sizes(256, 768, 4, 4096, 32, 2048), _llama),
        StepModel("llama-512", "Llama, 512 × 1408", "Llama", _LM, Sizes(512, 1408, 8, 4096, 8, 2048), _llama),
        StepModel(
            "llama-2048-lora", "Llama, 2048 × 8192, LoRA of rank 16", "Llama", _LM,
            Sizes(2048, 8192, 16, 32_000, 8, 2048), _llama, rank=16,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A model as a contender has it; ``around`` holds while it runs. Without a model, ``reason`` says why."""

    model: nn.Module | None
    reason: str = ""
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def variants(plain: nn.Module, names: Sequence[str]) -> dict[str, Variant]:
    """The model as it is, and changed, with the same parameters."""
    found = {}
    for name in names:
        if name == TORCH:
            found[name] = Variant(plain)
            continue
        model = copy.deepcopy(plain, {id(parameter): parameter for parameter in plain.parameters()})
        variant = Variant(model)
        if name in (LIGER, LIGER_AUTO):
            variant = _with_liger(model, {} if name == LIGER else _LEFT_TO_US)
        found[name] = variant if name == LIGER or variant.model is None else _replaced(variant, name)
    return found


def _replaced(variant: Variant, name: str) -> Variant:
    assert variant.model is not None
    with warnings.catch_warnings():
        # That nothing was replaced: the record says so.
        warnings.simplefilter("ignore")
        report = replace_layers(
            variant.model, recompute=True if name == RECOMPUTE else "auto", norm=name in (NORM, FP8),
            precision="fp8" if name == FP8 else None,
        )  # fmt: skip
    return variant if report.replaced else Variant(None, "nothing of it is replaced")


def check_liger(names: Sequence[str]) -> None:
    """Whether there is what these contenders need.

    Raises:
        ValueError: one of them needs Liger-Kernel, which cannot be imported; the message says what to install.
    """
    if {LIGER, LIGER_AUTO}.isdisjoint(names):
        return
    try:
        importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ValueError(
            f"argument --contenders: {LIGER} cannot run here ({error}): {PEERS['liger'].installed_by}"
        ) from error


def _with_liger(model: nn.Module, options: dict[str, bool]) -> Variant:
    """Liger-Kernel's layers in this model. What it changes in the library holds for this model alone."""
    liger = importlib.import_module("liger_kernel.transformers")
    known = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    # Adapters of peft are around the model.
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if inner.config.model_type not in known:
        return Variant(None, "Liger-Kernel has no layers for it")
    library = sys.modules[type(inner).__module__]
    before = dict(vars(library))
    reason = ""
    try:
        liger._apply_liger_kernel_to_instance(model=inner, **options)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    changed = {name: value for name, value in vars(library).items() if name in before and before[name] is not value}
    for name in changed:
        setattr(library, name, before[name])
    if reason:
        return Variant(None, reason)
    return Variant(model, around=partial(_holding, library, changed))


@contextmanager
def _holding(library: Any, changed: dict[str, Any]) -> Iterator[None]:
    """Inside, these names of the library have these values."""
    before = {name: getattr(library, name) for name in changed}
    for name, value in changed.items():
        setattr(library, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(library, name, value)
