"""The code that is measured: our own engine, whose version number stays the same while it is changed."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_MEASURED = (
    *("bench", "checkpoint", "engine", "formats", "kernels", "model"),
    *("device.py", "qtensor.py"),
)
"""What a measured process runs, as paths in the package."""


def code_in_key() -> dict[str, str]:
    """For a step's `external`: a measurement of the engine is another one when the engine changed."""
    return {"engine code": engine_code()}


@cache
def engine_code() -> str:
    """SHA-256 (64 hexadecimal digits) of the source and data files behind a measurement."""
    return digest_of(_PACKAGE, _MEASURED)


def digest_of(package: Path, parts: tuple[str, ...]) -> str:
    """SHA-256 over the files below `parts` of a package: their paths and their contents.

    What the interpreter makes of them (`__pycache__`) does not count.
    """
    total = hashlib.sha256()
    for part in parts:
        for path in sorted((package / part, *(package / part).rglob("*"))):
            if path.is_file() and "__pycache__" not in path.parts:
                name = path.relative_to(package).as_posix()
                total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
