"""Triton if it is installed, otherwise inert stand-ins, so that every kernel file imports on any machine."""

import re
from collections.abc import Callable
from typing import Any

# Triton releases that the kernels are known to compile with. Under any other, auto mode uses them only after they have
# passed a self-test on the user's own GPU.
KNOWN_RELEASES: tuple[tuple[int, ...], ...] = ((3, 6), (3, 7), (3, 8), (3, 9))


class Inert:
    """Returns itself for any attribute and any call or, as a decorator, the function that it decorates."""

    def __getattr__(self, name: str) -> "Inert":
        return self

    def __call__(self, *arguments: object, **options: object) -> object:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self


try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    RELEASE: tuple[int, ...] = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
except ImportError:
    HAS_TRITON = False
    RELEASE = ()
    triton = tl = Inert()


def release_is_known() -> bool:
    """Whether this release of Triton is one of the :data:`KNOWN_RELEASES`."""
    return RELEASE in KNOWN_RELEASES


def interpreted() -> bool:
    """Whether kernels run through Triton's interpreter (tests on machines without a GPU), not on a device."""
    return HAS_TRITON and triton.knobs.runtime.interpret


def compiler() -> str:
    """The compiler of kernels, with its version."""
    if not HAS_TRITON:
        return "no Triton"
    return f"Triton {triton.__version__}{', interpreter' if interpreted() else ''}"


def compiled_folder() -> str:
    """Triton's cache folder for compiled kernels, writable or not; empty if none is set. Needs Triton."""
    return str(triton.knobs.cache.dir or "")


def toolchain(architecture: str) -> str:
    """The compiler and, on NVIDIA GPUs, the assembler that kernels for ``architecture`` go through at this moment.

    ``torch.compile`` replaces Triton's assembler by that of its own CUDA for the rest of the process.
    """
    if not HAS_TRITON or interpreted() or not architecture.startswith("sm_"):
        return compiler()
    return f"{compiler()}, ptxas {assembler(architecture).version}"


def assembler(architecture: str) -> Any:
    """Triton's ptxas (path and version) for NVIDIA's ``architecture``.

    Triton ships an older and a newer one; since 3.9 it uses the newer one for sm_90.
    """
    from triton.backends.nvidia import compiler as nvidia

    chosen: Callable[[int], Any] = getattr(nvidia, "get_ptxas", lambda _: triton.knobs.nvidia.ptxas)
    return chosen(int(architecture.removeprefix("sm_")))


__all__ = [
    "HAS_TRITON", "KNOWN_RELEASES", "RELEASE", "Inert", "assembler", "compiled_folder", "compiler", "interpreted",
    "release_is_known", "tl", "toolchain", "triton",
]  # fmt: skip
