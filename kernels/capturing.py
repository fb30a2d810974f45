"""Loading kernels while a CUDA graph is captured.

A capture forbids calls of the driver that could interfere with it, to the capturing thread and, in torch's default
mode, to all others: loading a module is among them, so that a kernel's first launch would end the capture with an
error. What Triton does then, besides compiling on the host, is to load the module, to ask for the function's
attributes and to set the size of its shared memory; none of that touches a stream, so it may run under a capture.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

# The devices that this thread has a handle of cuBLAS for.
_handles = threading.local()

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: the calling thread is forbidden nothing but what breaks a capture


@contextlib.contextmanager
def loading_allowed() -> Iterator[None]:
    """Inside, this thread may load kernels whatever is captured, by itself or by another thread.

    Launches are recorded as ever. The mode of this thread is put back at the end.
    """
    exchange = _exchange_mode()
    mode = ctypes.c_int(_RELAXED)
    # The driver swaps the thread's mode with the one that it is given.
    exchanged = exchange is not None and exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if exchanged:
            exchange(ctypes.byref(mode))


@functools.cache
def _exchange_mode() -> Any:
    """The driver's function that swaps the capture mode of the calling thread; None where there is none."""
    if torch.version.hip:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def make_products_ready(device: torch.device) -> None:
    """Makes the handle of cuBLAS that a thread makes in its first product on this GPU, which a capture forbids.

    Plain calls that multiply in kernels alone would leave that to a captured call, which may take another path.
    """
    known: tuple[int | None, ...] = getattr(_handles, "devices", ())
    # Where CUDA is not initialised, tensors are fake ones.
    if device.index in known or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return
    _handles.devices = (*known, device.index)
    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()
