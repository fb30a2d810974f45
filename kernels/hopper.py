"""Hopper's asynchronous instructions through Gluon, if this Triton has them, and matrices as TMA copies them.

Without Triton, or if its Gluon uses other names, inert stand-ins let every file import; nothing else may be done with
them. For a Triton release that is not known, a self-test tells whether the kernels are right.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .device import Inert, tl
from .tuning.dtypes import FORMATS, GENERIC, SM90

# Gluon is experimental and changes its names.
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Triton 3.9 renamed these.
    copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
    _memory = gl.shared_memory_descriptor
    reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
    # Public since Triton 3.9.
    _aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else tl.core._aggregate
    # Kernel files use both at import time.
    HAS_GLUON = bool(gluon.jit and gl.constexpr)
except (ImportError, AttributeError):
    HAS_GLUON = False
    gluon = gl = fence_async_shared = mbarrier = tma = copy_in = copy_out = reinterpret = Inert()
    warpgroup_mma = warpgroup_mma_wait = TensorDescriptor = Inert()

ALIGNMENT = 16  # bytes: TMA requires it of a matrix's address and row stride
_MOST_ROWS = 2**31 - 2**16  # coordinates have 32 bits, including those of a tile that extends past the end


class Resource:
    """The base of what :func:`resources` decorates, which tells type checkers that any field may be given."""

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...


def resources(fields: str) -> Callable[[type], Any]:
    """Decorate a :class:`Resource` with named ``fields``, which are passed through device code as one argument.

    A field may be a tensor, a descriptor, shared memory, another such object, a compile-time value (which a namedtuple
    would turn into a tensor) or None; code that depends on a field that is None is compiled out. Fields are given by
    keyword, because Triton's key of a compiled kernel covers the calls but not the order of the fields.
    """
    names = fields.split()

    def fill(self: Any, **values: Any) -> None:
        for name in names:
            value = values.pop(name)
            setattr(self, name, value if isinstance(value, tl.core.base_value) else tl.constexpr(value))
        assert not values, f"{type(self).__name__} has no {', '.join(values)}"

    def decorate(cls: Any) -> Any:
        if not HAS_GLUON:
            return cls
        # Triton 3.9 refuses a base that it does not know, and checks each value against the annotation of its field:
        # ``object`` admits any.
        own = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        annotations = dict.fromkeys(names, object)
        return _aggregate(type(cls.__name__, (), {**own, "__init__": fill, "__annotations__": annotations}))

    fill.__triton_builtin__ = True  # type: ignore[attr-defined]
    return decorate


def backend_of(architecture: str) -> str:
    """The back end for GPUs of ``architecture``: ``SM90`` if Gluon has these instructions, else ``GENERIC``."""
    return SM90 if HAS_GLUON and architecture == "sm_90" else GENERIC


class Scaled(NamedTuple):
    """8-bit values ``[rows, columns]`` and the float32 scale to multiply them by: ``[]``, or ``[rows]``."""

    values: torch.Tensor
    scale: torch.Tensor


class Matrix(NamedTuple):
    """A tensor ``[Z, rows, columns]`` (or without Z) as TMA sees it: a 2D matrix of all entries' rows.

    ``transposed`` means that the tensor's columns are contiguous, so that rows and columns exchange their roles.
    ``step`` is the number of rows from one batch entry to the next, 0 if all of them share one matrix. If entries are
    ``apart``, the descriptor has a third axis for them, in which the step is 1. ``scale_stride`` is the distance
    between the scales of two rows, 0 if there are none or one for all.
    """

    tensor: torch.Tensor
    rows: int
    columns: int
    row_stride: int
    step: int
    transposed: bool
    apart: bool = False
    scale_stride: int = 0

    def padded(self, width: int) -> "Matrix":
        """The same, but with blocks of ``width`` columns of the tensor that read 0 past its last column.

        Past the last column of a transposed entry TMA would read the next entry, unless entries are apart.
        """
        ends = not (self.transposed and self.step) or self.tensor.shape[-1] % width == 0
        return self if ends else self._replace(step=1, apart=True)

    def geometry(self, block_rows: int, block_columns: int) -> "Geometry":
        """The geometry for copies of ``block_rows × block_columns`` blocks, counted along the tensor's own axes."""
        block = [block_columns, block_rows] if self.transposed else [block_rows, block_columns]
        if self.apart:
            entries, columns = self.tensor.shape[0], self.tensor.shape[-1]
            return Geometry([entries, columns, self.columns], [self.tensor.stride(0), self.row_stride, 1], [1, *block])
        return Geometry([self.rows, self.columns], [self.row_stride, 1], block)


