"""Signing a release: Ed25519 (RFC 8032), whose signature depends on key and text alone.

What is signed is `index.json`, which lists the SHA-256 of every other file of the release. Without a
key an ephemeral one is made: its public half ships, so that damage is detected, but it proves
nobody's identity and says so.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from delivery.errors import DataError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

SIGNATURE = "index.json.sig"
PUBLIC_KEY = "signing-key.pub"
SIGNED_BY = "signature.json"

_DSSE_TYPE = "application/vnd.in-toto+json"


@dataclass(frozen=True)
class Signer:
    """A private key, and whether it is ephemeral."""

    key: Ed25519PrivateKey
    is_ephemeral: bool

    @classmethod
    def load(cls, path: Path | None) -> Signer:
        """The key of a PEM file (PKCS #8), or an ephemeral one for None.

        Raises UsageError `signing-key-unreadable`.
        """
        if path is None:
            return cls(Ed25519PrivateKey.generate(), is_ephemeral=True)
        hint = "openssl genpkey -algorithm ed25519 -out key.pem"
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UsageError(
                "signing-key-unreadable", f"{path} cannot be used to sign", why=str(error), hint=hint
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise UsageError(
                "signing-key-unreadable",
                f"{path} cannot be used to sign",
                why=f"expected an Ed25519 key, got {type(key).__name__}",
                hint=hint,
            )
        return cls(key, is_ephemeral=False)

    @property
    def key_id(self) -> str:
        return key_id(self.key.public_key())

    def sign_index(self, release: Path, index: str) -> None:
        """Write the signature over the file `index` of a release, the public key, and who signed."""
        content = (release / index).read_bytes()
        (release / SIGNATURE).write_bytes(self.key.sign(content))
        public = self.key.public_key()
        (release / PUBLIC_KEY).write_bytes(public_pem(public))
        (release / SIGNED_BY).write_bytes(signed_by(public, index, content, is_ephemeral=self.is_ephemeral))

    def envelope(self, statement: bytes) -> bytes:
        """A DSSE envelope around an in-toto statement, as one JSON line."""
        signature = self.key.sign(_pae(statement))
        envelope = {
            "payloadType": _DSSE_TYPE,
            "payload": base64.b64encode(statement).decode(),
            "signatures": [{"keyid": self.key_id, "sig": base64.b64encode(signature).decode()}],
        }
        return json.dumps(envelope, separators=(",", ":")).encode() + b"\n"


def public_pem(key: Ed25519PublicKey) -> bytes:
    """The key as PEM (SubjectPublicKeyInfo)."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def signed_by(key: Ed25519PublicKey, index: str, content: bytes, *, is_ephemeral: bool) -> bytes:
    """`signature.json`: who signed the file `index` with these bytes."""
    about = {
        "algorithm": "ed25519",
        "key_id": key_id(key),
        "identity": "none: an ephemeral key" if is_ephemeral else "the holder of the key",
        "signs": index,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return json.dumps(about, indent=1).encode() + b"\n"


def key_id(key: Ed25519PublicKey) -> str:
    """SHA-256 of the key's DER form, as `sha256:…`."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return "sha256:" + hashlib.sha256(der).hexdigest()


def load_public_key(path: Path) -> Ed25519PublicKey:
    """Raises UsageError `signing-key-unreadable`."""
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UsageError("signing-key-unreadable", f"{path} is not a public key", why=str(error)) from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(
            "signing-key-unreadable", f"{path} is no Ed25519 key", why=f"it is a {type(key).__name__}"
        )
    return key


def verify_index(release: Path, index: str, trusted: Ed25519PublicKey | None = None) -> str:
    """Check the signature over `index` with the trusted key, or with the shipped one.

    Returns the key's id. Raises DataError `signature-invalid`.
    """
    key = trusted or load_public_key(release / PUBLIC_KEY)
    try:
        key.verify((release / SIGNATURE).read_bytes(), (release / index).read_bytes())
    except (InvalidSignature, OSError) as error:
        raise DataError(
            "signature-invalid",
            f"the signature of {release} does not verify",
            why=str(error) or f"{index} was changed, or another key than {key_id(key)} signed it",
            hint="package the engine again, or ask whoever published it",
        ) from error
    return key_id(key)


def verify_envelope(envelope: bytes, key: Ed25519PublicKey) -> bytes:
    """The statement inside a DSSE envelope. Raises DataError `signature-invalid`."""
    try:
        data = json.loads(envelope)
        statement = base64.b64decode(data["payload"])
        key.verify(base64.b64decode(data["signatures"][0]["sig"]), _pae(statement))
    except (InvalidSignature, ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(
            "signature-invalid", "the provenance's signature does not verify", why=str(error)
        ) from error
    return statement


def _pae(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: type and payload, each with its length."""
    kind = _DSSE_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
