"""A workdir, a pipeline of fake steps, and a way to run it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_steps
import pytest

from delivery.pipeline.progress import Lines
from delivery.pipeline.result import RunResult
from delivery.pipeline.runner import run
from delivery.pipeline.spec import load_pipeline
from delivery.pipeline.store import Store

Go = Callable[..., RunResult]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "work")
    yield made
    made.memo.close()


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What steps did since the last call."""
    path = tmp_path / "trace.txt"
    monkeypatch.setenv("FAKE_TRACE", str(path))

    def read() -> list[str]:
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        return lines

    return read


@pytest.fixture
def pipeline_file(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(fake_steps.PIPELINE)
    return path


@pytest.fixture
def go(store: Store, pipeline_file: Path, monkeypatch: pytest.MonkeyPatch) -> Go:
    """Run the fake pipeline with overrides; `text` replaces the file; `said` collects the display."""
    monkeypatch.delenv("CI", raising=False)

    def start(
        *overrides: str, text: str | None = None, said: io.StringIO | None = None, **how: Any
    ) -> RunResult:
        if text is not None:
            pipeline_file.write_text(text)
        pipeline = load_pipeline(
            pipeline_file, overrides, steps=fake_steps.STEPS, model=how.pop("model", None)
        )
        display = Lines(said or io.StringIO())
        return run(pipeline, how.pop("store", store), display, render=fake_steps.render, **how)

    return start
