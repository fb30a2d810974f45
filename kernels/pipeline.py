"""What the pipelined kernels share: stages of a ring, copies of weight tiles, products in flight, the hidden.

Each kernel is warp-specialised. One warp, the producer, keeps TMA busy: it fills the stages of a ring in
shared memory, waiting for a stage's ``empty`` barrier and giving its ``full`` barrier to the copy. Groups of four
warps, the consumers, wait for ``full``, compute with 64 rows each, and arrive at ``empty``. While one consumer works on
its activations, another one has the matrix units.
"""

from .hopper import copy_in, fence_async_shared, gl, gluon, mbarrier, warpgroup_mma


@gluon.jit
def stage_of(position, STAGES: gl.constexpr):
    """(stage, phase of its full barrier) of the ``position``-th filling of a ring. The empty one is a phase behind."""
    return position % STAGES, (position // STAGES) & 1


@gluon.jit
def release_after_load(empty):
    """Gives a place back that was loaded into registers.

    The next copy comes through another proxy to memory: without the fence it was seen to overtake loads under way.
    """
    fence_async_shared()
    mbarrier.arrive(empty)


@gluon.jit
def copy_hidden_tile(desc, batch_start, n, full, tile, TRANSPOSED: gl.constexpr):
    """Starts the copy of the hidden units from ``n`` on, the rows of a matrix or, transposed, its columns.

    The batch entry starts at ``batch_start``, a row, or a place on an axis of its own: see ``hopper.Matrix``.
    """
    APART: gl.constexpr = len(desc.block_type.shape) == 3
    if APART:
        copy_in(desc, [batch_start, 0, n], full, tile)
    elif TRANSPOSED:
        copy_in(desc, [batch_start, n], full, tile)
    else:
        copy_in(desc, [batch_start + n, 0], full, tile)


@gluon.jit
def matrix_of(tile):
    """A copied tile without the axis of batch entries, where it has one."""
    APART: gl.constexpr = len(tile.shape) == 3
    if APART:
        return tile.reshape([tile.shape[1], tile.shape[2]])
    else:
        return tile


@gluon.jit
def hidden_first(tile, TRANSPOSED: gl.constexpr):
    """A copied weight tile as ``[hidden units, width]``."""
    if TRANSPOSED:
        return tile.permute((1, 0))
    else:
        return tile


@gluon.jit
def start_product(left, right, bias_ptr, cols, N, EVEN_N: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Starts ``left @ right + bias``; the sum begins with the bias, so that adding it costs nothing."""
    COLUMNS: gl.constexpr = right.shape[1]
    start = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    if bias_ptr is not None:
        if EVEN_N:
            bias = gl.load(bias_ptr + cols)
        else:
            # N is a multiple of 8, as copies need it: said here, two columns are loaded at once.
            bias = gl.load(bias_ptr + cols, mask=cols < N // 8 * 8, other=0.0)
        start += gl.expand_dims(bias.to(gl.float32), 0)
    return warpgroup_mma(left, right, start, use_acc=bias_ptr is not None, is_async=True)


@gluon.jit
def init_barriers(full, empty, COUNT: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of ``COUNT`` stages, each of which ``CONSUMERS`` consumers must empty."""
    for index in gl.static_range(COUNT):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(empty.index(index), count=CONSUMERS)


@gluon.jit
def _consumer(number: gl.constexpr, consume: gl.constexpr, consumed):
    consume(number, *consumed)


@gluon.jit
def _warp(function: gl.constexpr, arguments):
    function(*arguments)


@gluon.jit
def specialize(
    CONSUMERS: gl.constexpr, consume: gl.constexpr, consumed, produce: gl.constexpr, produced,
    copy: gl.constexpr = None, copied=None,
):  # fmt: skip
    """Four warps for each consumer run ``consume``, whose first argument is the consumer's number, and one ``produce``.

    With two consumers another warp may run ``copy``. ``consumed``, ``produced`` and ``copied`` are the tuples of their
    (other) arguments. Copies need few registers: consumers get the others.
    """
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), consume, consumed)),
            (_warp, (produce, produced)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2 and copy is None:
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), consume, consumed)),
            (_consumer, (gl.constexpr(1), consume, consumed)),
            (_warp, (produce, produced)),
        ], [4, 1], [240, 24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), consume, consumed)),
            (_consumer, (gl.constexpr(1), consume, consumed)),
            (_warp, (produce, produced)),
            (_warp, (copy, copied)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 4, "registers are shared out among one, two or four consumers")
        gl.warp_specialize([
            (_consumer, (gl.constexpr(0), consume, consumed)),
            (_consumer, (gl.constexpr(1), consume, consumed)),
            (_consumer, (gl.constexpr(2), consume, consumed)),
            (_consumer, (gl.constexpr(3), consume, consumed)),
            (_warp, (produce, produced)),
        ], [4, 4, 4, 1], [120, 120, 120, 24])  # fmt: skip
