"""Who counts as a disturbance, and who takes part in the measurement."""

from __future__ import annotations

import multiprocessing
import os

from delivery.bench.disturbance import foreign_bytes, measuring_processes

GIB = 1 << 30


def _report(pipe) -> None:
    pipe.send(measuring_processes())
    pipe.recv()


def test_both_sides_of_a_pair_and_their_parent_take_part() -> None:
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        workers.append(context.Process(target=_report, args=(theirs,), daemon=True))
        pipes.append(ours)
        workers[-1].start()
    found = [pipe.recv() for pipe in pipes]
    ids = {os.getpid(), *(worker.pid for worker in workers)}
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(None)
        worker.join()
    assert ids <= found[1]
    assert {os.getpid(), workers[0].pid} <= found[0]


def test_who_started_the_measurement_does_not_take_part() -> None:
    assert os.getpid() in measuring_processes()
    assert os.getppid() not in measuring_processes()


def test_only_memory_of_others_is_foreign() -> None:
    held = {10: 20 * GIB, 11: 18 * GIB, 99: 3 * GIB}
    assert foreign_bytes(42 * GIB, held, {10, 11}) == 4 * GIB
    assert foreign_bytes(42 * GIB, held, {10, 11, 99}) == GIB
    assert foreign_bytes(42 * GIB, {}, {10, 11}) == 42 * GIB
