"""Warp specialisation: a load warp issues TMA copies, and consumers compute.

A consumer is a warp group, with 64 rows per wgmma. While one does elementwise work, another one has the tensor cores.
"""

from ...hopper import gl, gluon


@gluon.jit
def _consumer(number: gl.constexpr, consume: gl.constexpr, consumed):
    consume(number, *consumed)


@gluon.jit
def _warp(function: gl.constexpr, arguments):
    function(*arguments)


@gluon.jit
def warp_specialize(
    CONSUMERS: gl.constexpr, consume: gl.constexpr, consumed, load: gl.constexpr, loaded,
    load_more: gl.constexpr = None, loaded_more=None,
):  # fmt: skip
    """Run ``consume(number, *consumed)`` in every consumer, and ``load(*loaded)`` in one warp.

    With two consumers a second warp may run ``load_more(*loaded_more)``. Load warps need few registers: the consumers
    get the rest.
    """
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), consume, consumed)),
            (_warp, (load, loaded)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2 and load_more is None:
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), consume, consumed)),
            (_consumer, (gl.constexpr(1), consume, consumed)),
            (_warp, (load, loaded)),
        ], [4, 1], [240, 24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), consume, consumed)),
            (_consumer, (gl.constexpr(1), consume, consumed)),
            (_warp, (load, loaded)),
            (_warp, (load_more, loaded_more)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 4, "registers are shared out among one, two or four consumers")
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), consume, consumed)),
            (_consumer, (gl.constexpr(1), consume, consumed)),
            (_consumer, (gl.constexpr(2), consume, consumed)),
            (_consumer, (gl.constexpr(3), consume, consumed)),
            (_warp, (load, loaded)),
        ], [4, 4, 4, 1], [120, 120, 120, 24])  # fmt: skip
