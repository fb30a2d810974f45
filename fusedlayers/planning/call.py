"""What every problem and every plan have, whatever the operation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..kernels.tuning import has_tanh
from ..kernels.tuning.dtypes import FORMATS, KERNEL_DTYPES, SM90, UNKNOWN, Format
from .devices import Device, floor_seconds
from .record import LAUNCHED, REPLAYED, TORCH, estimate

# Rows of what ``explain`` prints: (what, text).
Facts = list[tuple[str, str]]
NOTHING = "there is nothing to compute"
# Field of a plan -> the results that are computed by it.
Yields = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A problem: one call in numbers and names. Each operation adds its sizes and ``operation``, its name.

    A subclass sets ``__hash__ = Call.__hash__``, as ``dataclass`` would give it one of its own.
    """

    family: ClassVar[str] = ""  # the name of its kernels' configurations, if it is not the operation's

    input_precision: str = "ieee"
    captured: bool = False  # whether the call is being recorded into a CUDA graph, whose replay costs the host nothing
    subclass: str = ""  # the name of a tensor subclass among the operands, if there is one

    if TYPE_CHECKING:

        @property
        def dtype(self) -> str:
            """The dtype of the operands: a field of every operation, at its own place among the sizes."""

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, for pickle and copy: another process hashes strings differently, so the hash stays here."""
        return {name: value for name, value in vars(self).items() if name in self.__dataclass_fields__}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that times depend on."""
        raise NotImplementedError

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return 0 in self.sizes

    @property
    def model_flops(self) -> tuple[int, int]:
        """Floating-point operations of forward and backward as torch computes them, without what a kernel repeats."""
        raise NotImplementedError

    @property
    def decisive(self) -> "Call":
        """The problem whose measured times decide on the path of this one."""
        return self

    @property
    def described(self) -> str:
        """The sizes by their letters, the dtype and the passes, as ``explain`` prints them."""
        raise NotImplementedError

    def plan(self, device: Device, backend: str) -> "Decision":
        """The path that runs this call on ``device``, whatever the device avoids; see ``planning.plan``."""
        raise NotImplementedError

    @property
    def kin(self) -> str:
        """The kind of call: the operation, and whatever makes the times of one call say nothing of another's."""
        raise NotImplementedError

    @property
    def recorded_kin(self) -> str:
        """The kind of call in the record: with the dtype, if its products run at another rate."""
        return self.kin if self.format.narrow else f"{self.kin} {self.dtype}"

    @property
    def variant(self) -> str:
        """What distinguishes calls of one kind whose times differ by little, such as the activation."""
        return ""

    def recorded(self, path: str, device: "Device") -> str:
        """The name of a path in the record, where kernels of one path that take very different times have their own."""
        return path

    @property
    def measured_as(self) -> tuple[str, ...]:
        """The kinds of time that decide, all of them together.

        Calls launched one by one may wait for the host, those replayed in a CUDA graph for the device alone. Compiled
        code is in between: both count.
        """
        if self.captured:
            return (REPLAYED,)
        return (LAUNCHED, REPLAYED) if getattr(self, "compiled", False) else (LAUNCHED,)

    @property
    def tokens(self) -> int:
        """The tokens by whose number ``explain`` divides kept bytes; 0 if an operation has none."""
        return 0

    def kept_by_torch(self, device: Device) -> int:
        """The bytes that torch's own operations would keep for the backward pass."""
        return self.plan(device, "torch").saved_bytes

    @property
    def training(self) -> bool:
        """Whether gradients will be asked for."""
        raise NotImplementedError

    @property
    def passes(self) -> str:
        """The passes of the call, in words."""
        return "forward and backward" if self.training else "forward"

    def why_no_kernels(self, device: Device) -> str | None:
        """Why no kernel of the operation runs on this device with these operands, or None."""
        if not device.triton:
            if device.kind == "cuda":
                return "Triton is not installed"
            return f"the kernels need a CUDA or ROCm GPU, and the tensors are on device type {device.kind}"
        if device.why_no_kernels:
            return device.why_no_kernels
        if self.subclass:
            return f"an operand is a {self.subclass}, which only torch's own operations understand"
        if self.dtype not in KERNEL_DTYPES:
            return f"the kernels take {', '.join(KERNEL_DTYPES)}, not {self.dtype}"
        return NOTHING if self.empty else None

    @property
    def why_as_written(self) -> str | None:
        """Why torch may not compute another expression of the same value, or None."""
        if self.subclass:
            return f"an operand is a {self.subclass}: torch's plain expression leaves most to it"
        return NOTHING if self.empty else None

    def activation_accuracy(self, device: Device) -> str:
        """The accuracy that kernels compute activations with: one of ``kernels.activations.ACCURACIES``."""
        accuracy: str = self.format.accuracy
        # The coarse accuracy is a hardware instruction.
        return "half" if accuracy == "coarse" and not has_tanh(device.architecture) else accuracy

    @property
    def element_bytes(self) -> int:
        """The size of an operand's elements."""
        return FORMATS.get(self.dtype, UNKNOWN).bytes

    @property
    def format(self) -> Format:
        """What kernels and plans have to know of its dtype."""
        return FORMATS.get(self.dtype, UNKNOWN)

    @cached_property
    def _hash(self) -> int:
        # Looked up at every call: computed once, as a problem never changes.
        return hash(tuple(map(vars(self).get, self.__dataclass_fields__)))


