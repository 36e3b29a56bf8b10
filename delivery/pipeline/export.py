"""Export an artifact of the store to a folder of the user's choice: `--out DIR`."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from delivery.artifact import MANIFEST, RUN_RECORD, Artifact, place
from delivery.errors import EnvironmentLacking, UsageError

if TYPE_CHECKING:
    from delivery.pipeline.store import Store

# Files below this size are copies, so that editing one (a config, say) touches no other artifact.
_OWN_COPY_BYTES = 1 << 20


def check_target(target: Path) -> None:
    """Raises UsageError `out-exists` unless `target` is absent, empty or an artifact.

    Raises UsageError `out-unusable` and EnvironmentLacking `not-permitted` if it cannot be created, before
    any work is done.
    """
    if target.exists() and not (target.is_dir() and (_empty(target) or (target / MANIFEST).is_file())):
        raise UsageError(
            "out-exists",
            f"{target} exists and is not an artifact",
            why="it would be overwritten",
            hint="choose another --out, or empty that folder",
        )
    around = next(path for path in target.absolute().parents if path.exists())
    if not around.is_dir():
        raise UsageError(
            "out-unusable",
            f"{target} cannot be created",
            why=f"{around} is a file",
            hint="choose another --out",
        )
    if not os.access(around, os.W_OK | os.X_OK):
        raise EnvironmentLacking(
            "not-permitted",
            f"no permission to write to {around}",
            why="--out is created there",
            hint="check the owner and mode of that folder, or choose another --out",
        )


def export(store: Store, artifact: Artifact, target: Path) -> Artifact:
    """Export the artifact to the folder `target`, sharing the data of large files with the store.

    Atomic; an existing artifact is replaced. Raises as `check_target` does.
    """
    check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        made = Path(folder) / "made"
        for ref in artifact.manifest.files:
            copy = made / ref.path
            if ref.size_bytes < _OWN_COPY_BYTES:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(artifact.file(ref.path), copy)
            else:
                place(artifact.file(ref.path), copy)
            store.memo.put(copy, ref.sha256, settled=True)
        made.mkdir(exist_ok=True)
        for name in (RUN_RECORD, MANIFEST):
            shutil.copyfile(artifact.file(name), made / name)
        if target.exists():
            target.rename(Path(folder) / "replaced")
        made.rename(target)
    return Artifact(target, artifact.manifest)


def _empty(folder: Path) -> bool:
    return not any(folder.iterdir())
