"""Launching a kernel with as little work on the host as its arguments allow.

Triton's own launch inspects every argument of every call to find the compiled variant; with dozens of strides that
takes the host longer than many kernels run. The cache here is keyed by all that Triton specialises on: dtypes, 16-byte
alignment of pointers, and the values of integers (a finer key than Triton's, never a coarser one).

A launch that is repeated with other tensors of the same layout is prepared once (:class:`Launch`), and then skips even
that key.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from .capturing import loading_allowed
from .device import triton
from .hopper import Descriptor, Geometry
from .relaunching import Variant
from .torch_internals import current_device

_Made = TypeVar("_Made")
# Numbers that belong together, such as the strides of one tensor, form a tuple: one parameter of the kernel.
Numbers: TypeAlias = tuple[Any, ...]
Tensors: TypeAlias = tuple[torch.Tensor | None, ...]

_compiled: dict[tuple[object, ...], Variant] = {}
# Triton specialises on whether an address is a multiple of 16 bytes.
ALIGNMENT_MASK = 15
_COMPILED_LIMIT = 4096  # strides that change with every call must not fill the memory; Triton still has the variants
_ENCODINGS_LIMIT = 256  # the same, for one descriptor of one prepared launch


def ceil_div(count: int, size: int) -> int:
    """How many blocks of ``size`` hold ``count`` elements; Triton's own cdiv is slow on the host."""
    return -(-count // size)


def vector_unit(tensor: torch.Tensor, *sizes: int) -> int:
    """``UNIT`` of ``tiles.assume_multiple``: elements in 16 bytes if that divides all sizes, else 1."""
    unit = 16 // tensor.element_size()
    return 1 if any(size % unit for size in sizes) else unit


def unit_to_tell(tensor: torch.Tensor, *sizes: int) -> int:
    """``vector_unit`` of specialised arguments; 1 if 16 divides all of them, as Triton derives that hint itself."""
    return vector_unit(tensor, *sizes) if any(size % 16 for size in sizes) else 1


def lines(tensor: torch.Tensor) -> tuple[bool, tuple[int, ...]]:
    """Whether a matrix, or a batch of them, is transposed; and the length of a line with the strides between lines.

    A line is a row, or a column of a transposed matrix; its elements are contiguous. If neither rows nor columns are
    contiguous, the stride within a row comes last.
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
    """The layout of a tensor that a prepared launch depends on: its strides, and its address modulo 16 bytes."""
    return tensor.stride(), tensor.data_ptr() & ALIGNMENT_MASK


def prepared(ready: dict[Any, Any] | None, name: object, make: Callable[..., _Made], *arguments: Any) -> _Made:
    """``make(*arguments)``, cached in ``ready`` under ``name``.

    ``ready`` belongs to one prepared call: see ``gemm_gemm.Operands``. None caches nothing.
    """
    if ready is None:
        return make(*arguments)
    try:
        found: _Made = ready[name]
        return found
    except KeyError:
        # ``make`` is called below, so that its errors are not chained to this one.
        pass
    made = ready[name] = make(*arguments)
    return made


class Launch:
    """A launch that is prepared, to be run any number of times: everything but the tensors is known.

    The groups of arguments are in the order of the kernel's signature, and the tensors come before them.

    All executions must agree in the dtypes and the device of their tensors, in which of them are None and in which are
    16-byte aligned: none of that is checked again. No tensor is kept alive.

    Args:
        kernel: the kernel.
        programs: how many programs to run.
        numbers: parameters that Triton specialises on.
        free_numbers: the kernel's ``do_not_specialize`` parameters.
        constants: its ``constexpr`` parameters.
        num_warps, num_stages: as Triton takes them.
        geometries: of the tensors that the kernel takes as TMA descriptors, which come first; None for one that is not
            given.
        dependent: the kernel may start while the previous one still runs (programmatic dependent launch), and waits for
            it itself.
    """

    __slots__ = ("_arguments", "_descriptors", "_device", "_kernel", "_options", "_programs", "_rest", "_variant")

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
        self._kernel, self._programs = kernel, programs
        self._arguments, self._options = (numbers, free_numbers, constants), (num_warps, num_stages, dependent)
        self._rest = (*numbers, *free_numbers, *constants)
        self._descriptors = [None if geometry is None else _Encodings(geometry) for geometry in geometries]
        self._device = -1
        # Known after the first execution.
        self._variant: Variant | None = None

    def __call__(self, tensors: Tensors) -> None:
        """Run it on the device of the tensors, which are in the order of the kernel's signature."""
        variant, descriptors = self._variant or self._run_first(tensors), self._descriptors
        if variant is None:
            return
        if current_device() != self._device:
            with torch.cuda.device(self._device):
                self(tensors)
            return
        hooks = triton.knobs.runtime
        before, after = hooks.launch_enter_hook, hooks.launch_exit_hook
        # A chain of hooks without any hook counts as none.
        if not variant.direct or getattr(before, "calls", before) or getattr(after, "calls", after):
            described, pointers = self._described(tensors)
            variant.launch(self._programs, described, (*pointers, *self._rest))
            return
        arguments: list[Any] = []
        for index, encodings in enumerate(descriptors):
            base = tensors[index]
            if base is None or encodings is None:
                arguments.append(None)
            else:
                arguments += encodings.get(base.data_ptr()) or encodings.add(variant, index, base)
        for pointer in tensors[len(descriptors) :] if descriptors else tensors:
            arguments.append(None if pointer is None else pointer.data_ptr())
        variant.run(self._programs, self._device, (*arguments, *self._rest))

    def _run_first(self, tensors: Tensors) -> Variant | None:
        """The variant that another launch has compiled; if there is none, run it through Triton, and return None."""
        first = next(tensor for tensor in tensors if tensor is not None)
        on_gpu, device = first.is_cuda, first.device.index
        if on_gpu and device != current_device():
            with torch.cuda.device(device):
                return self._run_first(tensors)
        described, pointers = self._described(tensors)
        # On AMD GPUs Triton also specialises on the size of a tensor's storage.
        key = self._key(device, described, pointers) if on_gpu and not torch.version.hip else None
        variant = None if key is None else _compiled.get(key)
        if variant is not None:
            self._device, self._variant = device, variant
            return variant
        num_warps, num_stages, dependent = self._options
        # An FMA rounds once instead of twice. Passed explicitly, because Triton's default is about to change.
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        if dependent:
            options["launch_pdl"] = True
        complete = [None if descriptor is None else descriptor.complete() for descriptor in described]
        if key is None:
            self._kernel[(self._programs,)](*complete, *pointers, *self._rest, **options)
            return None
        with loading_allowed():
            compiled = self._kernel[(self._programs,)](*complete, *pointers, *self._rest, **options)
            if not isinstance(compiled, triton.compiler.CompiledKernel):
                return None
            if len(_compiled) >= _COMPILED_LIMIT:
                _compiled.clear()
            self._device = device
            # Last, because other threads test it.
            self._variant = _compiled[key] = Variant(compiled, complete)
        return None

    def _described(self, tensors: Tensors) -> tuple[list[Descriptor | None], Tensors]:
        """The descriptors, and the other tensors."""
        described = [
            None if base is None or encodings is None else Descriptor(base, *encodings.geometry)
            for base, encodings in zip(tensors, self._descriptors, strict=False)
        ]
        return described, tensors[len(described) :]

    def _key(self, device: int, descriptors: list[Descriptor | None], pointers: Tensors) -> tuple[object, ...]:
        """All that Triton specialises on."""
        numbers, free_numbers, constants = self._arguments
        layout = tuple([None if p is None else (p.dtype, p.data_ptr() & ALIGNMENT_MASK == 0) for p in pointers])
        blocks = tuple([None if d is None else (d.base.dtype, *d.block_shape) for d in descriptors])
        # Triton specialises on integers in tuples even if ``do_not_specialize`` names the tuple.
        tuples = [n for each in free_numbers if isinstance(each, tuple) for n in each if type(n) is int]
        width = (
            *[n >> 31 for n in free_numbers if type(n) is int],
            *[(n >> 31, n == 1, n & ALIGNMENT_MASK == 0) for n in tuples],
        )
        # id() is unique, as kernels live as long as their modules; hashing a kernel would hash its source.
        return id(self._kernel), device, blocks, layout, numbers, width, constants, self._options


class _Encodings(dict[int, tuple[Any, ...]]):
    """Encodings of one descriptor of a prepared launch, by the address of its tensor."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry

    def add(self, variant: Variant, index: int, base: torch.Tensor) -> tuple[Any, ...]:
        """The encoding of the descriptor at this position, for a new address."""
        if len(self) >= _ENCODINGS_LIMIT:
            self.clear()
        found = self[base.data_ptr()] = variant.encoding(index, Descriptor(base, *self.geometry))
        return found


def launch(
    kernel: Any,
    programs: int,
    tensors: Tensors,
    numbers: Numbers,
    free_numbers: Numbers,
    constants: tuple[object, ...],
    num_warps: int = 4,
    num_stages: int = 1,
    geometries: tuple[Geometry | None, ...] = (),
) -> None:
    """Run a :class:`Launch` that is not prepared, because the next one may have other numbers."""
    Launch(kernel, programs, numbers, free_numbers, constants, num_warps, num_stages, geometries)(tensors)
