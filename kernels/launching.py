"""Launching a kernel with as little work on the host as its arguments allow.

Triton's own launch inspects every argument of every call to find the compiled variant; for the dozens of strides here
that takes the host longer than many a kernel runs. This cache remembers the variant by all that Triton specialises on:
dtypes, 16-byte alignment of pointers, and the values of integers (a finer key than Triton's, never a coarser one).

A launch that is repeated with other tensors of the same layout is prepared once (:class:`Launch`): even that key is
not made again then.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from .capturing import loading_allowed
from .device import triton
from .hopper import Descriptor, Geometry
from .relaunching import Repeated, Variant

_Made = TypeVar("_Made")
# What belongs together, as the strides of one tensor do, is a tuple and one parameter of the kernel.
Numbers: TypeAlias = tuple[int | float | tuple[int | float, ...], ...]

_compiled: dict[tuple[object, ...], Variant] = {}
# Triton compiles for addresses that are multiples of 16 bytes, or not.
ALIGNMENT_MASK = 15
_COMPILED_LIMIT = 4096  # strides that change with every call must not fill the memory; Triton still has the variants

# torch.cuda's own function makes sure first that CUDA is initialised, as it is where a tensor lies on a GPU.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def ceil_div(count: int, size: int) -> int:
    """How many blocks of ``size`` hold ``count`` elements; Triton's own, made for kernels, takes the host a while."""
    return -(-count // size)


def vector_unit(tensor: torch.Tensor, *sizes: int) -> int:
    """Elements of 16 bytes, where that divides all of these strides and limits, or 1: see ``tiles.in_units``."""
    unit = 16 // tensor.element_size()
    return 1 if any(size % unit for size in sizes) else unit


def unit_to_tell(tensor: torch.Tensor, *sizes: int) -> int:
    """``vector_unit`` of arguments that Triton specialises on: 1 where it knows of itself, as 16 divides them all."""
    return vector_unit(tensor, *sizes) if any(size % 16 for size in sizes) else 1


def lines(tensor: torch.Tensor) -> tuple[bool, tuple[int, ...]]:
    """Whether a matrix, or a batch of them, lies transposed; and the length of a line, and the strides between lines.

    A line is a row, or of a matrix that lies transposed a column: its elements follow one another. Where those of no
    row and no column do, the stride between them is told, too.
    """
    *batch, row, column = tensor.stride()
    if row == 1 and column != 1:
        return True, (tensor.shape[-2], *batch, column)
    return False, (tensor.shape[-1], *batch, row, *((column,) if column != 1 else ()))


def empty_rows(like: torch.Tensor, rows: int, columns: int, stride: int) -> torch.Tensor:
    """An empty ``[rows, columns]`` of the dtype and device of ``like``, whose rows are ``stride`` elements apart."""
    found = like.new_empty(rows, stride)
    return found if stride == columns else found[:, :columns]


def layout_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """How a tensor lies in memory, as far as kernels mind: its strides, and its address modulo their alignment."""
    return tensor.stride(), tensor.data_ptr() & ALIGNMENT_MASK


def prepared(ready: dict[Any, Any] | None, name: object, make: Callable[..., _Made], *arguments: Any) -> _Made:
    """What ``make(*arguments)`` gives: made the first time, and then what ``ready`` keeps under this name.

    ``ready`` belongs to one prepared call: see ``gemm_gemm.Operands``. None keeps nothing.
    """
    if ready is None:
        return make(*arguments)
    try:
        found: _Made = ready[name]
        return found
    except KeyError:
        # An error of ``make`` is raised below, where this one is no part of it.
        pass
    made = ready[name] = make(*arguments)
    return made


class Launch:
    """The same launch, to be run any number of times: everything but the tensors is known.

    The arguments are those of :func:`launch`, with ``geometries`` in the place of descriptors.

    All executions have tensors of the same dtypes on one device, alike in which of them are None and which lie at a
    multiple of 16 bytes: nothing of that is looked at again. No tensor is kept.
    """

    __slots__ = ("_dependent", "_device", "_geometries", "_kernel", "_programs", "_repeated", "_rest", "_variant")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: Numbers,
        free_numbers: Numbers,
        constants: tuple[object, ...],
        num_warps: int = 4,
        num_stages: int = 1,
        geometries: tuple[Geometry | None, ...] = (),
        dependent: bool = False,
    ) -> None:
        self._kernel, self._programs, self._geometries, self._dependent = kernel, programs, geometries, dependent
        self._rest = numbers, free_numbers, constants, num_warps, num_stages
        self._device = -1
        self._variant: Variant | None = None
        self._repeated: Repeated | None = None

    def __call__(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        """Runs it on tensors in the order of the kernel's signature: first those that the geometries describe."""
        described = len(self._geometries)
        bases, pointers = tensors[:described], tensors[described:]
        repeated = self._repeated
        if repeated is None:
            if self._variant is None:
                self._run_alone(pointers, bases)
                return
            repeated = self._repeated = self._repeat(len(pointers))
        if _current_device() == self._device:
            repeated(pointers, bases)
        else:
            with torch.cuda.device(self._device):
                repeated(pointers, bases)

    def _run_alone(self, pointers: tuple[torch.Tensor | None, ...], bases: tuple[torch.Tensor | None, ...]) -> None:
        """Runs it as any other launch; nothing is made ready for a second one that may never come."""
        described = zip(bases, self._geometries, strict=True)
        descriptors = tuple([None if b is None or g is None else Descriptor(b, *g) for b, g in described])
        self._variant = launch(self._kernel, self._programs, pointers, *self._rest, descriptors, self._dependent)
        if self._variant is not None:
            self._device = next(tensor for tensor in (*bases, *pointers) if tensor is not None).device.index

    def _repeat(self, pointers: int) -> Repeated:
        numbers, free_numbers, constants, _, _ = self._rest
        rest = (*numbers, *free_numbers, *constants)
        assert self._variant is not None
        return Repeated(self._variant, self._programs, self._device, self._geometries, pointers, rest)


def launch(
    kernel: Any,
    programs: int,
    pointers: tuple[torch.Tensor | None, ...],
    numbers: Numbers,
    free_numbers: Numbers,
    constants: tuple[object, ...],
    num_warps: int = 4,
    num_stages: int = 1,
    descriptors: tuple[Descriptor | None, ...] = (),
    dependent: bool = False,
) -> Variant | None:
    """Runs ``programs`` programs of ``kernel`` on the device of the first descriptor or pointer.

    A ``dependent`` kernel may start while the one before it still runs, and waits for it by itself. The groups of
    arguments follow one another as in the kernel's signature, ``descriptors`` before the others.
    ``free_numbers`` are those that the kernel is declared not to be specialised on: they may change with every call.

    Returns the compiled variant, or None where every launch goes through Triton's interface.
    """
    first = descriptors[0].base if descriptors and descriptors[0] else pointers[0]
    assert first is not None
    device = first.device
    on_gpu = first.is_cuda
    if on_gpu and device.index != _current_device():
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
        layout = tuple([None if a is None else (p.dtype, a & ALIGNMENT_MASK == 0) for p, a in placed])  # type: ignore[union-attr]
        blocks = tuple([None if d is None else (d.base.dtype, *d.block_shape) for d in descriptors])
        free = [n for each in free_numbers for n in (each if isinstance(each, tuple) else (each,))]
        width = tuple([n >> 31 for n in free if type(n) is int])
        # Kernels live as long as their modules; hashing one would hash its source.
        key = (id(kernel), device.index, blocks, layout, numbers, width, constants, num_warps, num_stages, dependent)
        known = _compiled.get(key)
        if known is not None:
            known.launch(programs, device.index, descriptors, pointers, addresses, rest)
            return known
    # Fusing a product and a sum rounds once instead of twice; named, because the default is about to change.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if dependent:
        options["launch_pdl"] = True
    complete = [None if descriptor is None else descriptor.complete() for descriptor in descriptors]
    if key is None:
        kernel[(programs,)](*complete, *pointers, *rest, **options)
        return None
    with loading_allowed():
        compiled = kernel[(programs,)](*complete, *pointers, *rest, **options)
        if not isinstance(compiled, triton.compiler.CompiledKernel):
            return None
        if len(_compiled) >= _COMPILED_LIMIT:
            _compiled.clear()
        variant = _compiled[key] = Variant(compiled, complete)
        return variant
