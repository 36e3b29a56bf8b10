"""The index of a release: every file with its SHA-256 and what it is for. It is what gets signed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from delivery.artifact import hash_file, hash_tree
from delivery.errors import DataError, UsageError
from delivery.release.signature import (
    PUBLIC_KEY,
    SIGNATURE,
    SIGNED_BY,
    key_id,
    load_public_key,
    public_pem,
    signed_by,
    verify_envelope,
    verify_index,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

INDEX = "index.json"
SUMS = "SHA256SUMS"
PROVENANCE = "provenance.json"
ENVELOPE = "provenance.intoto.jsonl"
SCHEMA = 1
# These depend on the key, or on the index itself; `verify_release` checks each against the key.
_NOT_INDEXED = frozenset({INDEX, SIGNATURE, PUBLIC_KEY, SIGNED_BY, ENVELOPE})
_HINT = "package the engine again, or fetch the release again"


def write_index(release: Path, facts: Mapping[str, Any]) -> None:
    """Write `SHA256SUMS` over what lies in `release`, and `index.json` (facts and files) over that and it."""
    files = [ref for ref in hash_tree(release) if ref.path not in _NOT_INDEXED]
    (release / SUMS).write_text("".join(f"{f.sha256}  {f.path}\n" for f in files), "utf-8")
    # Whoever checks files by the list alone has to find the list itself in what is signed.
    files = sorted([*files, replace(hash_file(release / SUMS), path=SUMS)], key=lambda f: f.path)
    index = {
        "schema": SCHEMA,
        **facts,
        "files": [{"path": f.path, "sha256": f.sha256, "size_bytes": f.size_bytes} for f in files],
    }
    (release / INDEX).write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n", "utf-8")


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
    """Check the signature over the index, every file in it, and the files about the signature itself.

    trusted: the key that must have signed; without it the key that ships is taken, which shows damage
    but not who signed. Returns the signing key's id.
    Raises DataError `not-a-release`, `signature-invalid`, `release-damaged`.
    """
    index = read_index(release)
    key = trusted or _shipped_key(release)
    verify_index(release, INDEX, key)
    _verify_files(release, index)
    _verify_signing(release, key)
    return key_id(key)


def _shipped_key(release: Path) -> Ed25519PublicKey:
    try:
        return load_public_key(release / PUBLIC_KEY)
    except UsageError as error:  # a file of the release is damaged; the user has chosen no key
        raise DataError("signature-invalid", error.what, why=error.why, hint=_HINT) from error


def _verify_files(release: Path, index: Mapping[str, Any]) -> None:
    """Every file against the index, in both directions."""
    known = {entry["path"]: entry["sha256"] for entry in index["files"]}
    found = {ref.path: ref.sha256 for ref in hash_tree(release) if ref.path not in _NOT_INDEXED}
    for path in sorted(known.keys() | found.keys()):
        if known.get(path) != found.get(path):
            state = "missing" if path not in found else "not in the index" if path not in known else "changed"
            raise DataError(
                "release-damaged",
                f"{release / path} is {state}",
                why=f"expected SHA-256 {known.get(path, 'none')}, got {found.get(path, 'none')}",
                hint=_HINT,
            )


def _verify_signing(release: Path, key: Ed25519PublicKey) -> None:
    """The files that depend on the key: the key itself, who signed, and the signed provenance."""
    if _read(release / PUBLIC_KEY) != public_pem(key):
        raise _not_of_the_key(release / PUBLIC_KEY, key, "it is another key")
    content = _read(release / INDEX)
    if _read(release / SIGNED_BY) not in [
        signed_by(key, INDEX, content, is_ephemeral=e) for e in (True, False)
    ]:
        raise _not_of_the_key(release / SIGNED_BY, key, "it says something else of the signature")
    if verify_envelope(_read(release / ENVELOPE), key) != _read(release / PROVENANCE):
        raise _not_of_the_key(release / ENVELOPE, key, f"its statement is not {PROVENANCE}")


def _not_of_the_key(path: Path, key: Ed25519PublicKey, why: str) -> DataError:
    return DataError(
        "signature-invalid", f"{path} does not belong to the signature of {key_id(key)}", why=why, hint=_HINT
    )


def _read(path: Path) -> bytes:
    """The file's bytes; nothing for a missing one, which then matches nothing."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
