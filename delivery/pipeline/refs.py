"""Resolve references: a path, a tag or the beginning of a digest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from delivery.artifact import MANIFEST, Artifact, Kind, Manifest, hash_tree, read_artifact
from delivery.errors import DataError, UsageError, did_you_mean

if TYPE_CHECKING:
    from delivery.pipeline.store import Store

MIN_PREFIX = 4
SHORT = 12
_EXTERNAL = "external"
ENGINE_FILE = "engine.json"
# The file that identifies the kind of a folder not made by deliver. The first match counts.
_MARKS = ((ENGINE_FILE, Kind.ENGINE), ("config.json", Kind.CHECKPOINT))


def short(digest: str) -> str:
    """A digest shortened for display."""
    return digest[:SHORT]


def resolve(store: Store, ref: str, kind: Kind | None = None) -> Artifact:
    """The artifact that `ref` refers to, checked to be intact and of the requested kind.

    A plain Hugging Face directory is accepted as a checkpoint, with a manifest made in memory.
    Raises UsageError `unknown-ref`, `ambiguous-ref`, `wrong-kind`, DataError `artifact-damaged`,
    `not-an-artifact`, `manifest-damaged`.
    """
    artifact = find(store, ref)
    if kind is not None and artifact.kind != kind:
        raise UsageError(
            "wrong-kind",
            f"{ref} is not {_one(kind)}",
            why=f"expected {_one(kind)}, got {_one(artifact.kind)}",
            hint=f"deliver ls --kind {kind}",
        )
    if artifact.manifest.step != _EXTERNAL and (damage := store.damage(artifact)) is not None:
        raise DataError(
            "artifact-damaged",
            f"{artifact.path} does not match its manifest",
            why=damage,
            hint=f"make it again; or, if it was changed on purpose, remove {artifact.file(MANIFEST)}",
        )
    return artifact


def is_external(artifact: Artifact) -> bool:
    """Whether the artifact was not made by deliver."""
    return artifact.manifest.step == _EXTERNAL


def find(store: Store, ref: str) -> Artifact:
    """Like `resolve`, without checking the artifact's state."""
    path = Path(ref).expanduser()
    if path.is_dir():
        return read_artifact(path) if (path / MANIFEST).is_file() else _external(store, path)
    if path.exists():
        raise DataError(
            "not-an-artifact",
            f"{ref} is a file",
            why="an artifact is a folder",
            hint="deliver convert --model FILE",
        )
    tags = store.tags()
    if ref in tags:
        return read_artifact(store.path_of(tags[ref]))
    return _by_prefix(store, ref, list(tags))


def _by_prefix(store: Store, ref: str, tags: list[str]) -> Artifact:
    folder = store.workdir / "artifacts"
    digests = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    found = [d for d in digests if len(ref) >= MIN_PREFIX and d.startswith(ref)]
    if len(found) > 1:
        raise UsageError(
            "ambiguous-ref",
            f"{ref!r} matches {len(found)} artifacts",
            why=", ".join(short(d) for d in found),
            hint="give more digits",
        )
    if not found:
        raise UsageError(
            "unknown-ref",
            f"there is no artifact {ref!r}",
            why=f"it is not a folder, and not a tag or the beginning of a digest in {store.workdir}"
            + (f", of which at least {MIN_PREFIX} digits are needed" if len(ref) < MIN_PREFIX else ""),
            hint=did_you_mean(ref, tags) if tags else "deliver ls",
        )
    return read_artifact(folder / found[0])


def _external(store: Store, path: Path) -> Artifact:
    kind = next((kind for mark, kind in _MARKS if (path / mark).is_file()), None)
    if kind is None:
        raise DataError(
            "not-an-artifact",
            f"{path} is neither an artifact nor a Hugging Face model directory",
            why=f"it has no {MANIFEST} and no config.json",
            hint="deliver ls",
        )
    with store.remembering():
        files = hash_tree(path)
    return Artifact(path, Manifest(kind, _EXTERNAL, 1, files=files))


def _one(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
