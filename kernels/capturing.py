"""Loading kernels during CUDA graph capture.

A capture forbids driver calls that could interfere with it, in the capturing thread and, in torch's default mode, in
all others. Loading a module is one of them, so a kernel's first launch would end the capture with an error. Besides
compiling on the host, that launch loads the module, queries the function's attributes and sets its shared memory
size; none of that touches a stream, so it is safe during a capture.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

# The devices for which this thread has a cuBLAS handle.
_handles = threading.local()

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: the calling thread may do anything that does not break a capture


@contextlib.contextmanager
def loading_allowed() -> Iterator[None]:
    """Let this thread load kernels while it, or another thread, captures a CUDA graph.

    Launches are recorded as usual. The thread's capture mode is restored on exit.
    """
    exchange = _exchange_mode()
    mode = ctypes.c_int(_RELAXED)
    # The call swaps the thread's mode with the one passed in.
    exchanged = exchange is not None and exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if exchanged:
            exchange(ctypes.byref(mode))


@functools.cache
def _exchange_mode() -> Any:
    """The driver's function that swaps the calling thread's capture mode; None if it is not available."""
    if torch.version.hip:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def make_products_ready(device: torch.device) -> None:
    """Create this thread's cuBLAS handle for this GPU, which is forbidden during a capture.

    Warm-up calls whose products run in our kernels only create none, but the captured call may take a path with cuBLAS.
    """
    known: tuple[int | None, ...] = getattr(_handles, "devices", ())
    # Without initialised CUDA these are fake tensors.
    if device.index in known or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return
    _handles.devices = (*known, device.index)
    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()
