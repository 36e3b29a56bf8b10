"""Progress on stderr: bars on a terminal, occasional plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from delivery.report.words import amount

if TYPE_CHECKING:
    from delivery.steps.step import Task

_PLAIN_EVERY_S = 5.0


class Display(Protocol):
    """Shows the progress of a run."""

    def line(self, text: str) -> None: ...
    def task(self, title: str, total: float, unit: str) -> Task: ...
    def close(self) -> None: ...


def display(stream: TextIO | None = None) -> Display:
    """Bars if `stream` (default stderr) is a terminal, plain lines otherwise."""
    stream = stream or sys.stderr
    return Bars(stream) if stream.isatty() else Lines(stream)


def counted(done: float, total: float, unit: str) -> str:
    """Progress of a task: '3/30 layers', '1.5 MiB of 256 MiB'; without a total (0) only the amount done."""
    if unit == "bytes":
        return f"{amount(done, unit)} of {amount(total, unit)}" if total else amount(done, unit)
    return f"{done:g}/{total:g} {unit}" if total else f"{done:g} {unit}"


class Lines:
    """For logs: a line every few seconds and when a task ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def task(self, title: str, total: float, unit: str) -> Task:
        return _LineTask(self, title, total, unit)

    def close(self) -> None:
        pass


class _LineTask:
    def __init__(self, lines: Lines, title: str, total: float, unit: str) -> None:
        self._lines, self._title, self._total, self._unit = lines, title, total, unit
        self._done = 0.0
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> _LineTask:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self._show(time.monotonic())

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._shown >= _PLAIN_EVERY_S:
            self._show(now)

    def note(self, text: str) -> None:
        self._lines.line(f"  {self._title}: {text}")

    def _show(self, now: float) -> None:
        self._shown = now
        done = counted(self._done, self._total, self._unit)
        self._lines.line(f"  {self._title}: {done}, {now - self._started:.0f} s")


class Bars:
    """For terminals: rich progress bars, lines above them."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            TextColumn("{task.fields[counted]}"),
            TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._tasks = 0

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def task(self, title: str, total: float, unit: str) -> Task:
        return _BarTask(self, title, total, unit)

    def close(self) -> None:
        self._progress.stop()

    def open_bar(self, title: str, total: float, unit: str) -> Any:
        if self._tasks == 0:
            self._progress.start()
        self._tasks += 1
        return self._progress.add_task(title, total=total or None, counted=counted(0, total, unit))

    def move_bar(self, bar: Any, done: float, text: str) -> None:
        self._progress.update(bar, completed=done, counted=text)

    def close_bar(self, bar: Any) -> None:
        self._progress.remove_task(bar)
        self._tasks -= 1
        if self._tasks == 0:
            self._progress.stop()


class _BarTask:
    def __init__(self, bars: Bars, title: str, total: float, unit: str) -> None:
        self._bars, self._title, self._total, self._unit = bars, title, total, unit
        self._done = 0.0
        self._bar = bars.open_bar(title, total, unit)

    def __enter__(self) -> _BarTask:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.close_bar(self._bar)

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        self._bars.move_bar(self._bar, self._done, counted(self._done, self._total, self._unit))

    def note(self, text: str) -> None:
        self._bars.line(f"  {self._title}: {text}")
