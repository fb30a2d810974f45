"""The schema of every setting: names, types and defaults; the YAML files in ``configs/`` fill it in.

Hydra checks each setting against these dataclasses, so a key that does not exist or a value of the wrong type stops
the run before anything is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class SettingsError(ValueError):
    """A setting that cannot work: the message names it, says what it is, and what was expected."""


@dataclass
class ModelSettings:
    """The shape of the Transformer."""

    name: str = MISSING
    d_model: int = MISSING
    d_ff: int = MISSING
    layers: int = MISSING
    heads: int = MISSING
    context: int = MISSING  # tokens of one training sequence, and the most that the model ever sees at once
    activation: str = "gelu"
    gated: bool = False
    bias: bool = True  # of the feed-forward block; the rest of the model has none
    dropout: float = 0.0  # on the hidden of the feed-forward block


@dataclass
class DataSettings:
    """Where the text comes from: ``kind`` is ``stdlib`` or ``text_file``."""

    kind: str = MISSING
    path: str | None = None  # text_file: the file to read
    validation_fraction: float = 0.1


@dataclass
class PairSettings:
    """Where the (docstring, code) pairs come from: ``kind`` is ``stdlib``."""

    kind: str = MISSING
    validation_fraction: float = 0.1  # of the top-level modules
    test_fraction: float = 0.1


@dataclass
class WindowSettings:
    """Where the windows of source text come from: ``kind`` is ``stdlib``."""

    kind: str = MISSING
    validation_fraction: float = 0.1  # of the windows of every package, at most: files are not divided
    test_fraction: float = 0.1
    lines: int = 12  # of one window, without blank ones


@dataclass
class LayerSettings:
    """Who computes the layers in question, feed-forward blocks or a wide linear layer: ``kind`` is ``fused``, ``torch``
    or ``replaced``."""

    kind: str = MISSING
    recompute: bool | str = "auto"  # of FusedFFN: auto, true or false
    split_k: int | str = "auto"  # of SplitKLinear: auto, or into how many ranges each product cuts what it sums over


@dataclass
class ParallelSettings:
    """How the processes that torchrun started share the work: ``kind`` is ``none``, ``ddp``, ``fsdp`` or ``tp``."""

    kind: str = MISSING


@dataclass
class OptimSettings:
    """AdamW with linear warm-up, cosine decay and gradient clipping."""

    name: str = MISSING
    learning_rate: float = MISSING
    final_learning_rate_fraction: float = MISSING
    warmup_steps: int = MISSING
    beta1: float = MISSING
    beta2: float = MISSING
    weight_decay: float = MISSING
    clip_norm: float = MISSING


@dataclass
class RunSettings:
    """Length, size, place and device of one run."""

    directory: str = MISSING
    overwrite: bool = False  # start over in a directory that already holds a run
    resume: str | None = None  # a checkpoint file, or auto: the one in run.directory if there is one
    seed: int = 0
    steps: int = MISSING
    stop_after: int | None = None  # stop early at this step with a checkpoint, as an interruption would
    batch_size: int = MISSING  # of all processes together
    log_every: int = 10
    evaluate_every: int = MISSING  # a multiple of log_every
    evaluation_batches: int = 8
    checkpoint_every: int = MISSING  # a multiple of log_every
    compile: bool = False  # the training steps, with torch.compile; evaluation and the sample run as they are
    accelerator: str = "auto"  # auto, cpu, cuda, mps
    precision: str = "auto"  # auto, or a precision of Lightning Fabric: 32-true, bf16-mixed, 16-mixed


@dataclass
class SampleSettings:
    """The text that the trained model writes at the end."""

    prompt: str = "def "
    length: int = 400  # bytes
    temperature: float = 0.7  # below 1 prefers likely bytes, which reads better than the raw distribution


@dataclass
class SearchSettings:
    """The vectors of the late interaction, and what it is shown."""

    vocabulary: int = 8000  # most words with a token of their own
    hash_buckets: int = 2000  # tokens that all other words share
    query_words: int = 32  # of a docstring; of the code the model reads model.context
    vector_size: int = MISSING  # channels of the vectors that are compared
    sharpness: float = 20.0  # what a score of 1 is worth as a logit, at first: it is learned
    length_penalty: float = 0.06  # of the score for e times more words of code, at first: it is learned
    word_dropout: float = MISSING  # share of the words that a training step does not see
    shown: int = 5  # queries whose ranking is shown at the end


@dataclass
class ClassifierSettings:
    """The features of a window, and the two layers that name its package."""

    name: str = MISSING
    features: int = 65536  # into which n-grams are hashed: inputs of the wide layer
    n_gram: int = 2  # most words, or signs, of one feature
    scale: float = MISSING  # length of the vector of a window
    hidden: int = MISSING  # outputs of the wide layer
    dropout: float = MISSING  # of the hidden
    shown: int = 5  # windows whose prediction is shown at the end


@dataclass
class LanguageModelSettings:
    """Everything ``python -m train_examples.language_model`` can be told."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    layers: LayerSettings = field(default_factory=LayerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    run: RunSettings = field(default_factory=RunSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)


@dataclass
class CodeSearchSettings:
    """Everything ``python -m train_examples.code_search`` can be told."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: PairSettings = field(default_factory=PairSettings)
    layers: LayerSettings = field(default_factory=LayerSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    run: RunSettings = field(default_factory=RunSettings)
    search: SearchSettings = field(default_factory=SearchSettings)


@dataclass
class PackageClassifierSettings:
    """Everything ``python -m train_examples.package_classifier`` can be told."""

    classifier: ClassifierSettings = field(default_factory=ClassifierSettings)
    data: WindowSettings = field(default_factory=WindowSettings)
    layers: LayerSettings = field(default_factory=LayerSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    run: RunSettings = field(default_factory=RunSettings)


Settings = TypeVar("Settings", LanguageModelSettings, CodeSearchSettings, PackageClassifierSettings)


def register_settings() -> None:
    """Make the schemas known to Hydra under the names that the files in ``configs/`` start from."""
    ConfigStore.instance().store(name="language_model_schema", node=LanguageModelSettings)
    ConfigStore.instance().store(name="code_search_schema", node=CodeSearchSettings)
    ConfigStore.instance().store(name="package_classifier_schema", node=PackageClassifierSettings)


def as_settings(config: DictConfig, schema: type[Settings]) -> Settings:
    """The composed configuration as dataclasses.

    Raises:
        SettingsError: a key was forced into the configuration with Hydra's ``+`` although no setting has that name.
    """
    plain = OmegaConf.to_container(config, resolve=True)
    try:
        settings = OmegaConf.to_object(OmegaConf.merge(schema, plain))
    except OmegaConfBaseException as error:
        raise SettingsError(str(error)) from error
    assert isinstance(settings, schema)
    return settings
