"""Ed25519 over the index: deterministic, checked by openssl too, and honest about whose key it is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from delivery.errors import DataError, UsageError
from delivery.release.signature import (
    PUBLIC_KEY,
    SIGNATURE,
    SIGNED_BY,
    Signer,
    load_public_key,
    public_pem,
    verify_envelope,
    verify_index,
)


def pem(key: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key.pem"
    path.write_bytes(pem(Ed25519PrivateKey.from_private_bytes(bytes(range(32)))))
    return path


@pytest.fixture
def release(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    folder.mkdir()
    (folder / "index.json").write_text('{"files": []}\n', "utf-8")
    return folder


def test_same_key_same_text_same_signature(key_file: Path, release: Path) -> None:
    signatures = set()
    for _ in range(2):
        Signer.load(key_file).sign_index(release, "index.json")
        signatures.add((release / SIGNATURE).read_bytes())
    assert len(signatures) == 1
    assert verify_index(release, "index.json") == Signer.load(key_file).key_id


def test_openssl_agrees(key_file: Path, release: Path, openssl: Path) -> None:
    Signer.load(key_file).sign_index(release, "index.json")
    command = [str(openssl), "pkeyutl", "-verify", "-pubin", "-inkey", PUBLIC_KEY, "-rawin"]
    command += ["-in", "index.json", "-sigfile", SIGNATURE]
    assert subprocess.run(command, cwd=release, check=False, capture_output=True).returncode == 0
    (release / "index.json").write_text('{"files": [1]}\n', "utf-8")
    assert subprocess.run(command, cwd=release, check=False, capture_output=True).returncode != 0


def test_an_ephemeral_key_says_that_it_is_nobody(release: Path, key_file: Path) -> None:
    Signer.load(None).sign_index(release, "index.json")
    assert "ephemeral" in json.loads((release / SIGNED_BY).read_text("utf-8"))["identity"]
    verify_index(release, "index.json")
    Signer.load(key_file).sign_index(release, "index.json")
    assert "ephemeral" not in (release / SIGNED_BY).read_text("utf-8")


def test_a_changed_index_is_noticed(key_file: Path, release: Path) -> None:
    Signer.load(key_file).sign_index(release, "index.json")
    (release / "index.json").write_text('{"files": [ ]}\n', "utf-8")
    with pytest.raises(DataError, match="does not verify"):
        verify_index(release, "index.json")


def test_another_key_is_not_the_trusted_one(key_file: Path, release: Path, tmp_path: Path) -> None:
    Signer.load(key_file).sign_index(release, "index.json")
    trusted = tmp_path / "trusted.pub"
    trusted.write_bytes(public_pem(Signer.load(None).key.public_key()))
    with pytest.raises(DataError, match="does not verify"):
        verify_index(release, "index.json", load_public_key(trusted))


def test_envelope_carries_the_statement(key_file: Path) -> None:
    signer = Signer.load(key_file)
    statement = b'{"_type": "https://in-toto.io/Statement/v1"}'
    envelope = signer.envelope(statement)
    assert verify_envelope(envelope, signer.key.public_key()) == statement
    forged = json.loads(envelope)
    forged["payload"] = "e30="
    with pytest.raises(DataError, match="does not verify"):
        verify_envelope(json.dumps(forged).encode(), signer.key.public_key())


@pytest.mark.parametrize("content", [b"", b"no key", pem(X25519PrivateKey.generate())])
def test_what_is_no_ed25519_key_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot be used to sign") as caught:
        Signer.load(path)
    assert "openssl genpkey -algorithm ed25519" in caught.value.hint


def test_a_missing_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.pem cannot be used to sign"):
        Signer.load(tmp_path / "none.pem")
