"""Launching a kernel with as little work on the host as its arguments allow.

Triton's own launch inspects every argument of every call to find the compiled variant; for the dozens of strides here
that takes the host longer than many a kernel runs. This cache remembers the variant by all that Triton specialises on:
dtypes, 16-byte alignment of pointers, and the values of integers (a finer key than Triton's, never a coarser one).
"""

from typing import Any

import torch

from .device import triton
from .hopper import Descriptor
from .relaunching import Variant

_compiled: dict[tuple[object, ...], Variant] = {}
_COMPILED_LIMIT = 4096  # strides that change with every call must not fill the memory; Triton still has the variants


def ceil_div(count: int, size: int) -> int:
    """How many blocks of ``size`` hold ``count`` elements; Triton's own, made for kernels, takes the host a while."""
    return -(-count // size)


def launch(
    kernel: Any,
    programs: int,
    pointers: tuple[torch.Tensor | None, ...],
    numbers: tuple[int, ...],
    free_numbers: tuple[int | float, ...],
    constants: tuple[object, ...],
    num_warps: int = 4,
    num_stages: int = 1,
    descriptors: tuple[Descriptor | None, ...] = (),
    dependent: bool = False,
) -> None:
    """Runs ``programs`` programs of ``kernel`` on the device of the first descriptor or pointer.

    A ``dependent`` kernel may start while the one before it still runs, and waits for it by itself. The groups of
    arguments follow one another as in the kernel's signature, ``descriptors`` before the others.
    ``free_numbers`` are those that the kernel is declared not to be specialised on: they may change with every call.
    """
    first = descriptors[0].base if descriptors and descriptors[0] else pointers[0]
    assert first is not None
    device = first.device
    on_gpu = first.is_cuda
    if on_gpu and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(
                kernel, programs, pointers, numbers, free_numbers, constants, num_warps, num_stages, descriptors,
                dependent,
            )  # fmt: skip
    rest = (*numbers, *free_numbers, *constants)
    key = None
    # On AMD GPUs Triton also specialises on the size of a tensor's storage.
    if on_gpu and not torch.version.hip:
        addresses = [None if p is None else p.data_ptr() for p in pointers]
        placed = zip(pointers, addresses, strict=True)
        layout = tuple([None if a is None else (p.dtype, a & 15 == 0) for p, a in placed])  # type: ignore[union-attr]
        blocks = tuple([None if d is None else (d.base.dtype, *d.block_shape) for d in descriptors])
        width = tuple([n >> 31 for n in free_numbers if type(n) is int])
        # Kernels live as long as their modules; hashing one would hash its source.
        key = (id(kernel), device.index, blocks, layout, numbers, width, constants, num_warps, num_stages, dependent)
        known = _compiled.get(key)
        if known is not None:
            known.launch(programs, device.index, descriptors, pointers, addresses, rest)
            return None
    # Fusing a product and a sum rounds once instead of twice; named, because the default is about to change.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if dependent:
        options["launch_pdl"] = True
    complete = [None if descriptor is None else descriptor.complete() for descriptor in descriptors]
    compiled = kernel[(programs,)](*complete, *pointers, *rest, **options)
    if key is not None and isinstance(compiled, triton.compiler.CompiledKernel):
        if len(_compiled) >= _COMPILED_LIMIT:
            _compiled.clear()
        _compiled[key] = Variant(compiled, complete)
    return None
