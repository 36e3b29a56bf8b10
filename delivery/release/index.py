"""The index of a release: every file with its SHA-256 and what it is for. It is what gets signed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delivery.artifact import hash_tree
from delivery.errors import DataError
from delivery.release.signature import PUBLIC_KEY, SIGNATURE, SIGNED_BY, verify_index

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

INDEX = "index.json"
SUMS = "SHA256SUMS"
ENVELOPE = "provenance.intoto.jsonl"
SCHEMA = 1
# These depend on the key, or on the index itself.
_NOT_INDEXED = frozenset({INDEX, SUMS, SIGNATURE, PUBLIC_KEY, SIGNED_BY, ENVELOPE})


def write_index(release: Path, facts: Mapping[str, Any]) -> None:
    """Write `index.json` (facts and files) and `SHA256SUMS` over what lies in `release`."""
    files = [ref for ref in hash_tree(release) if ref.path not in _NOT_INDEXED]
    index = {
        "schema": SCHEMA,
        **facts,
        "files": [{"path": f.path, "sha256": f.sha256, "size_bytes": f.size_bytes} for f in files],
    }
    (release / INDEX).write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n", "utf-8")
    (release / SUMS).write_text("".join(f"{f.sha256}  {f.path}\n" for f in files), "utf-8")


def read_index(release: Path) -> dict[str, Any]:
    """Raises DataError `not-a-release`."""
    try:
        index = json.loads((release / INDEX).read_text("utf-8"))
        if index["schema"] != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}, got {index['schema']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("not-a-release", f"{release} is not a release", why=str(error)) from error
    found: dict[str, Any] = index
    return found


def verify_release(release: Path, trusted: Ed25519PublicKey | None = None) -> str:
    """Check the signature over the index and every file in it; returns the signing key's id.

    trusted: the key that must have signed; without it the key that ships is taken, which shows damage
    but not who signed. Raises DataError `not-a-release`, `signature-invalid`, `release-damaged`.
    """
    index = read_index(release)
    key = verify_index(release, INDEX, trusted)
    known = {entry["path"]: entry["sha256"] for entry in index["files"]}
    found = {ref.path: ref.sha256 for ref in hash_tree(release) if ref.path not in _NOT_INDEXED}
    for path in sorted(known.keys() | found.keys()):
        if known.get(path) != found.get(path):
            state = "missing" if path not in found else "not in the index" if path not in known else "changed"
            raise DataError(
                "release-damaged",
                f"{release / path} is {state}",
                why=f"expected SHA-256 {known.get(path, 'none')}, got {found.get(path, 'none')}",
                hint="package the engine again, or fetch the release again",
            )
    return key
