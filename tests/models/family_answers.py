"""Which classes of the models of `every_family.py` compute an FFN, read from their source: an answer key.

Nothing here is derived from `fusedlayers`, so what `replace` finds can be checked against it.
"""

from __future__ import annotations

from pathlib import Path


def _counts(line: str) -> tuple[str, dict[str, int]]:
    name, _, blocks = line.partition(":")
    pairs = (pair.split() for pair in blocks.split(",") if pair.strip())
    return name, {kind: int(count) for kind, count in pairs}


# The families, and how many modules of which class compute act(x W1 + b1) W2 + b2, gated or not, in their small model:
# an FFN, or those of all experts, each token through those that its router chose.
# The class is the innermost module that holds all linears of an FFN: of BERT the layer, of CLIP its MLP. A module that
# is called several times counts once; so do towers that the inputs do not reach (images, where the input is a text).
EXPECTED: dict[str, dict[str, int]] = dict(
    map(_counts, Path(__file__).with_name("family_blocks.txt").read_text().splitlines())
)

# Parts of models that look like an FFN or take its place, by patterns of their classes, and why they are none that can
# be fused. What `family_blocks.txt` counts does not fit any of them.
NOT_FUSED: dict[str, str] = {
    "ApertusMLP": "the activation xIELU has parameters of its own",
    "DabDetr*": "the activation PReLU has a parameter of its own",
    "BitNetMLP": "a norm lies between the activation and the second linear",
    "Kosmos2TextFFN": "a norm lies between the activation and the second linear",
    "Kosmos2_5TextFFN": "a norm lies between the activation and the second linear",
    "ConvNextV2Layer": "a norm over the image lies between the activation and the second linear",
    "DeepseekV4MLP": "what goes into the activation and the product is clamped",
    "MiniMaxM3VLDenseMLP": "what goes into the activation and the product is clamped, and 1 is added to a factor",
    "FalconH1MLP": "a factor lies between the linear and its activation",
    "Gemma3nTextMLP": "the activation is sparse: where its sparsity is above 0 only the largest entries are kept",
    "Gemma4AudioFeedForward": "its linears clamp what goes in and what comes out",
    "Gemma4TextDecoderLayer": "the activated gate of each layer is multiplied by an embedding, not by a linear",
    "EmbeddingGemma2TextPLEBlock": "the activated gate of each layer is multiplied by an embedding, not by a linear",
    "GLPNMixFFN": "a depthwise convolution lies between the linears",
    "SegformerMixMLP": "a depthwise convolution lies between the linears",
    "PvtV2ConvFeedForwardNetwork": "a depthwise convolution lies between the linears",
    "SqueezeBertModule": "its linears are grouped convolutions",
    "SwiftFormer*Mlp": "its linears are convolutions of images",
    "PoolFormerOutput": "its linears are convolutions of images",
    "ResNet*Layer": "it consists of convolutions",
    "IBertLayer": "its linears and its activation are quantised",
    "Zamba2MLP": "a low-rank adapter of each layer adds to the hidden of shared weights",
    "SamFeedForward": "three linears in a row share the one in the middle",
    "ZayaRouterMLP": "three linears in a row share the one in the middle",
    "*MLPPredictionHead": "linears in a loop",
    "Gemma3nTextAltUp": "one activated linear feeds two others",
    "MuseSparkExperts": "a norm follows every expert",
    "OpenAIPrivacyFilterExperts": "its experts multiply in float32, whatever the dtype of their weights",
    "Llama4TextExperts": "each expert gets all tokens, those of others multiplied by zero",
    "JetMoeParallelExperts": "its tokens are sorted by expert outside, and one stack of weights is multiplied",
    "MambaMixer": "the block is a state space layer",
    "Mamba2Mixer": "the block is a state space layer",
    "FalconMambaMixer": "the block is a state space layer",
}

# Classes whose gate and first linear are one linear, the gate in its first half; in the second half for the last three.
PACKED = (
    "DiaMLP", "GlmMLP", "Glm4MLP", "Glm4vTextMLP", "GlmImageTextMLP", "GlmOcrTextMLP", "GraniteMoeHybridMLP",
    "GraniteMoeSWAMLP", "GraniteMoeSharedMLP", "ModernBertMLP", "ModernBertDecoderMLP", "MoshiGatingMLP", "Phi3MLP",
    "AyaVisionMultiModalProjector", "Cohere2VisionMultiModalProjector", "MoonshineDecoderMLP",
)  # fmt: skip

# Classes that hold two FFNs each.
PAIRS = ("InstructBlipQFormerLayer", "LiltLayer", "LxmertXLayer", "MiniMaxM3VLMultiModalProjector")

# Classes whose FFN is written in a way of its own; fused or not, the numbers must be equal.
UNUSUAL: dict[str, str] = {
    "AlbertLayer": "one layer is called several times",
    "BloomMLP": "adds the residual and drops out inside; its activation is an autograd function in training",
    "BridgeTowerResidualAttention": "its linears and their activation are called in a loop over an nn.ModuleDict",
    "CpmAntFeedForward": "gate and first linear lie in an inner module that multiplies",
    "FalconMLP": "its linears are a subclass of nn.Linear, with a forward of its own",
    "Llama4VisionMLP2": "the activation is called again after the second linear",
    "MuseGlimmerVisionAdapter": "the activation is called again after the second linear",
    "Nemotron3DiarizationClassificationHead": "the activation is called before the first linear as well",
    "RwkvFeedForward": "torch.square(torch.relu(...)) is the activation; a sigmoid gates what the FFN returns",
    "TimesFmResidualBlock": "a third linear of the input is added to the output",
    "TimesFm2_5ResidualBlock": "a third linear of the input is added to the output",
    "XPathEmbeddings": "the FFN is a part of an embedding",
}
