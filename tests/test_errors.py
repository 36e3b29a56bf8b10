from __future__ import annotations

import errno
import pickle

import pytest

from delivery.errors import (
    BaselineError,
    DataError,
    EnvironmentLacking,
    GateFailed,
    Undecided,
    UsageError,
    did_you_mean,
    environment_error,
)


def test_an_error_shows_what_why_and_hint():
    error = GateFailed(
        "gate-failed",
        "compare rejected engine 3fa9c1",
        why="P95 TPOT is 9.1 ms, 21 % over baseline 'h200'",
        hint="deliver inspect 3fa9c1 --report compare",
    )
    assert error.render() == (
        "error[gate-failed]: compare rejected engine 3fa9c1\n"
        "  why:  P95 TPOT is 9.1 ms, 21 % over baseline 'h200'\n"
        "  hint: deliver inspect 3fa9c1 --report compare"
    )
    assert str(error) == error.render()


def test_what_is_not_given_is_not_shown():
    assert DataError("x", "what").render() == "error[x]: what"
    assert DataError("x", "what", hint="do").render() == "error[x]: what\n  hint: do"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (DataError, 1),
        (UsageError, 2),
        (GateFailed, 3),
        (Undecided, 4),
        (BaselineError, 5),
        (EnvironmentLacking, 6),
    ],
)
def test_exit_codes(kind, code):
    assert kind("c", "w").exit_code == code


def test_errors_cross_process_boundaries():
    error = UsageError("c", "what", why="why", hint="hint")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is UsageError
    assert again.render() == error.render()


def test_did_you_mean():
    assert did_you_mean("quantise", ["quantize", "build"]) == "did you mean 'quantize'?"
    assert did_you_mean("zzz", ["quantize", "build"]) == "known: build, quantize"


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


def wrapped(inner: Exception) -> Exception:
    try:
        try:
            raise inner
        except Exception as cause:
            raise RuntimeError("while saving") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "x", "/d/f"), "disk-full", "no space left to write /d/f"),
        (OSError(errno.EDQUOT, "x"), "disk-full", "no space left on the disk"),
        (OSError(errno.EFBIG, "x"), "disk-full", "File too large"),
        (ValueError("I/O error: No space left on device (os error 28)"), "disk-full", "no space left"),
        (wrapped(OSError(errno.ENOSPC, "x", "f")), "disk-full", "no space left to write f"),
        (MemoryError(), "out-of-memory", "an allocation was refused"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "out-of-memory", "2 GiB"),
        (PermissionError(errno.EACCES, "x", "/root/f"), "not-permitted", "may not access /root/f"),
        (OSError(errno.EROFS, "x", "/ro"), "not-permitted", "Read-only file system"),
    ],
)
def test_a_lacking_environment_is_recognised_in_what_libraries_raise(error, code, words):
    found = environment_error(error)
    assert found is not None
    assert found.code == code
    assert found.exit_code == 6
    assert words in found.render()


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.ENOENT, "x", "f"), KeyError("k")])
def test_other_errors_are_not_explained_away(error):
    assert environment_error(error) is None


def test_a_copy_that_found_no_space_names_where_it_wrote():
    error = environment_error(OSError(28, "No space left on device", "from/weights", None, "to/weights"))
    assert error is not None
    assert error.what == "no space left to write to/weights"