_Plan = TypeVar("_Plan", bound="Decision")

# A path gains bytes if it keeps less than this share of torch's: 32-bit instead of 64-bit indices are no gain.
CLEARLY_FEWER = 0.9
# Why torch runs a call.
NO_OTHER_PATH, SET_TO_TORCH = "no other path is both possible and faster", "the backend is set to torch"
# The 16-bit elements of a vector: rows whose length is a multiple of it all start at the address of a vector.
VECTOR = 8


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A plan: the path, why it was taken, what it costs, and why each other path was rejected.

    ``yields`` maps a field to the results that its kernels compute: "y", or gradients such as "dx". The kernels of
    fields that are not in it compute the rest. The self-test finds the kernels of a wrong result by it.
    """

    yields: ClassVar[Yields] = {}
    # Whether the summary names the passes; an operation that computes gradients has a single one.
    has_passes: ClassVar[bool] = True

    problem: Any
    path: str
    reason: str
    rejected: tuple[tuple[str, str], ...]
    flops: int = 0
    bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    floor_seconds: float | None = None
    unsupported: str | None = field(default=None, compare=False)  # why the kernels cannot run, if they cannot
    timed: tuple[tuple[str, str], ...] = ()  # the paths that times decided between, by their names on record
    avoided: tuple[str, ...] = ()  # configurations it would have, had they not failed the self-test on this device

    @classmethod
    def of(
        cls: type[_Plan],
        problem: Any,
        device: Device,
        choice: Any,
        *,
        reason: str,
        flops: int,
        bytes: int,
        **facts: Any,
    ) -> _Plan:
        """The plan on the path of a ``choosing.Choice``; ``reason`` says what kernels gain."""
        return cls(
            problem=problem,
            path=choice.path,
            reason=reason if choice.path != TORCH else NO_OTHER_PATH,
            rejected=tuple(choice.against.items()),
            timed=choice.timed,
            flops=flops,
            bytes=bytes,
            floor_seconds=floor_seconds(flops, bytes, problem.dtype, device),
            **facts,
        )

    def summary(self, device: Device) -> str:
        """One sentence: what runs, and what that gains, or why torch runs."""
        if self.path == "torch":
            return f"Runs through torch: {in_brackets(self.why_torch(device))}."
        passes = f", {self.problem.passes}" if self.has_passes else ""
        gain = self.gain(device)
        return f"Runs {self.runs()}{passes}{f': {in_brackets(gain)}' if gain else ''}."

    def runs(self) -> str:
        """Where a call runs that does not run through torch alone, in words that follow "runs"."""
        return f"in the {self.path} kernels" if self.path in KERNEL_PATHS else "through torch"

    def gain(self, device: Device) -> str:
        """What the path gains: the bytes that it keeps where these are clearly fewer than torch's, else its reason."""
        theirs = self.problem.kept_by_torch(device) if self.problem.training else 0
        if self.saved_bytes >= CLEARLY_FEWER * theirs:
            return self.reason
        tokens = self.problem.tokens
        if not tokens:
            return f"keeps {self.saved_bytes:,} bytes for the backward pass instead of {theirs:,}"
        return f"keeps {self.saved_bytes // tokens:,} bytes a token instead of {theirs // tokens:,}"

    def why_torch(self, device: Device) -> str:
        """Why no kernel runs, on the path of torch."""
        if self.unsupported is not None:
            return self.unsupported
        if self.timed:
            return f"expected: {self.expected(device)}"
        reasons = [reason for path, reason in self.rejected if path in KERNEL_PATHS]
        return "; ".join(dict.fromkeys(reasons)) or self.reason

    def expected(self, device: Device) -> str:
        """What each path is expected to take, and what it took at the nearest sizes that were measured."""
        names = {name: path for name, path in self.timed if path != TORCH}
        problem, record, found = self.problem.decisive, device.record, []
        for how in problem.measured_as:
            known = None if record is None else estimate(problem, record, how, names)
            if known is None:
                continue
            of_paths = [
                f"{path} {in_words(known.seconds[path])}"
                + (f" (measured: {in_words(known.measured[path])})" if path in known.measured else "")
                for path in sorted(known.seconds, key=known.seconds.__getitem__)
            ]
            found.append(f"{how}, {', '.join(of_paths)}; measured at {' × '.join(map(str, known.nearest.sizes))}")
        return ". ".join(found) or "unknown"

    def facts(self, device: Device) -> Facts:
        """The plan as ``explain`` prints it."""
        kept = f"{self.saved_bytes:,} for the backward pass" if self.problem.training else "0 (no gradient is wanted)"
        seconds = self.floor_seconds
        return [
            ("problem", self.problem.described),
            ("device", " ".join(filter(None, (device.name, device.architecture)))),
            ("path", f"{self.path}: {self.reason}"),
            *([("expected", self.expected(device))] if self.timed else []),
            *self.kernel_facts(),
            ("FLOPs", f"{self.flops:,}"),
            ("bytes moved", f"at least {self.bytes:,}"),
            ("saved bytes", kept),
            ("workspace", f"{self.workspace_bytes:,} bytes of temporary memory"),
            (
                "floor",
                "unknown, as no peak rates of this device are on record"
                if seconds is None
                else f"at least {seconds * 1e6:.1f} µs at the device's measured peak rates",
            ),
        ]

    def kernel_facts(self) -> Facts:
        """What an operation's own fields say of its kernels: tiles, splits."""
        return []


