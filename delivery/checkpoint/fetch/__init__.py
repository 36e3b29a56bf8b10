"""From what `--model` says to a local path: `demo`, a path, a Hub id, a URL or an OCI artifact."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from delivery.checkpoint.fetch.place import cache_folder
from delivery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Progress = Callable[[str], None]

__all__ = ["Model", "cache_folder", "locate"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True, slots=True)
class Model:
    """A model by name, not necessarily downloaded yet.

    digests: name → digest of its content (files, a commit, a manifest), part of cache keys.
    fetch: downloads and verifies it, and returns its path; it is given a callback for progress lines.
    """

    digests: Callable[[], Mapping[str, str]]
    fetch: Callable[[Progress], Path]
    local: Path | None = None
    """The path, where no fetching is needed."""


def locate(model: str, *, revision: str = "", download_dir: str = "") -> Model:
    """What `--model` names; nothing is fetched.

    Raises UsageError `model-missing`, `model-not-found`, `revision-unused`.
    """
    if not model:
        raise UsageError("model-missing", "no model is given", hint="--model PATH, demo, a Hub id or a URL")
    folder = Path(download_dir) if download_dir else cache_folder()
    hub = _HUB_ID.fullmatch(model) is not None and not Path(model).exists()
    if revision and not hub:
        raise UsageError(
            "revision-unused",
            f"--revision {revision} says nothing about {model}",
            why="only a Hub id has revisions; a URL or an OCI reference names its version itself",
            hint="leave --revision out",
        )
    if model == "demo":
        from delivery.checkpoint.fetch import demo

        place = folder / "demo"
        return Model(lambda: demo.DIGESTS, lambda _: demo.fetch_demo(place), demo.fetched(place))
    if model.startswith("oci://"):
        from delivery.checkpoint.fetch.oci import OciArtifact

        artifact = OciArtifact(model, folder / "oci")
        return Model(artifact.digests, artifact.fetch)
    if "://" in model:
        from delivery.checkpoint.fetch.remote import RemoteModel

        remote = RemoteModel(model, folder / "url")
        return Model(remote.digests, remote.fetch)
    if hub:
        from delivery.checkpoint.fetch.hub import HubModel

        hub_model = HubModel(model, revision, folder / "hub")
        return Model(hub_model.digests, hub_model.fetch)
    return _local(Path(model))


def _local(path: Path) -> Model:
    from delivery.artifact import hash_file, walk

    if not path.exists():
        raise UsageError(
            "model-not-found",
            f"there is no model {path}",
            why="it is not an existing path, a Hub id (owner/name) or a URL",
            hint="--model demo fetches a small one",
        )

    def digests() -> Mapping[str, str]:
        if path.is_file():
            from delivery.checkpoint.gguf_parts import parts_of

            return {part.name: hash_file(part).sha256 for part in parts_of(path)}
        return {name: hash_file(file).sha256 for name, file in walk(path)}

    return Model(digests, lambda _: path, path)