def matrix(tensor: torch.Tensor) -> Matrix | None:
    """``tensor`` as a matrix without gaps between batch entries, or None if TMA cannot take its strides or address."""
    found = stacked(tensor)
    if found is None or found.step == 0 or found.rows == found.step * tensor.shape[0]:
        return found
    return None


def stacked(tensor: torch.Tensor) -> Matrix | None:
    """`matrix`, but other rows may lie between two batch entries, as in one half of a merged weight."""
    batched = tensor.dim() == 3
    rows, columns = tensor.shape[-2:]
    row_stride, column_stride = tensor.stride()[-2:]
    transposed = column_stride != 1 and row_stride == 1
    if transposed:
        rows, columns, row_stride, column_stride = columns, rows, column_stride, row_stride
    if rows == 1:
        row_stride = columns  # a single row may have any stride; TMA requires at least the length of the row
    bytes_apart = row_stride * tensor.element_size()
    if column_stride != 1 or row_stride < columns or bytes_apart % ALIGNMENT or tensor.data_ptr() % ALIGNMENT:
        return None
    batch, batch_stride = (tensor.shape[0], tensor.stride(0)) if batched else (1, 0)
    step = 0 if batch == 1 else batch_stride // row_stride
    total = rows + (batch - 1) * step if step else batch * rows
    if total > _MOST_ROWS:
        return None
    if batch == 1 or batch_stride == 0:
        return Matrix(tensor, rows, columns, row_stride, 0, transposed)
    if batch_stride % row_stride or step < rows:
        return None
    return Matrix(tensor, total, columns, row_stride, step, transposed)


def untransposed(operand: torch.Tensor | Scaled) -> Matrix | None:
    """`matrix`, but None if it is transposed; a ``Scaled`` also gives the stride of its scales."""
    values, scale = operand if isinstance(operand, Scaled) else (operand, None)
    found = matrix(values)
    if found is None or found.transposed:
        return None
    return found if scale is None or scale.dim() == 0 else found._replace(scale_stride=scale.stride(0))


class Geometry(NamedTuple):
    """A TMA descriptor without the address, which may differ from launch to launch."""

    shape: list[int]
    strides: list[int]
    block_shape: list[int]


def dense(rows: int, columns: int, block_rows: int, block_columns: int, row_stride: int = 0) -> Geometry:
    """The geometry of a result that is not allocated yet; rows are contiguous unless ``row_stride`` is given."""
    return Geometry([rows, columns], [row_stride or columns, 1], [block_rows, block_columns])


class Descriptor(NamedTuple):
    """A TMA descriptor: a :class:`Geometry` with its tensor."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]

    def complete(self) -> Any:
        """Gluon's own descriptor, with the shared memory layout of the block, which compilation needs."""
        dtype = getattr(gl, FORMATS[str(self.base.dtype).removeprefix("torch.")].gluon)
        layout = gl.NVMMASharedLayout.get_default_for(self.block_shape, dtype)
        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape, layout)

    def like(self, other: Any) -> Any:
        """Gluon's own descriptor of this matrix, with block, layout and dtype of one that Gluon has checked."""
        made = object.__new__(type(other))
        made.__dict__ = {**other.__dict__, "base": self.base, "shape": self.shape, "strides": self.strides}
        return made


__all__ = [
    "ALIGNMENT",
    "Descriptor",
    "Geometry",
    "Matrix",
    "Resource",
    "Scaled",
    "copy_in",
    "copy_out",
    "dense",
    "fence_async_shared",
    "gl",
    "gluon",
    "matrix",
    "mbarrier",
    "reinterpret",
    "resources",
    "stacked",
    "tma",
    "untransposed",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
