"""Rules, as data: which attributes form a class's FFN, and which linears use split-K; the user's, and those of the
library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..functional.linear import check_reduction, check_split_k
from ..functional.options import checked_patterns
from ..modules import class_path
from .conditions import NONE, Conditions, attribute

# If one linear computes gate and up: which of its rows are the gate's.
GATE_ROWS = ("first", "last", "even", "odd")


def _path(kind: type | str) -> str:
    return kind if isinstance(kind, str) else class_path(kind)


def _check_class(name: str, kind: object) -> None:
    if isinstance(kind, str) and kind.count(".") and all(part.isidentifier() for part in kind.split(".")):
        return
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"{name} must be a subclass of nn.Module, or where to import it from (str), got {kind!r}")


@dataclass(frozen=True)
class FFNRule:
    """Declares that a class computes ``down(dropout(act(up(x))))``, or gated ``down(dropout(act(gate(x)) * up(x)))``.

    A rule is data: the class, and the names of attributes of its instances. The source of the block's method is read. A
    rule that contradicts it is refused, with the line of code that differs, and so is a rule for a source that cannot
    be read, unless it is ``trusted``. A block with children, parameters or buffers that the rule does not name computes
    more than that, and is left alone.

    If the FFN is only a part of what a method computes (a layer with attention, residual and norm), ``inside`` names
    the method. It runs as its author wrote it, with one call in place of the FFN; so its source is read even if the
    rule is trusted. A method that does anything else with the hidden (a factor, a second activation) is left as it is.
    Names may have dots.

    Args:
        module_class: the class of the block, or ``"package.module.Class"``; instances of a subclass are left alone.
        up, down: the linears into and out of the hidden.
        activation: the attribute that holds the activation (a module, a function or a name); if the block has no such
            attribute, the name of the activation itself.
        gate: the linear that is activated and multiplied with ``up``; a block that has None or nothing there is not
            gated.
        gate_rows: if ``up`` is one linear for both, the rows of its weight that are the gate's: "first" or "last" half,
            "even" or "odd" ones. Inside a method only the halves, which it separates by ``chunk``.
        dropout: that of the hidden: an ``nn.Dropout``, or a number that applies in training. None: there is none.
        output_dropout: the same, after ``down``. Not with ``inside``, where the method applies it.
        inside: the method that holds the FFN; None: the forward of the block is the FFN and nothing else.
        holders: the child named before each dot, and its class: ``(("output", BertOutput), ...)``.
        trusted: accept the rule without reading the source; the report says so.

    Raises:
        TypeError: ``module_class`` is not a subclass of ``nn.Module``, or another argument is not the name of one.
        ValueError: arguments that exclude each other, or a dotted name whose holder is not named.
    """

    module_class: type[nn.Module] | str
    _: KW_ONLY
    up: str
    down: str
    activation: str = "activation"
    gate: str | None = None
    gate_rows: str | None = None
    dropout: str | None = None
    output_dropout: str | None = None
    inside: str | None = None
    holders: tuple[tuple[str, type[nn.Module] | str], ...] = ()
    trusted: bool = False

    def __post_init__(self) -> None:
        _check_class("module_class", self.module_class)
        if not isinstance(self.trusted, bool):
            raise TypeError(f"trusted must be a bool, got {self.trusted!r}")
        for field in fields(FFNRule)[1:-2]:
            value = getattr(self, field.name)
            if not isinstance(value, str) and not (value is None and field.default is None):
                raise TypeError(f"{field.name} must be the name of an attribute (str), got {value!r}")
        pairs = isinstance(self.holders, tuple) and all(isinstance(each, tuple) for each in self.holders)
        if not pairs or not all(len(each) == 2 and isinstance(each[0], str) for each in self.holders):
            raise TypeError(f"holders must be a tuple of pairs (name of a child, its class), got {self.holders!r}")
        for name, kind in self.holders:
            _check_class(f"holders: the class of {name}", kind)
        if self.inside is not None and (self.gate_rows in ("even", "odd") or self.output_dropout):
            raise ValueError(f"inside={self.inside!r} excludes even and odd gate_rows and output_dropout, got {self}")
        if self.gate_rows is not None and (self.gate or self.gate_rows not in GATE_ROWS):
            raise ValueError(f"gate_rows must be one of {GATE_ROWS}, and excludes gate, got {self}")
        dotted = {name.rpartition(".")[0] for name in (*self.parts(), self.output_dropout or "") if "." in name}
        if dotted != {name for name, _ in self.holders}:
            raise ValueError(f"holders must name the class of each of {sorted(dotted)}: {self}")

    @property
    def conditions(self) -> Conditions:
        """The conditions under which it holds; a trusted rule has none."""
        return NONE

    @property
    def is_formula(self) -> bool:
        """Whether ``activation`` is a name even if the block has such an attribute; a user's rule may mean either."""
        return False

    @property
    def class_path(self) -> str:
        """Where the class is imported from."""
        return _path(self.module_class)

    def parts(self) -> tuple[str, ...]:
        """The names of the parts of the FFN, in the order in which they are called."""
        names = (self.up, self.gate, self.activation_path, self.dropout, self.down)
        return tuple(name for name in names if name is not None)

    @property
    def activation_path(self) -> str | None:
        """The attribute of the block that may be its activation, or None."""
        return None if self.is_formula else self.activation

    def activation_of(self, block: nn.Module) -> Any:
        """The activation of a block: its attribute, or the name if it has no such attribute."""
        return self.activation if self.is_formula else attribute(block, self.activation, self.activation)

    @functools.cached_property
    def holder_paths(self) -> tuple[tuple[str, str], ...]:
        """The names of the holders, and where their classes are imported from."""
        return tuple((name, _path(kind)) for name, kind in self.holders)