# What measures kernels beside torch on the user's own GPU.
CALIBRATE = "python -m fusedlayers.bench calibrate"
# Why auto mode leaves a call to torch of whose kind no time is known.
NOT_ON_RECORD = f"nothing like it was measured: {CALIBRATE} does that, FUSEDLAYERS_BACKEND=triton runs the kernels"
# The paths that launch kernels of ours.
KERNEL_PATHS = ("fused", "epilogue")


def unmeasured(device: Device) -> str | None:
    """Why auto mode takes no kernel on this device, or None."""
    if device.record is not None:
        return None
    where = device.architecture or device.kind
    if replace(device, backend=SM90).record is not None:
        where = f"{where}, but for those of its architecture, which do not run here"
    return f"the kernels were not measured on {where}; {CALIBRATE} does that, FUSEDLAYERS_BACKEND=triton runs them"


def not_measured(problem: Any, device: Device) -> str | None:
    """Why auto mode leaves this device or this dtype to torch whatever the sizes, or None."""
    if reason := device.left_to_torch or unmeasured(device):
        return reason
    record = device.record
    if record is not None and record.has(problem.recorded_kin):
        return None
    if problem.dtype == "float32":
        return "float32 products in IEEE precision do not use the matrix units; torch's kernels are faster"
    return NOT_ON_RECORD


def why_never_kernels(problem: Any, device: Device, backend: str) -> str | None:
    """Why no kernel runs ``problem`` on this device at any size, given the user's wish; None where some may."""
    if (reason := problem.why_no_kernels(device)) is not None:
        return reason
    if backend == "torch":
        return SET_TO_TORCH
    return not_measured(problem, device) if backend == "auto" else None


def tiles_text(size: str, tiles: Any) -> str:
    """The tiles of a generic kernel, whose ``size`` is in words."""
    return f"{size}, {tiles.num_warps} warps, {tiles.num_stages} stages"


def sm90_text(size: str, consumers: int, stages: int) -> str:
    """The tiles of an sm90 kernel, whose ``size`` is in words."""
    return f"sm90: {size}, consumers {consumers}, stages {stages}"


def in_words(seconds: float) -> str:
    """Seconds as people say them."""
    scaled, unit = (1e6 * seconds, "µs") if seconds < 1e-3 else (1e3 * seconds, "ms")
    return f"{scaled:.3g} {unit}" if scaled < 100 else f"{scaled:,.0f} {unit}"


def in_brackets(reason: str) -> str:
    """A reason that is to follow a colon: what follows a colon of its own goes into brackets."""
    head, colon, details = reason.partition(": ")
    return f"{head} ({details})" if colon else reason
