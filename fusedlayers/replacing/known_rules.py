"""Blocks whose forward hides in kernels what it computes, so that their source does not show it: rules by class.

Of Liger-Kernel, whose blocks take the place of a model's own. Its class for Falcon H1 has factors in its FFN, and the
tiled ones are there to be run tile by tile: they are called.
"""

from __future__ import annotations

from .rules import FFNRule


def _gated(
    kind: str, activation: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> FFNRule:
    return FFNRule(f"liger_kernel.transformers.{kind}", gate=gate, up=up, down=down, activation=activation)


KNOWN_RULES = {
    rule.class_path: rule
    for rule in (
        _gated("swiglu.LigerSwiGLUMLP", "silu"),
        _gated("swiglu.LigerSwiGLUMLPForMuseGlimmer", "silu"),
        _gated("swiglu.LigerQwen3MoeSwiGLUMLP", "silu"),
        _gated("swiglu.LigerHunyuanV1SwiGLUMLP", "silu"),
        _gated("swiglu.LigerBlockSparseTop2MLP", "silu", "w1", "w3", "w2"),
        _gated("mlp.LigerMLP", "silu"),
        _gated("geglu.LigerGEGLUMLP", "gelu_tanh"),
        _gated("geglu.LigerGEGLUMLPForGemma4", "gelu_tanh"),
        FFNRule(
            "liger_kernel.transformers.swiglu.LigerPhi3SwiGLUMLP",
            up="gate_up_proj", gate_rows="first", down="down_proj", activation="silu",
        ),
    )
}  # fmt: skip