@dataclass(frozen=True)
class FoundRule(FFNRule):
    """A rule that was read from the source of a block, under some conditions.

    ``edits`` are the edited method that holds the FFN, and the edited methods that it calls on the way. ``activation``
    is a name of this library if ``is_formula``, whatever attribute the block has under that name.
    """

    conditions: Conditions = NONE
    edits: tuple[Any, ...] = ()
    is_formula: bool = False

    def __post_init__(self) -> None:
        """Nothing to check: the values were read, not given by a user."""


def _liger(
    kind: str,
    activation: str,
    gate: str | None = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    gate_rows: str | None = None,
) -> FFNRule:
    path = f"liger_kernel.transformers.{kind}"
    return FFNRule(path, up=up, gate=gate, gate_rows=gate_rows, down=down, activation=activation, trusted=True)


# Liger-Kernel's blocks call custom kernels, so their source does not show the formula. Its Falcon H1 block scales
# inside the FFN, and its tiled blocks are meant to run tile by tile: these have no rule and are called as they are.
LIGER_RULES = (
    _liger("swiglu.LigerSwiGLUMLP", "silu"),
    _liger("swiglu.LigerSwiGLUMLPForMuseGlimmer", "silu"),
    _liger("swiglu.LigerQwen3MoeSwiGLUMLP", "silu"),
    _liger("swiglu.LigerHunyuanV1SwiGLUMLP", "silu"),
    _liger("swiglu.LigerBlockSparseTop2MLP", "silu", "w1", "w3", "w2"),
    _liger("swiglu.LigerPhi3SwiGLUMLP", "silu", None, "gate_up_proj", gate_rows="first"),
    _liger("mlp.LigerMLP", "silu"),
    _liger("geglu.LigerGEGLUMLP", "gelu_tanh"),
    _liger("geglu.LigerGEGLUMLPForGemma4", "gelu_tanh"),
)
# The methods of torch's layers are read, too.
_TORCH_RULES = tuple(
    FoundRule(kind, up="linear1", down="linear2", dropout="dropout", output_dropout=after, inside="_ff_block")
    for kind, after in ((nn.TransformerEncoderLayer, "dropout2"), (nn.TransformerDecoderLayer, "dropout3"))
)
KNOWN_RULES: dict[str, FFNRule] = {rule.class_path: rule for rule in (*LIGER_RULES, *_TORCH_RULES)}


@dataclass(frozen=True)
class LinearRule:
    """Selects the ``nn.Linear`` modules that become :class:`SplitKLinear`: those that meet every condition given here.

    Linears that are part of a fused FFN stay, and so do subclasses and linears that are not plain.

    Args:
        names: patterns of paths in the model, as in a shell (``"*.lm_head"``); None: any path.
        in_features, out_features: the widths, an int or a ``range``; None: any.
        predicate: called with path and module, returns whether to take it; None: take it.
        split_k, reduction: as in :class:`SplitKLinear`.

    Raises:
        TypeError, ValueError: an argument is not what is described here; the message names it.
    """

    _: KW_ONLY
    names: str | tuple[str, ...] | None = None
    in_features: int | range | None = None
    out_features: int | range | None = None
    predicate: Callable[[str, nn.Linear], bool] | None = None
    split_k: int | str = "auto"
    reduction: str = "workspace"

    def __post_init__(self) -> None:
        self._patterns()
        for name in ("in_features", "out_features"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (value is None or isinstance(value, (int, range))):
                raise TypeError(f"{name} must be an int, a range or None, got {value!r}")
        if not (self.predicate is None or callable(self.predicate)):
            raise TypeError(f"predicate must be callable or None, got {self.predicate!r}")
        check_split_k(self.split_k)
        check_reduction(self.reduction)

    def _patterns(self) -> tuple[str, ...] | None:
        return None if self.names is None else checked_patterns("names", self.names, "a str, a tuple of str or None")

    def takes(self, path: str, linear: nn.Linear) -> bool:
        """Whether the conditions hold for the linear at ``path``."""
        names = self._patterns()
        if names is not None and not any(fnmatchcase(path, name) for name in names):
            return False
        for wanted, width in ((self.in_features, linear.in_features), (self.out_features, linear.out_features)):
            if wanted is not None and width not in ((wanted,) if isinstance(wanted, int) else wanted):
                return False
        return self.predicate is None or bool(self.predicate(path, linear))
