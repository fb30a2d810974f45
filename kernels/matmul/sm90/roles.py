"""Warp roles: which warps of a program load, and which compute.

Every kernel is warp-specialised. The load warp keeps TMA busy, and consumers, warp groups of four warps with 64 rows
each, compute. While one consumer works on single elements, another one has the matrix units.
"""

from ...hopper import gl, gluon


@gluon.jit
def _consumer(number: gl.constexpr, consume: gl.constexpr, consumed):
    consume(number, *consumed)


@gluon.jit
def _warp(function: gl.constexpr, arguments):
    function(*arguments)


@gluon.jit
def specialize(
    CONSUMERS: gl.constexpr, consume: gl.constexpr, consumed, load: gl.constexpr, loaded,
    load_more: gl.constexpr = None, loaded_more=None,
):  # fmt: skip
    """Runs ``consume`` in every consumer, whose first argument is the consumer's number, and ``load`` in one warp.

    With two consumers a second warp may run ``load_more``. ``consumed``, ``loaded`` and ``loaded_more`` are tuples of
    the (other) arguments. Loads need few registers: the consumers get the rest.
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
