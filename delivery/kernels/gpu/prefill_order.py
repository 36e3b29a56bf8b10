"""The order of tiles in prefill_hopper.py: the longest first, each to the program that is free next.

Lengths are known on the device alone, and tiles differ in length by more than an order of magnitude. The
producer of a program takes the next number from a counter in memory and tells the other roles of its
program which tile that is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

FIELDS = gl.constexpr(8)
"""Numbers of an announcement; five are used."""
SLOTS = gl.constexpr(2)
"""Announcements that stand at once: the tile that is worked on, and the next."""


@gluon.jit
def tile_at(
    tile,
    where,
    KV_HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    SEQUENCES: gl.constexpr,
    CHOOSE: gl.constexpr,
):
    """(sequence, kv head, its first row of q, its queries, its length, first query) of a tile number.

    Numbers lie as in prefill_attention.py. A first query past `queries` says that there is no tile.
    """
    query_start, context_lens, first_row, sequences, tiles, _programs, _counter = where
    LANES: gl.constexpr = gl.BlockedLayout([max(1, SEQUENCES // 32)], [32], [gl.num_warps()], [0])
    head = tile % KV_HEADS
    number = tiles // KV_HEADS - 1 - tile // KV_HEADS
    lane = gl.arange(0, SEQUENCES, LANES)
    owned = lane < sequences
    starts = gl.load(query_start + lane, mask=owned, other=0) - first_row
    before = gl.sum((owned & (starts // QUERIES + lane <= number)).to(gl.int32), 0) - 1
    b = gl.maximum(before, 0)
    start = gl.load(query_start + b)
    queries = gl.load(query_start + b + 1) - start
    local = (number - ((start - first_row) // QUERIES + before)) * QUERIES
    if CHOOSE:
        queries = gl.where(queries == 1, 0, queries)
    return b, head, start, queries, gl.load(context_lens + b), local


@gluon.jit
def steps_of(length, queries, local, QUERIES: gl.constexpr, STEP: gl.constexpr):
    """Steps that a tile takes: at least one, so that a sequence without context gives zeros."""
    end = gl.minimum(length - queries + local + QUERIES, length)
    return gl.maximum((end + STEP - 1) // STEP, 1)


@gluon.jit
def next_number(where):
    """The number of a further tile. Who takes the last of a launch leaves the counter at zero."""
    _query_start, _context_lens, _first_row, _sequences, tiles, programs, counter = where
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if taken == tiles - 1:
        gl.store(counter, 0)
    return programs + taken


@gluon.jit
def announce(notes, number, row, left, lowest, head, steps):
    """Tells the other roles this program's `number`-th tile (see `announced`). No steps: there is none."""
    slots, told, heard = notes
    slot = number % SLOTS
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [gl.num_warps()], [0])
    field = gl.arange(0, FIELDS, L)
    note = gl.where(field == 0, row, gl.where(field == 1, left, gl.where(field == 2, lowest, 0)))
    note = gl.where(field == 3, head, gl.where(field == 4, steps, note))
    mbarrier.wait(heard.index(slot), number // SLOTS % 2 ^ 1)
    slots.index(slot).store(note)
    mbarrier.arrive(told.index(slot), count=1)


@gluon.jit
def announced(notes, number):
    """(first row of q, queries from there, position of the first, kv head, steps) of the `number`-th tile."""
    slots, told, heard = notes
    slot = number % SLOTS
    L: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [gl.num_warps()], [0])
    field = gl.arange(0, FIELDS, L)
    mbarrier.wait(told.index(slot), number // SLOTS % 2)
    note = slots.index(slot).load(L)
    row = gl.sum(gl.where(field == 0, note, 0), 0)
    left = gl.sum(gl.where(field == 1, note, 0), 0)
    lowest = gl.sum(gl.where(field == 2, note, 0), 0)
    head = gl.sum(gl.where(field == 3, note, 0), 0)
    steps = gl.sum(gl.where(field == 4, note, 0), 0)
    mbarrier.arrive(heard.index(slot), count=1)
    return row, left, lowest, head, steps
