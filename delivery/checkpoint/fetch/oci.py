"""OCI artifacts: a model in a container registry. Every blob is checked by its digest.

Layers become files: named by `org.opencontainers.image.title` (ORAS and most model formats), or, for
tar layers, by what is in them. `oci://host/name:tag` or `oci://host/name@sha256:...`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import requests

from delivery.checkpoint.fetch.archive import extract, inside
from delivery.checkpoint.fetch.place import Ledger, check_space, locked, receive, slot
from delivery.errors import DataError, EnvironmentLacking, UsageError

_REFERENCE = re.compile(
    r"oci://(?P<host>[\w.-]+(?::\d+)?)/(?P<name>[a-z0-9][a-z0-9._/-]*)"
    r"(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_ACCEPT = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
_TITLE = "org.opencontainers.image.title"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_MANIFEST_BYTES = 4 << 20
_TIMEOUT_S = 60


class OciArtifact:
    """One artifact of a registry. Raises UsageError `url-invalid`."""

    def __init__(self, reference: str, folder: Path) -> None:
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise UsageError(
                "url-invalid",
                f"{reference} is not an OCI reference",
                hint="oci://host/name:tag or @sha256:...",
            )
        self.reference = reference
        self._host, self._name = match["host"], match["name"].rstrip("/")
        self._version = match["digest"] or match["tag"] or "latest"
        self._slot = slot(folder, reference)
        local = self._host.split(":")[0] in ("localhost", "127.0.0.1")
        self._base = f"{'http' if local else 'https'}://{self._host}/v2/{self._name}"
        self._session = requests.Session()

    def digests(self) -> Mapping[str, str]:
        """{reference: manifest digest}; out of reach, of what was fetched last.

        Raises EnvironmentLacking `source-unreachable`, DataError `download-damaged`.
        """
        try:
            return {self.reference: self._manifest()[0]}
        except EnvironmentLacking:
            known = Ledger(self._slot).whole()
            if known is None:
                raise
            return known

    def fetch(self, progress: Callable[[str], None]) -> Path:
        """The folder with the artifact's files, every one checked; continues an earlier attempt.

        Raises EnvironmentLacking `source-unreachable`, `disk-full`, DataError `download-damaged`,
        `path-escapes`, `source-incomplete`.
        """
        with locked(self._slot):
            ledger = Ledger(self._slot)
            digests = dict(self.digests())
            if ledger.whole() != digests:
                self._bring(ledger, progress)
                ledger.finish(digests)
        return self._slot

    def _bring(self, ledger: Ledger, progress: Callable[[str], None]) -> None:
        digest, manifest = self._manifest()
        layers = manifest.get("layers")
        if not isinstance(layers, list) or not layers:
            raise DataError("source-incomplete", f"{self.reference} has no layers", why=f"manifest {digest}")
        sizes = [_size(layer, self.reference) for layer in layers]
        check_space(self._slot, sum(sizes))
        for layer, size in zip(layers, sizes, strict=True):
            blob = _blob_digest(layer, self.reference)
            title = (layer.get("annotations") or {}).get(_TITLE)
            packed = "tar" in str(layer.get("mediaType", ""))
            name = inside(str(title), self.reference) if title else f"{blob[:12]}.tar"
            if ledger.arrived(name, blob):
                continue
            progress(f"{name}, {size} bytes")
            target = self._slot / (f".{blob[:12]}.tar" if packed else name)
            receive(
                target,
                size,
                lambda start, end, blob=blob: self._blob(blob, start, end),  # type: ignore[misc]
                sha256=blob,
            )
            if packed:
                unpacked = self._slot / ".unpacked"
                shutil.rmtree(unpacked, ignore_errors=True)
                extract(target, unpacked)
                for file in [p for p in unpacked.rglob("*") if p.is_file()]:
                    final = self._slot / file.relative_to(unpacked)
                    final.parent.mkdir(parents=True, exist_ok=True)
                    file.replace(final)
                shutil.rmtree(unpacked, ignore_errors=True)
                target.unlink()
            else:
                ledger.note(name, blob)

    def _manifest(self) -> tuple[str, dict[str, Any]]:
        answer = self._get(f"{self._base}/manifests/{self._version}", {"Accept": _ACCEPT})
        text = answer.content
        digest = "sha256:" + hashlib.sha256(text).hexdigest()
        stated = self._version if self._version.startswith("sha256:") else None
        if len(text) > _MAX_MANIFEST_BYTES or (stated and stated != digest):
            raise DataError(
                "download-damaged",
                f"the manifest of {self.reference} is not what was requested",
                why=f"expected {stated}, got {digest}, {len(text)} bytes",
            )
        try:
            manifest = json.loads(text)
        except ValueError as error:
            raise self._unreachable(f"its manifest is no JSON: {error}") from error
        return digest, manifest if isinstance(manifest, dict) else {}

    def _blob(self, digest: str, start: int, end: int) -> bytes:
        answer = self._get(f"{self._base}/blobs/sha256:{digest}", {"Range": f"bytes={start}-{end - 1}"})
        return answer.content[start:end] if answer.status_code == 200 else answer.content

    def _get(self, url: str, headers: Mapping[str, str]) -> requests.Response:
        try:
            answer = self._session.get(url, headers=dict(headers), timeout=_TIMEOUT_S)
            if answer.status_code == 401 and self._authenticate(answer.headers.get("WWW-Authenticate", "")):
                answer = self._session.get(url, headers=dict(headers), timeout=_TIMEOUT_S)
            answer.raise_for_status()
        except requests.RequestException as error:
            raise self._unreachable(str(error).split("\n")[0][:200]) from error
        return answer

    def _authenticate(self, challenge: str) -> bool:
        """Anonymous or .netrc token of the realm that the registry names."""
        fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        if not challenge.lower().startswith("bearer") or "realm" not in fields:
            return False
        wanted = {k: fields[k] for k in ("service", "scope") if k in fields}
        answer = self._session.get(fields["realm"], params=wanted, timeout=_TIMEOUT_S)
        answer.raise_for_status()
        token = answer.json().get("token") or answer.json().get("access_token")
        self._session.headers["Authorization"] = f"Bearer {token}"
        return bool(token)

    def _unreachable(self, why: str) -> EnvironmentLacking:
        return EnvironmentLacking(
            "source-unreachable",
            f"{self.reference} cannot be read",
            why=why,
            hint="check the reference, credentials (~/.netrc) and proxy; the same command continues",
        )


def _size(layer: Any, reference: str) -> int:
    size = layer.get("size") if isinstance(layer, Mapping) else None
    if not isinstance(size, int) or size < 0:
        raise DataError("download-damaged", f"a layer of {reference} has no size", why=str(layer)[:120])
    return size


def _blob_digest(layer: Mapping[str, Any], reference: str) -> str:
    match = _DIGEST.fullmatch(str(layer.get("digest")))
    if match is None:
        raise DataError("download-damaged", f"a layer of {reference} has no SHA-256", why=str(layer)[:120])
    return match[1]
