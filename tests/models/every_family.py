"""A small model of (almost) every family of transformers, with random weights: nothing is downloaded.

The families, their classes and the names of their options come from transformers itself. One table of patterns makes
every configuration small, and `family_data.py` holds what a family needs besides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.family_answers import EXPECTED, NOT_FUSED
from tests.models.family_data import IMAGES, SPECIAL
from tests.models.small import InFloat64
from tests.support import seeds

WIDTH, HIDDEN, LAYERS, HEADS, WORDS, IMAGE, PATCH = 24, 52, 2, 2, 61, 16, 4
# Words from here on stand for images, sounds and the like; those below 4 for padding, beginning and end.
FIRST_PLACEHOLDER = 40

Inputs = dict[str, Tensor]
Results = dict[str, Tensor | None]

# What a whole number among the options of a configuration becomes; the first pattern that fits the name decides.
NUMBERS: dict[str, int] = {
    "(pad|unk)_token_id|pad_index|padding_idx": 0,
    "bos_token_id|decoder_start_token_id": 1,
    "eos_token_id|forced_eos_token_id|sep_token_id": 2,
    "(text_|entity_)?vocab_size(_per_layer_input)?|vocabulary_size": WORDS,
    "(max_position_embeddings|n_positions|max_seq_len|max_target_positions|max_source_positions|n_ctx)": 64,
    "moe_intermediate_size|shared_expert_intermediate_size|moe_shared_expert_intermediate_size|expert_ffn_size": 20,
    "(encoder_|decoder_|vision_|shared_)?(intermediate_size|ffn_dim|feedforward_dim|ffn_hidden_size)|d_ff|mlp_dim"
    "|n_inner|dim_feedforward|d_inner|encoder_intermediate_dim|intermediate_dim|ffn_size|d_ffn|inner_dim": HIDDEN,
    "(encoder_|decoder_)?(hidden_size|hidden_dim|embed_dim|d_model|embedding_size|emb_dim|n_embd|dim|hidden_channels)"
    "|(vision|text|audio|vision_encoder|text_encoder|fusion|fpn|output|feature|encoder|decoder|mm|image_text"
    "|projector|out|pooler)_hidden_(size|dim)|projection_dim|embedding_dim|word_embed_proj_dim|out_hidden_size"
    "|projection_size|text_embed_dim|text_dim|pooler_output_size|output_dim|neck_dim|model_dim": WIDTH,
    "head_dim|d_kv|d_head|attention_head_dim|kv_channels|v_head_dim|qk_nope_head_dim|global_head_dim": WIDTH // HEADS,
    "qk_rope_head_dim|rotary_dim": 4,
    "qk_head_dim": WIDTH // HEADS + 4,
    "q_lora_rank|kv_lora_rank": 12,
    "(num_)?((encoder|decoder|text|vision|enc|dec)_)?((num_)?(hidden_)?layers|depth)|n_layers?|depth|num_layer"
    "|num_encoder_blocks": LAYERS,
    "num_key_value_heads|num_kv_heads|n_kv_heads": 1,
    "(num_)?(encoder_|decoder_|text_|vision_|swa_)?(num_)?(attention_heads|heads)|n_heads?|nhead|num_head": HEADS,
    "num_experts|n_routed_experts|num_local_experts|moe_num_experts": 4,
    "num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts": 2,
    "n_shared_experts|num_shared_experts|moe_num_shared_experts|n_group|topk_group": 1,
    "first_k_dense_replace|num_dense_layers": 1,
    "sliding_window|attention_window|local_attention": 8,
    "image_size|img_size|pretrain_image_size": IMAGE,
    "patch_size": PATCH,
    "window_size": 4,
    "num_mel_bins": 8,
    "num_queries|num_query_tokens": 5,
    "image_seq_length|image_seq_len|num_image_tokens": (IMAGE // PATCH) ** 2,
    "num_labels": 5,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
# What other options become, under exactly these names.
OTHERS: dict[str, Any] = {
    "use_cache": False, "apply_spec_augment": False, "layerdrop": 0.0, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "initializer_range": 0.1, "use_timm_backbone": False,
    "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
}  # fmt: skip
_NUMBERS = [(re.compile(pattern), number) for pattern, number in NUMBERS.items()]


def _small_list(name: str, value: list[Any] | tuple[Any, ...]) -> Any:
    """A list of depths or widths of stages, as long as it was."""
    if name in ("depths", "stage_num_blocks", "num_block_repeats", "num_layers"):
        return type(value)(1 for _ in value)
    if name in ("hidden_sizes", "embed_dims"):
        return type(value)((8, 12, 20, WIDTH, WIDTH)[place] for place in range(len(value)))
    if name in ("num_heads", "num_attention_heads"):
        return type(value)(HEADS for _ in value)
    if name in ("conv_dim",):
        return type(value)(WIDTH for _ in value)
    return None


def small_options(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Options that make a configuration small; ``given`` goes first."""
    options: dict[str, Any] = {}
    placeholder = FIRST_PLACEHOLDER
    for field in dataclasses.fields(config):
        name, value = field.name, field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if name in OTHERS:
            options[name] = OTHERS[name]
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
            if (small := _small_list(name, value)) is not None:
                options[name] = small
        elif isinstance(value, int) and not isinstance(value, bool):
            number = next((number for pattern, number in _NUMBERS if pattern.fullmatch(name)), None)
            if number is None and re.search("_(token_id|token_index)$", name):
                number, placeholder = placeholder, placeholder + 1
            if number is not None:
                options[name] = number
    if "kv_lora_rank" in options:
        options["num_key_value_heads"] = HEADS
    # Which class an inner configuration has, its owner decides.
    inner_configs: dict[str, Any] = {name: getattr(config(), name, None) for name in config.sub_configs}
    for name, inner in inner_configs.items():
        if "model_type" in given.get(name, {}):
            options[name] = given[name]
        elif inner is not None and dataclasses.is_dataclass(inner):
            options[name] = small_options(type(inner), given.get(name, {})) | {"model_type": inner.model_type}
    return options | {name: value for name, value in given.items() if inner_configs.get(name) is None}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the log of transformers: it advises on word ids and kernels, which a small model has no use for."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class Family:
    """A model family, by the name that transformers gives to its configuration."""

    name: str

    @property
    def special(self) -> dict[str, Any]:
        return SPECIAL.get(self.name, {})

    @property
    def expected(self) -> dict[str, int]:
        """How many modules of which class compute an FFN."""
        return EXPECTED[self.name]

    def not_fused(self, model: nn.Module) -> dict[str, str]:
        """The classes of the model that take the place of an FFN and cannot be fused, and why."""
        classes = sorted({type(module).__name__ for module in model.modules()})
        matches = (
            (kind, fnmatchcase(kind, pattern), reason) for kind in classes for pattern, reason in NOT_FUSED.items()
        )
        return {kind: reason for kind, matched, reason in matches if matched}

    def config(self) -> Any:
        """The small configuration."""
        from transformers import CONFIG_MAPPING

        kind = CONFIG_MAPPING[self.name]
        with quiet():
            return kind(**small_options(kind, self.special.get("options", {})))

    def model_class(self) -> Any:
        """The class of the model: the base model, where nothing else is named."""
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

        name = self.special.get("model") or MODEL_MAPPING_NAMES[self.name]
        return getattr(transformers, name if isinstance(name, str) else name[0])

    def build(self) -> nn.Module:
        """A small model with the same weights every time, in float32 on the CPU."""
        torch.manual_seed(0)
        config = self.config()
        with quiet():
            config._attn_implementation = config._experts_implementation = "eager"
            model = self.model_class()(config).float()
        noise = seeds.generator(3)
        with torch.no_grad():
            for parameter in model.parameters():
                # Biases and scales that start at 0 would hide the blocks behind them.
                parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.05)
        return model

    def inputs(self) -> Inputs:
        """Inputs that the model accepts: two texts, images or sounds."""
        torch.manual_seed(1)
        special = self.special.get("inputs", {})
        main = self.model_class().main_input_name
        names = [main] if isinstance(main, str) else list(main)
        if "inputs" in self.special:
            return {name: _input(shape) for name, shape in special.items()}
        config = self.config()
        found: Inputs = {}
        takes = inspect.signature(self.model_class().forward).parameters
        if self.name in IMAGES:
            return _text_with_image(config, *IMAGES[self.name], list(takes))
        if "vision_config" in config.sub_configs and "return_loss" in takes:
            names.append("pixel_values")
        for name in dict.fromkeys(names):
            found |= _guess(name, config)
        if config.is_encoder_decoder and "decoder_input_ids" in takes:
            found["decoder_input_ids"] = torch.randint(4, FIRST_PLACEHOLDER, (2, 7))
        return found

    def results(self, model: nn.Module, inputs: Inputs, **options: Any) -> Results:
        """Floating-point outputs, a loss and all gradients, with the same random numbers every time.

        ``options`` go to the model, such as ``output_hidden_states=True``.
        """
        model.zero_grad()
        torch.manual_seed(1)
        with quiet():
            outputs = dict(_tensors(model(**inputs, **options)))
        weights = seeds.generator(2)
        loss = torch.zeros((), dtype=torch.float64)
        for value in outputs.values():
            factors = torch.randn(value.shape, generator=weights)
            loss = loss + (value * factors.to(value.dtype)).double().sum() / max(value.numel(), 1) ** 0.5
        loss.backward()
        gradients = {f"d{name}": parameter.grad for name, parameter in model.named_parameters()}
        return {name: value.detach() for name, value in outputs.items()} | {"loss": loss.detach()} | gradients

    def truth(self, model: nn.Module, inputs: Inputs) -> Results:
        """The same of a model that is float64 already; build it anew, some models keep tensors that cannot be copied.

        The families of `NO_TRUTH` do not run in float64.
        """
        doubled = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        with InFloat64():
            return self.results(model, doubled)


