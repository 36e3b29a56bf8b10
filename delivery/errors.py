"""The error tree, and how an error is shown.

A class decides the exit code; a stable kebab-case `code` names the case. Every code has a page
`explanations/<code>.md`, printed by `deliver explain CODE`.
"""

from __future__ import annotations

import errno
import os
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable


class DeliverError(Exception):
    """An error that a user can act on; subclasses set the exit code.

    `what` says what was refused, `why` what was expected and what was found (with units), `hint`
    a command or an edit that gets further. Never raised as itself: a subclass gives `exit_code`.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, code: str, what: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.why = why
        self.hint = hint

    def render(self) -> str:
        """The error as it is printed: one `error[...]` line, then `why` and `hint` where given."""
        lines = [f"error[{self.code}]: {self.what}"]
        lines += [f"  why:  {self.why}"] if self.why else []
        lines += [f"  hint: {self.hint}"] if self.hint else []
        return "\n".join(lines)

    def to_json(self) -> dict[str, str]:
        """The error in the form that `--json` prints."""
        return {"code": self.code, "what": self.what, "why": self.why, "hint": self.hint}

    def __str__(self) -> str:
        return self.render()

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (the engine runs apart from the server).
        return (_rebuild, (type(self), self.code, self.what, self.why, self.hint))


class DataError(DeliverError):
    """A step failed: an input is damaged, contradictory or of an unsupported kind."""

    exit_code = 1


class UsageError(DeliverError):
    """The command line, a pipeline file or another configuration is wrong."""

    exit_code = 2


class GateFailed(DeliverError):
    """A check judged the candidate worse than its limits allow."""

    exit_code = 3


class Undecided(DeliverError):
    """A measurement is inconclusive or invalid: neither a pass nor a failure."""

    exit_code = 4


class BaselineError(DeliverError):
    """A baseline is missing, or was measured under another fingerprint."""

    exit_code = 5


class EnvironmentLacking(DeliverError):
    """This machine lacks something: a device, a library, memory, disk or a network."""

    exit_code = 6


def _rebuild(kind: type[DeliverError], code: str, what: str, why: str, hint: str) -> DeliverError:
    return kind(code, what, why=why, hint=hint)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one, or the list of all of them."""
    choices = sorted(known)
    near = get_close_matches(name, choices, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(choices)}"


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large")


def environment_error(error: BaseException) -> EnvironmentLacking | None:
    """The lack of memory, disk space or permission behind an unexpected error; None if there is none.

    A full disk, memory that ran out and a file that may not be written surface as errors of many
    libraries; the whole chain of causes is searched.
    """
    seen: BaseException | None = error
    while seen is not None:
        if (found := _lacking(seen)) is not None:
            return found
        seen = seen.__cause__ or seen.__context__
    return None


def _lacking(error: BaseException) -> EnvironmentLacking | None:
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    path = getattr(error, "filename2", None) or getattr(error, "filename", None)  # a copy names both
    if number in _FULL or any(full in text for full in _FULL_TEXTS):
        return EnvironmentLacking(
            "disk-full",
            f"no space left to write {path}" if path else "no space left on the disk",
            why=text.partition(":")[0] if number is None else os.strerror(number),
            hint="free space (`deliver gc`), or choose another disk with --workdir or --out",
        )
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return EnvironmentLacking(
            "out-of-memory",
            "memory ran out",
            why=text.splitlines()[0] if text else "an allocation was refused",
            hint="`deliver run --plan` shows the predicted peak of every step",
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentLacking(
            "not-permitted",
            f"may not access {path}" if path else "access was refused",
            why=os.strerror(number or 0),
            hint="check the owner and mode of that path, or choose another --workdir",
        )
    return None
