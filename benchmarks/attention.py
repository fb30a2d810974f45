"""One attention for every contender: torch's ``scaled_dot_product_attention``, causal where the model is, no mask.

Run eagerly, transformers passes no mask where none is needed. Traced by a compiler it builds a dense one, with which
attention loses its flash kernel, so that compiled models would be compared with a handicap. For an attention function
that it knows no mask for it builds none either way: right where no text is padded, as in these steps.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

NAME = "without_mask"


def use_without_mask(model: nn.Module) -> None:
    """Let a model of transformers, and all copies of it, compute attention without a mask.

    Calls raise ``ValueError`` if the model passes a mask, or asks for a window of its own, all the same.

    Raises:
        ValueError: the model takes no attention function from outside.
    """
    attention = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS

    def without_mask(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise ValueError(f"attention_mask: expected None, got one of {tuple(attention_mask.shape)}")
        if options.get("sliding_window") is not None:
            raise ValueError(f"sliding_window: expected None, got {options['sliding_window']}")
        result: tuple[Tensor, None] = attention(module, query, key, value, None, **options)
        return result

    functions.register(NAME, without_mask)
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    if model.config._attn_implementation != NAME:  # type: ignore[union-attr]
        raise ValueError(f"{type(model).__name__}: expected a model that takes attention functions from outside")
