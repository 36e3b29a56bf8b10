"""The `deliver` command: one file per command, and one generated command per step.

A file `cli/<name>.py` without a leading underscore is the command `<name>`. It holds a click command
called `command`; the first line of its docstring is its short help, read without importing it.
"""

from __future__ import annotations

from delivery.cli._edge import main

__all__ = ["main"]