def _tensors(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of an output that depend on the weights, with names."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.requires_grad:
            yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from _tensors(inner, f"{name}.{place}")


def _input(shape: Any) -> Tensor:
    """A tensor: normal numbers of a shape, or what a pair (kind, ...) says."""
    kind, *rest = shape if isinstance(shape[0], str) else ("normal", *shape)
    if kind == "normal":
        return torch.randn(*rest)
    if kind == "words":
        return torch.randint(4, FIRST_PLACEHOLDER, tuple(rest))
    if kind == "below":
        return torch.randint(0, rest[0], tuple(rest[1:]))
    if kind == "ones":
        return torch.ones(*rest, dtype=torch.long)
    if kind == "zeros":
        return torch.zeros(*rest, dtype=torch.long)
    if kind == "true":
        return torch.ones(*rest, dtype=torch.bool)
    if kind == "exactly":
        return torch.tensor(rest[0])
    if kind == "uniform":
        return torch.rand(*rest)
    # ("image", word, count): a text in which one word stands for the image, count times.
    return torch.cat([torch.randint(4, FIRST_PLACEHOLDER, (2, 3)), torch.full((2, rest[1]), rest[0]),
                      torch.randint(4, FIRST_PLACEHOLDER, (2, 4))], 1)  # fmt: skip


def _text_with_image(config: Any, kind: str, words: int, takes: list[str]) -> Inputs:
    """Two texts with an image each, for which ``words`` words of the text stand."""
    token = getattr(config, "image_token_id", None)
    token = config.image_token_index if token is None else token
    vision = config.vision_config
    size = getattr(vision, "image_size", None) or IMAGE
    size = size if isinstance(size, int) else size[0]
    found = {"input_ids": _input(("image", token, words))}
    if kind == "grid":
        frames = getattr(vision, "temporal_patch_size", None) or 1
        found["pixel_values"] = torch.randn(32, 3 * frames * vision.patch_size**2)
        found["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
    else:
        between = {"several": (1,), "crops": (2,)}.get(kind, ())
        found["pixel_values"] = torch.randn(2, *between, 3, size, size)
    if kind in ("sizes", "crops"):
        found["image_sizes"] = torch.tensor([[size, size]] * 2)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in takes:
            found[name] = (found["input_ids"] == token).long()
    return found


def _guess(name: str, config: Any) -> Inputs:
    if name == "pixel_values":
        image = getattr(config, "vision_config", config)
        size = getattr(image, "image_size", IMAGE)
        size = size if isinstance(size, (list, tuple)) else (size, size)
        return {name: torch.randn(2, getattr(image, "num_channels", 3), *size)}
    if name == "pixel_values_videos":
        frames = getattr(config, "num_frames", 4)
        return {name: torch.randn(2, frames, 3, IMAGE, IMAGE)}
    if name == "input_features":
        return {name: torch.randn(2, getattr(config, "num_mel_bins", 8), 128)}
    if name == "input_values":
        return {name: torch.randn(2, 800)}
    return {name: torch.randint(4, FIRST_PLACEHOLDER, (2, 7))}


FAMILIES: dict[str, Family] = {name: Family(name) for name in EXPECTED}
