"""`deliver` called in this process, with the fake steps of the pipeline's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))

import fake_steps

from delivery.cli import main

Outcome = tuple[int, str, str]


@pytest.fixture
def deliver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Exit code, stdout and stderr of a command run in an empty folder that holds `p.yaml`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("DELIVER_WORKDIR", raising=False)
    (tmp_path / "p.yaml").write_text(fake_steps.PIPELINE)

    def call(*args: str) -> Outcome:
        code = main(args, steps=fake_steps.STEPS)
        out, err = capsys.readouterr()
        return code, out, err

    return call
