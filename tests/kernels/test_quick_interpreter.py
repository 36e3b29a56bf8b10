"""The change to Triton's interpreter for tests: made where its private functions are the known ones."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import quick_interpreter
import triton
from triton.runtime import interpreter

KNOWN = ("3.7.",)
"""Releases whose interpreter was looked at."""


def theirs(package: object, builder: object, scope: object) -> None:
    """Stands for the function as Triton has it."""


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter as it is before anything was replaced, and afterwards as it was found."""
    monkeypatch.setattr(interpreter, "_patch_builtin", theirs, raising=False)


def test_known_releases_are_quick() -> None:
    if not triton.__version__.startswith(KNOWN):
        assert quick_interpreter.install() == (quick_interpreter.why_not() is None)
        return
    assert quick_interpreter.why_not() is None
    assert quick_interpreter.install()
    assert interpreter._patch_builtin is quick_interpreter.patch_builtin


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda patch: patch.delattr(interpreter, "_patch_attr"), "has no _patch_attr"),
        (
            lambda patch: patch.setattr(interpreter, "_patch_attr", lambda: None),
            "_patch_attr .* other parameters",
        ),
        (lambda patch: patch.delattr("triton.language.core.is_builtin"), "has no is_builtin"),
    ],
)
def test_other_releases_stay_as_they_are(
    changed: Callable[[pytest.MonkeyPatch], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch)
    assert re.search(reason, quick_interpreter.why_not() or "")
    assert not quick_interpreter.install()
    assert interpreter._patch_builtin is theirs
