from __future__ import annotations

import io

import pytest

import delivery.pipeline.progress as progress
from delivery.pipeline.peak import PeakMeter
from delivery.pipeline.progress import Bars, Lines, display
from delivery.pipeline.result import amount, size


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_plain_lines_now_and_then(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    shown = display(stream)
    assert isinstance(shown, Lines)
    with shown.task("layers", 30, "layers") as task:
        for _ in range(30):
            clock[0] += 0.5
            task.advance()
        task.note("a note")
    assert stream.getvalue().splitlines() == [
        "  layers: 10/30 layers, 5 s",
        "  layers: 20/30 layers, 10 s",
        "  layers: 30/30 layers, 15 s",
        "  layers: a note",
        "  layers: 30/30 layers, 15 s",
    ]


def test_a_task_that_fails_is_not_told_as_done():
    stream = io.StringIO()
    with pytest.raises(KeyError, match="x"), Lines(stream).task("t", 0, "steps"):
        raise KeyError("x")
    assert stream.getvalue() == ""


def test_a_terminal_gets_bars():
    stream = Terminal()
    shown = display(stream)
    assert isinstance(shown, Bars)
    shown.line("[not markup] before")
    with shown.task("outer", 3, "steps") as outer, shown.task("inner", 0, "rows") as inner:
        outer.advance(2)
        inner.advance()
        inner.note("told")
    with shown.task("later", 2, "steps") as later:  # a display serves one task after another
        later.advance()
    shown.close()
    text = stream.getvalue()
    assert "[not markup] before" in text
    assert "outer" in text
    assert "inner: told" in text


def test_amounts_for_people():
    assert [size(n) for n in (None, 0, 999, 1000, 1_234_567, 5_000_000_000, 7e15)] == [
        "", "0 B", "999 B", "1,000 B", "1.177 MiB", "4.657 GiB", "6,366 TiB",
    ]  # fmt: skip
    assert amount(1234567, "bytes") == "1.177 MiB"
    assert amount(0.123456, "ms") == "0.1235 ms"


def test_the_peak_of_memory_is_that_of_the_work():
    def peak(size_bytes: int) -> int:
        meter = PeakMeter()
        block = bytearray(size_bytes)
        block[::4096] = b"x" * len(block[::4096])
        found = meter.peak_bytes()
        assert found is not None
        return found

    large = peak(200_000_000)
    small = peak(1_000_000)
    assert large - small > 150_000_000
