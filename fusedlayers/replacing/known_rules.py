"""Rules by class for blocks whose forward calls custom kernels, so that their source does not show the formula.

All are Liger-Kernel's, whose blocks replace a model's own. Its Falcon H1 block scales inside the FFN, and its tiled
blocks are meant to run tile by tile: these have no rule and are called as they are.
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
