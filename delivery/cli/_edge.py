"""The edge: runs a command, shows its error, gives the exit code. The one `except Exception` is here."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from delivery.cli._group import commands
from delivery.cli._interrupt import interruptible, quiet_end
from delivery.cli._session import Session
from delivery.cli._streams import open_streams
from delivery.errors import DeliverError, UsageError, environment_error
from delivery.steps import CATALOG

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXIT_BUG = 70
EXIT_INTERRUPTED = 130


def main(args: Sequence[str] | None = None, *, steps: Mapping[str, type[Any]] | None = None) -> int:
    """Run `deliver` with `args` (default: the process' own) and return the exit code.

    0 pass; 1 a step failed; 2 usage or configuration; 3 gate failed; 4 undecided; 5 baseline missing
    or incompatible; 6 environment lacking; 70 a bug; 130 interrupted. `steps` replaces the catalogue.
    """
    given = sys.argv[1:] if args is None else list(args)
    open_streams()
    session = Session(steps=CATALOG if steps is None else steps)
    # Read here, not by click: the options themselves may be invalid.
    session.answered = "--json" not in given
    if "run" in given[:1] and "--plan" not in given:
        session.keep({"steps": [], "release": None})
    try:
        # SIGTERM ends the run cleanly too: temporary folders are removed.
        with interruptible(signal.SIGINT), interruptible(signal.SIGTERM):
            result = commands.main(
                args=given,
                prog_name="deliver",
                standalone_mode=False,
                obj=session,
            )
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except DeliverError as error:
        return _show(error, session)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return UsageError.exit_code
    except click.ClickException as error:
        return _show(_usage(error, given), session)
    except (KeyboardInterrupt, click.Abort):
        _answer(session, "interrupted", "interrupted", "")
        print("interrupted", file=sys.stderr)
        if args is None and not session.debug:
            quiet_end()
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout (`| head`) has closed it; there is nowhere to report to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        known = environment_error(error)
        return _show(known, session) if known else _bug(error, session)


def _show(error: DeliverError, session: Session) -> int:
    if session.debug:
        traceback.print_exc()
    _answer(session, error.code, error.what, error.why, error.hint)
    print(error.render(), file=sys.stderr)
    return error.exit_code


def _answer(session: Session, code: str, what: str, why: str, hint: str = "") -> None:
    """Print the error as the one JSON object of `--json`, unless one has been printed."""
    if not session.answered:
        error = {"code": code, "what": what, "why": why, "hint": hint}
        session.answer({"passed": False, **session.answer_so_far, "error": error})


def _usage(error: click.ClickException, args: Sequence[str]) -> UsageError:
    """A click error in our own shape; `Did you mean` stays in its message."""
    ctx = getattr(error, "ctx", None)
    what = " ".join(error.format_message().split()).rstrip(".")
    # For an option without its argument click gives no context.
    named = ctx.command_path if ctx else " ".join(["deliver", *args[:1]])
    return UsageError("usage", what, hint=f"{named} --help")


def _bug(error: Exception, session: Session) -> int:
    """Report an unexpected error briefly; the traceback goes to a log (or to stderr with --debug)."""
    where = ""
    if session.debug:
        traceback.print_exc()
    else:
        where = _write_log(_logs(session.workdir))
    text = traceback.format_exception_only(error)[-1].strip()
    _answer(session, "bug", f"deliver itself failed: {text}", f"an unexpected error{where}")
    print(f"error[bug]: deliver itself failed: {text}", file=sys.stderr)
    print(f"  why:  an unexpected error{where}", file=sys.stderr)
    print("  hint: deliver --debug ... shows the traceback; please report it with that text", file=sys.stderr)
    return EXIT_BUG


def _logs(workdir: Path) -> Path:
    """Where crash logs go: the workdir if it exists, else the user's state folder."""
    if workdir.is_dir():
        return workdir / "logs"
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "deliver" / "logs"


def _write_log(folder: Path) -> str:
    path = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{sys.argv}\n\n{traceback.format_exc()}", "utf-8")
    except OSError as failure:
        return f" (its traceback could not be written: {failure.strerror})"
    return f"; traceback in {path}"
