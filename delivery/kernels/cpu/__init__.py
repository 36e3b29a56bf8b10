"""CPU kernels: programs of operations compiled by numba and run by a few threads.

`layer` and `program` are the interface; nothing is compiled before it is used.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["forget_outdated"]


def forget_outdated(folder: Path) -> None:
    """Remove machine code that numba cached in `folder` before the newest source there was written.

    numba looks at the file of a compiled function alone, not at the ones whose functions it calls.
    """
    newest = max((source.stat().st_mtime for source in folder.glob("*.py")), default=0.0)
    for index in (folder / "__pycache__").glob("*.nbi"):
        with suppress(OSError):  # another process was faster, or the folder is read-only
            if index.stat().st_mtime < newest:
                index.unlink()


forget_outdated(Path(__file__).parent)
