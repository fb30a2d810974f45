"""What every problem and every plan have, whatever the operation."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """A problem: one call in numbers and names. Each operation adds its sizes and ``operation``, its name.

    A subclass sets ``__hash__ = Call.__hash__``, as ``dataclass`` would give it one of its own.
    """

    input_precision: str = "ieee"
    captured: bool = False  # whether the call is being recorded into a CUDA graph, whose replay costs the host nothing
    cold: bool = False  # whether it is recorded before its kernels ran: compiling them there could break the capture
    subclass: str = ""  # the name of a tensor subclass among the operands, if there is one

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Looked up at every call: computed once, as a problem never changes.
        return hash(tuple([getattr(self, name) for name in self.__dataclass_fields__]))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A plan: the path, why it was taken, what it costs, and why each other path was rejected."""

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


COLD = "a CUDA graph capture records only kernels that ran before it: call once with the same shapes to warm up"
