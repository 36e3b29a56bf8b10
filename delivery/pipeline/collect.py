"""`gc` removes unreachable artifacts; `verify` checks every byte of an artifact."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from delivery.artifact import MANIFEST, read_artifact, read_hash
from delivery.errors import DataError, EnvironmentLacking
from delivery.pipeline.events import latest_steps, runs
from delivery.pipeline.locks import locked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from delivery.artifact import Artifact
    from delivery.pipeline.store import Store


@dataclass(frozen=True, slots=True)
class Garbage:
    """What `gc` removes, or would remove: artifacts, and the number of bytes freed."""

    artifacts: tuple[Artifact, ...]
    size_bytes: int


def gc(store: Store, *, dry_run: bool = False, scratch: bool = False) -> Garbage:
    """Remove artifacts not reachable from a tag, the latest artifact of any stage or the last finished run.

    The last finished run is a root so that a step run on its own does not make parts of a release
    unreachable. An artifact's inputs are reachable through it. Leftovers of killed runs are removed too;
    unfinished work that the next run would resume is removed only with `scratch`.
    Raises EnvironmentLacking `store-busy` while a run is using the store.
    """
    if not store.workdir.is_dir():
        return Garbage((), 0)
    with locked(store.workdir / "locks" / "store", wait=False) as had:
        if not had:
            raise EnvironmentLacking(
                "store-busy", f"a run is using {store.workdir}", why="gc would remove what it is making"
            )
        kept = _reached(store)
        gone = tuple(a for a in store.artifacts() if a.digest not in kept)
        objects = list(_unreached_objects(store, kept))
        leftovers = list(_leftovers(store, kept, scratch))
        freed = sum(p.stat().st_size for p in objects) + sum(_tree_bytes(p) for p in leftovers)
        if not dry_run:
            for artifact in gone:
                store.discard(artifact)
            for path in objects:
                path.unlink()
            for path in leftovers:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return Garbage(gone, freed)


def verify(artifact: Artifact) -> None:
    """Read every file of an artifact again and compare it with the manifest.

    Raises DataError `artifact-damaged`, naming every damaged file.
    """
    problems = []
    for ref in artifact.manifest.files:
        path = artifact.file(ref.path)
        if not path.is_file():
            problems.append(f"{ref.path} is missing")
            continue
        found = read_hash(path)
        if found.size_bytes != ref.size_bytes:
            problems.append(f"{ref.path} has {found.size_bytes} bytes instead of {ref.size_bytes}")
        elif found.sha256 != ref.sha256:
            problems.append(f"{ref.path} has SHA-256 {found.sha256[:12]}… instead of {ref.sha256[:12]}…")
    if problems:
        raise DataError(
            "artifact-damaged",
            f"{artifact.path} is damaged",
            why="; ".join(problems),
            hint="copy it again from an intact source, or make it again",
        )


def _reached(store: Store) -> set[str]:
    """Digests reachable from tags and from the latest results, following inputs."""
    finished = next((r for r in runs(store) if r.get("finished")), None)
    roots = chain(
        store.tags().values(),
        (s["artifact"] for s in latest_steps(store).values()),
        (s["artifact"] for s in (finished or {}).get("steps", ())),
    )
    queue, seen = list(roots), set()
    while queue:
        digest = queue.pop()
        if digest in seen:
            continue
        seen.add(digest)
        if (store.path_of(digest) / MANIFEST).is_file():
            inputs = read_artifact(store.path_of(digest)).manifest.inputs.values()
            queue += [d for value in inputs for d in ((value,) if isinstance(value, str) else value)]
    return seen


def _unreached_objects(store: Store, kept: set[str]) -> Iterator[Path]:
    used = {ref.sha256 for a in store.artifacts() if a.digest in kept for ref in a.manifest.files}
    for path in (store.workdir / "objects").glob("*/*"):
        if path.parent.name + path.name not in used:
            yield path


def _leftovers(store: Store, kept: set[str], scratch: bool) -> Iterable[Path]:
    """Leftovers of killed runs, keys whose artifact is removed, and locks, none of which is held now."""
    readable = {a.digest for a in store.artifacts()}
    yield from (p for p in store.workdir.glob("artifacts/*") if p.name not in readable)
    yield from store.workdir.glob("tmp/*")
    for path in store.workdir.glob("scratch/*"):
        if scratch or store.key_record(path.name) is not None:
            yield path
    for path in store.workdir.glob("keys/*.json"):
        record = store.key_record(path.stem)
        if record is None or record["artifact"] not in kept:
            yield path
    yield from (p for p in store.workdir.glob("locks/*") if p.name != "store")


def _tree_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
