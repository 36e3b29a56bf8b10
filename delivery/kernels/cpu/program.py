"""CPU programs: a step's operations as one list that a few threads run without returning to Python.

An operation is 32 int64 slots: the addresses of its compiled functions, its number of pieces, and its
arguments. Threads claim pieces by an atomic counter; an operation begins when all pieces of the one
before are done. A descheduled thread delays only the piece that it has claimed.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numba import njit, types

from delivery.kernels.cpu.ir import atomic_add, atomic_load, call_kernel, read_i64, relax

SLOTS = 32
RUN, PREPARE, PIECES = range(3)
"""Slots of every operation: what computes a piece, what each thread does before its first one (0 for
nothing), and how many pieces there are."""
_CLOSED = 1 << 40
_SPINS = 2000

# The crew's shared state, in int64 slots: who is inside, and the program.
_INSIDE, _PROGRAM, _COUNT, _COUNTERS = range(4)

_yield = types.ExternalFunction("sched_yield", types.int32())


@njit(nogil=True, cache=True, no_cpython_wrapper=True)
def _work(state: int, thread: int) -> None:
    program = read_i64(state + 8 * _PROGRAM)
    counters = read_i64(state + 8 * _COUNTERS)
    for index in range(read_i64(state + 8 * _COUNT)):
        op = program + index * 8 * SLOTS
        claimed, done = counters + 16 * index, counters + 16 * index + 8
        run, total = read_i64(op + 8 * RUN), read_i64(op + 8 * PIECES)
        if atomic_load(claimed) < total:
            if read_i64(op + 8 * PREPARE) != 0:
                call_kernel(read_i64(op + 8 * PREPARE), op, thread, 0)
            piece = atomic_add(claimed, 1)
            while piece < total:
                call_kernel(run, op, thread, piece)
                atomic_add(done, 1)
                piece = atomic_add(claimed, 1)
        spins = 0
        while atomic_load(done) < total:
            spins += 1
            relax()
            if spins > _SPINS:
                _yield()


@njit(nogil=True, cache=True)
def _enter(state: int, thread: int) -> None:
    """Run the program. Thread 0 opens it, closes it behind itself and waits until every helper has left;
    a helper works only if it comes while the program is open."""
    if thread != 0:
        if atomic_add(state, 1) < _CLOSED:
            _work(state, thread)
        atomic_add(state, -1)
        return
    atomic_add(state, -_CLOSED)
    _work(state, 0)
    atomic_add(state, _CLOSED)
    spins = 0
    while atomic_load(state) > _CLOSED:
        spins += 1
        relax()
        if spins > _SPINS:
            _yield()


class Crew:
    """The threads that run programs: the caller and `threads` − 1 helpers that sleep in between."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._state = np.zeros(4, np.int64)
        self._state[_INSIDE] = _CLOSED
        self._address = int(self._state.ctypes.data)
        self._wake = [threading.Semaphore(0) for _ in range(threads - 1)]
        self._ended = False
        self._alone = threading.Lock()
        self._helpers = [
            threading.Thread(target=self._help, args=(i + 1, wake), daemon=True, name=f"deliver-cpu-{i + 1}")
            for i, wake in enumerate(self._wake)
        ]
        for helper in self._helpers:
            helper.start()

    def _help(self, thread: int, wake: threading.Semaphore) -> None:
        while True:
            wake.acquire()
            if self._ended:
                return
            _enter(self._address, thread)

    def run(self, program: Program) -> None:
        """Run a program to its end; callers in other threads, as of a second engine, wait for theirs."""
        with self._alone:
            program.counters.fill(0)
            self._state[_PROGRAM] = program.address
            self._state[_COUNT] = program.count
            self._state[_COUNTERS] = program.counters.ctypes.data
            if program.parallel:
                for wake in self._wake:
                    wake.release()
            _enter(self._address, 0)

    def close(self) -> None:
        """End the helpers."""
        self._ended = True
        for wake in self._wake:
            wake.release()
        for helper in self._helpers:
            helper.join()


class Program:
    """A list of operations over buffers that `keep` holds alive.

    parallel: whether helpers are woken; a single small operation is done before they would be.
    """

    def __init__(self, operations: list[list[int]], keep: list[Any], *, parallel: bool = True) -> None:
        self._slots = np.zeros((len(operations), SLOTS), np.int64)
        for row, slots in zip(self._slots, operations, strict=True):
            row[: len(slots)] = slots
        self._keep = keep
        self.parallel = parallel
        self.count = len(operations)
        self.address = int(self._slots.ctypes.data)
        self.counters = np.zeros(2 * len(operations), np.int64)

    def set(self, operations: Any, slots: Any, values: Any) -> None:
        """Write slots of some operations: int arrays, or one for all. Not while the program runs."""
        self._slots[operations, slots] = values


def bits_of(value: float) -> int:
    """A float32 as the int64 whose first four bytes it is."""
    return int(np.float32(value).view(np.int32)) & 0xFFFFFFFF
