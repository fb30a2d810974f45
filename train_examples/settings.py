"""The schema of every setting: names, types, defaults and valid values; ``configs/`` fills it in.

Hydra checks names and types against these dataclasses, and :func:`as_settings` checks the values, so an invalid setting
stops the run before anything is read or built.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fusedlayers.functional.linear import check_split_k
from fusedlayers.kernels.activations import canonical_activation
from train_examples.rules import (
    ABOVE_ZERO,
    ACCELERATOR,
    BYTES,
    COUNT,
    COUNT_OR_NONE,
    FINITE,
    FLOAT8,
    FOLDER,
    NOT_NEGATIVE,
    ONLY_NULL,
    PART,
    PRECISION,
    PROBABILITY,
    RECOMPUTE,
    SEED,
    SHARE,
    THREADS,
    SettingsError,
    checked,
    one_of,
    only_auto,
)


@dataclass
class ModelSettings:
    """The shape of the Transformer."""

    name: str = MISSING
    d_model: int = checked(COUNT)
    d_ff: int = checked(COUNT)
    layers: int = checked(COUNT)
    heads: int = checked(COUNT)
    context: int = checked(COUNT)  # tokens of a training sequence, and the most that the model ever sees at once
    activation: str = "gelu"
    gated: bool = False
    bias: bool = True  # of the feed-forward block; the rest of the model has none
    dropout: float = checked(PROBABILITY, 0.0)  # on the hidden of the feed-forward block
    experts: int = checked(COUNT_OR_NONE, 0)  # feed-forward blocks of width d_ff that a router chooses from; 0: one
    experts_per_token: int = checked(COUNT, 2)


@dataclass
class DataSettings:
    """The source of the text: ``kind`` is ``stdlib`` or ``text_file``."""

    kind: str = checked(one_of("stdlib", "text_file"))
    path: str | None = None  # text_file: the file to read
    validation_fraction: float = checked(PART, 0.1)


@dataclass
class VocabularySettings:
    """What a token is: ``kind`` is ``bytes`` or ``bpe``, byte pairs learned from the training text."""

    kind: str = checked(one_of("bytes", "bpe"))
    size: int = checked(BYTES)  # bpe: tokens, if the text has that many pairs
    cache: str = checked(FOLDER, "runs/vocabularies")  # bpe: where the learned vocabulary is cached


@dataclass
class PairSettings:
    """The source of the (docstring, code) pairs: ``kind`` is ``stdlib``."""

    kind: str = checked(one_of("stdlib"))
    validation_fraction: float = checked(PART, 0.1)  # of the top-level modules
    test_fraction: float = checked(PART, 0.1)


@dataclass
class WindowSettings:
    """The source of the windows of text: ``kind`` is ``stdlib``."""

    kind: str = checked(one_of("stdlib"))
    validation_fraction: float = checked(PART, 0.1)  # of the windows of every package, at most: files stay whole
    test_fraction: float = checked(PART, 0.1)
    lines: int = checked(COUNT, 12)  # of one window, without blank ones


@dataclass
class LayerSettings:
    """Who computes the feed-forward blocks: ``kind`` is ``fused``, ``torch`` or ``replaced``."""

    kind: str = checked(one_of("fused", "torch", "replaced"))
    recompute: bool | int | str = checked(RECOMPUTE, "auto")  # of FusedFFN: auto, true, false, or bytes it may keep
    precision: str | None = checked(FLOAT8, None)  # of FusedFFN: null is that of the run, fp8 8 bits where they pay
    split_k: int | str = checked(only_auto("no layer of this model takes it"), "auto")


@dataclass
class LossSettings:
    """Who computes the last linear layer with its loss: ``kind`` is ``fused`` or ``torch``."""

    kind: str = checked(one_of("fused", "torch"))
    recompute: bool = False  # fused: the backward pass recomputes the logits, some columns at a time


@dataclass
class WideLayerSettings(LayerSettings):
    """LayerSettings of a model whose only fused layer is a wide linear: ``kind`` is ``fused`` or ``torch``."""

    kind: str = checked(one_of("fused", "torch"))
    recompute: bool | int | str = checked(only_auto("there is no feed-forward block"), "auto")
    precision: str | None = checked(ONLY_NULL, None)
    split_k: int | str = "auto"  # of SplitKLinear: auto, or the number of splits of each product's reduction axis


@dataclass
class ParallelSettings:
    """How the processes that torchrun started share the work: ``kind`` is ``none``, ``ddp``, ``fsdp`` or ``tp``."""

    kind: str = checked(one_of("none", "ddp", "fsdp", "tp"))


@dataclass
class OptimSettings:
    """AdamW with linear warm-up, cosine decay and gradient clipping."""

    name: str = checked(one_of("adamw"))
    learning_rate: float = checked(NOT_NEGATIVE)
    final_learning_rate_fraction: float = checked(NOT_NEGATIVE)
    warmup_steps: int = checked(COUNT_OR_NONE)
    beta1: float = checked(SHARE)
    beta2: float = checked(SHARE)
    weight_decay: float = checked(NOT_NEGATIVE)
    clip_norm: float = checked(ABOVE_ZERO)


@dataclass
class RunSettings:
    """Length, size, directory and device of one run."""

    directory: str = checked(FOLDER)
    overwrite: bool = False  # start over in a directory that already holds a run
    resume: str | None = None  # a checkpoint file, or auto: the one in run.directory if there is one
    seed: int = checked(SEED, 0)
    steps: int = checked(COUNT)
    stop_after: int | None = None  # stop early at this step with a checkpoint, as an interruption would
    batch_size: int = checked(COUNT)  # of all processes together
    log_every: int = checked(COUNT, 10)
    evaluate_every: int = MISSING  # a multiple of log_every
    evaluation_batches: int = checked(COUNT, 8)
    checkpoint_every: int = MISSING  # a multiple of log_every
    compile: bool = False  # torch.compile for the training steps; evaluation and the sample run eagerly
    accelerator: str = checked(ACCELERATOR, "auto")
    threads: int | None = checked(THREADS, None)  # of a CPU; null: torch's default, one per core
    precision: str = checked(PRECISION, "auto")  # auto, or a precision of Lightning Fabric


@dataclass
class SampleSettings:
    """The text that the trained model writes at the end."""

    prompt: str = "def "
    length: int = checked(COUNT_OR_NONE, 400)  # tokens
    temperature: float = checked(ABOVE_ZERO, 0.7)  # below 1 prefers likely tokens, which reads better


@dataclass
class SearchSettings:
    """The vectors of the late interaction, and its inputs."""

    vocabulary: int = checked(COUNT, 8000)  # the most words with a token of their own
    hash_buckets: int = checked(COUNT, 2000)  # tokens that all other words share
    query_words: int = checked(COUNT, 32)  # of a docstring; of the code the model reads model.context
    vector_size: int = checked(COUNT)  # channels of the vectors that are compared
    sharpness: float = checked(ABOVE_ZERO, 20.0)  # the logit of a score of 1 at first: it is learned
    length_penalty: float = checked(FINITE, 0.06)  # off the score for e times more words of code; learned, too
    word_dropout: float = checked(SHARE)  # share of the words hidden in a training step
    shown: int = checked(COUNT, 5)  # queries whose ranking is shown at the end


@dataclass
class ClassifierSettings:
    """The features of a window, and the two layers that name its package."""

    name: str = MISSING
    features: int = checked(COUNT, 65536)  # into which n-grams are hashed: inputs of the wide layer
    n_gram: int = checked(COUNT, 2)  # most words, or signs, of one feature
    scale: float = checked(ABOVE_ZERO)  # length of the vector of a window
    hidden: int = checked(COUNT)  # outputs of the wide layer
    dropout: float = checked(PROBABILITY)  # of the hidden
    shown: int = checked(COUNT, 5)  # windows whose prediction is shown at the end


@dataclass
class LanguageModelSettings:
    """All settings of ``python -m train_examples.language_model``."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    vocabulary: VocabularySettings = field(default_factory=VocabularySettings)
    layers: LayerSettings = field(default_factory=LayerSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    run: RunSettings = field(default_factory=RunSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)


@dataclass
class CodeSearchSettings:
    """All settings of ``python -m train_examples.code_search``."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: PairSettings = field(default_factory=PairSettings)
    layers: LayerSettings = field(default_factory=LayerSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    run: RunSettings = field(default_factory=RunSettings)
    search: SearchSettings = field(default_factory=SearchSettings)


@dataclass
class PackageClassifierSettings:
    """All settings of ``python -m train_examples.package_classifier``."""

    classifier: ClassifierSettings = field(default_factory=ClassifierSettings)
    data: WindowSettings = field(default_factory=WindowSettings)
    layers: WideLayerSettings = field(default_factory=WideLayerSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    run: RunSettings = field(default_factory=RunSettings)


Settings = TypeVar("Settings", LanguageModelSettings, CodeSearchSettings, PackageClassifierSettings)


def register_settings() -> None:
    """Register the schemas with Hydra under the names that the files in ``configs/`` start from."""
    ConfigStore.instance().store(name="language_model_schema", node=LanguageModelSettings)
    ConfigStore.instance().store(name="code_search_schema", node=CodeSearchSettings)
    ConfigStore.instance().store(name="package_classifier_schema", node=PackageClassifierSettings)


def as_settings(config: DictConfig, schema: type[Settings]) -> Settings:
    """The composed configuration as dataclasses, checked.

    Raises:
        SettingsError: a value is missing or invalid, or Hydra's ``+`` added a key that is not a setting.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True)
        settings = OmegaConf.to_object(OmegaConf.merge(schema, plain))
    except OmegaConfBaseException as error:
        # Later lines name the classes that OmegaConf searched.
        where = f"{error.full_key}: " if error.full_key else ""
        raise SettingsError(where + str(error).splitlines()[0]) from error
    assert isinstance(settings, schema)
    check(settings)
    return settings


def check(settings: LanguageModelSettings | CodeSearchSettings | PackageClassifierSettings) -> None:
    """Check every value by its own rule, then those that depend on one another.

    Raises:
        SettingsError: names the first invalid setting.
    """
    for section in fields(settings):
        check_section(section.name, getattr(settings, section.name))
    if settings.layers.kind == "torch" and settings.layers.precision is not None:
        raise SettingsError(f"layers.precision is {settings.layers.precision}; expected null with layers=torch")
    check_intervals(settings.run)
    if isinstance(settings, PackageClassifierSettings):
        check_wide_layer(settings.layers)
        return
    check_model(settings.model)
    if isinstance(settings, LanguageModelSettings) and settings.model.experts and settings.parallel.kind == "tp":
        raise SettingsError("parallel.kind is tp; expected none, ddp or fsdp with model.experts above 0")
    if settings.layers.precision is not None:
        if settings.model.experts:
            raise SettingsError("layers.precision is not null; expected null with model.experts above 0")
        if isinstance(settings, LanguageModelSettings) and settings.parallel.kind == "tp":
            raise SettingsError("layers.precision is not null; expected null with parallel=tp")
    if isinstance(settings, CodeSearchSettings):
        check_search(settings)
    else:
        check_head(settings.vocabulary, settings.loss)
        if not settings.sample.prompt:
            raise SettingsError("sample.prompt is empty; expected at least one byte to continue from")


def check_section(name: str, section: object) -> None:
    """Check every value of one section by its own rule, and that some data is left for training.

    Raises:
        SettingsError: names the first invalid setting.
    """
    for entry in fields(section):  # type: ignore[arg-type]
        value, rule = getattr(section, entry.name), entry.metadata.get("rule")
        if rule is not None and not rule.holds(value):
            raise SettingsError(f"{name}.{entry.name} is {value!r}; expected {rule.expected}")
    if isinstance(section, PairSettings | WindowSettings) and section.test_fraction + section.validation_fraction >= 1:
        raise SettingsError(
            f"data.test_fraction is {section.test_fraction} and data.validation_fraction is "
            f"{section.validation_fraction}; expected their sum to be below 1: the rest is for training"
        )


def check_intervals(run: RunSettings) -> None:
    """Evaluation, checkpoints and an early stop must coincide with a row of the metrics."""
    for name in ("evaluate_every", "checkpoint_every", "stop_after"):
        value = getattr(run, name)
        if value is not None and (value < 1 or value % run.log_every):
            raise SettingsError(f"run.{name} is {value}; expected a positive multiple of run.log_every={run.log_every}")


def check_model(model: ModelSettings) -> None:
    """Check that the heads divide the model into an even number of channels, and that the activation exists."""
    if model.d_model % (2 * model.heads):
        raise SettingsError(
            f"model.d_model is {model.d_model} and model.heads is {model.heads}; "
            "expected d_model to be a multiple of 2 * heads: rotary positions turn pairs of channels"
        )
    try:
        canonical_activation(model.activation)
    except ValueError as error:
        raise SettingsError(f"model.activation: {error}") from error
    if model.experts and model.experts_per_token > model.experts:
        raise SettingsError(
            f"model.experts_per_token is {model.experts_per_token}; expected at most model.experts={model.experts}"
        )
    if model.experts and (model.bias or model.dropout):
        raise SettingsError("model.experts is above 0; expected model.bias=false and model.dropout=0.0 with experts")


def check_head(vocabulary: VocabularySettings, loss: LossSettings) -> None:
    """Check that a vocabulary of bytes has 256 tokens, and that the loss can do what is asked."""
    if vocabulary.kind == "bytes" and vocabulary.size != 256:
        raise SettingsError(f"vocabulary.size is {vocabulary.size}; expected 256 with vocabulary=bytes")
    if loss.kind == "torch" and loss.recompute:
        raise SettingsError("loss.recompute is true; expected false with loss=torch, which keeps its logits")


def check_search(settings: CodeSearchSettings) -> None:
    """Check that queries fit into the encoder, and that a batch has more than one pair."""
    if settings.search.query_words > settings.model.context:
        raise SettingsError(
            f"search.query_words is {settings.search.query_words} and model.context is {settings.model.context}; "
            "expected a query to be no longer than what the model sees at once"
        )
    if settings.run.batch_size < 2:
        raise SettingsError(
            f"run.batch_size is {settings.run.batch_size}; expected 2 or more: a pair is told from the others"
        )


def check_wide_layer(layers: WideLayerSettings) -> None:
    """Check that the library knows this split."""
    try:
        check_split_k(layers.split_k)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"layers.split_k: {error}") from error
