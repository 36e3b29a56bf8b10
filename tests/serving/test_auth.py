"""API keys, bearer tokens of a real issuer on loopback, and where a server may listen."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from delivery.errors import EnvironmentLacking, UsageError
from delivery.serving.auth import Authenticator, Oidc, check_bind, read_keys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_a_key_names_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# staging\nalice:s3cret\n\nbare-key  # no name\n")
    auth = Authenticator(keys=read_keys(path))
    assert auth.identify("Bearer s3cret").name == "key:alice"
    assert auth.identify("bearer bare-key").name == "key:key-2"
    for wrong in (None, "", "Bearer ", "Bearer s3cre", "Basic s3cret", "s3cret"):
        assert auth.identify(wrong) is None


def test_without_keys_everybody_may_call() -> None:
    assert Authenticator().identify(None).name == "anonymous"


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# nothing\n")
    with pytest.raises(UsageError, match="holds no API key"):
        read_keys(path)
    with pytest.raises(UsageError, match="cannot read the API keys"):
        read_keys(tmp_path / "absent")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [("alice:old\nalice:new\n", "'alice' occurs twice"), ("alice:\n", "'alice' has no key")],
)
def test_a_key_that_would_not_work_is_refused(tmp_path: Path, lines: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(lines)
    with pytest.raises(UsageError, match=reason):
        read_keys(path)


@pytest.mark.parametrize(
    ("host", "refused"),
    [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("10.1.2.3", True)],
)
def test_no_public_address_without_authentication(host: str, refused: bool) -> None:
    open_door = Authenticator()
    if refused:
        with pytest.raises(UsageError, match="without authentication"):
            check_bind(host, open_door, allow_unauthenticated=False)
    else:
        check_bind(host, open_door, allow_unauthenticated=False)
    check_bind(host, open_door, allow_unauthenticated=True)
    check_bind(host, Authenticator(keys={"a": b"digest"}), allow_unauthenticated=False)


class Issuer:
    """An OpenID Connect issuer on loopback with one RSA key."""

    def __init__(self) -> None:
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                documents = {
                    "/.well-known/openid-configuration": {
                        "issuer": issuer.url,
                        "jwks_uri": issuer.url + "/keys",
                    },
                    "/keys": {"keys": [public | {"kid": "1", "use": "sig", "alg": "RS256"}]},
                }
                body = json.dumps(documents[self.path]).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def token(self, **changes: Any) -> str:
        now = int(time.time())
        claims = {"iss": self.url, "sub": "bob", "aud": "deliver", "iat": now, "exp": now + 300} | changes
        return jwt.encode(claims, self.key, algorithm="RS256", headers={"kid": "1"})


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    running = Issuer()
    yield running
    running.server.shutdown()
    running.server.server_close()


def test_a_token_of_the_issuer_is_accepted(issuer: Issuer) -> None:
    auth = Authenticator(oidc=Oidc.discover(issuer.url, "deliver"))
    assert auth.identify(f"Bearer {issuer.token()}").name == "oidc:bob"


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": int(time.time()) - 3600},
        {"aud": "another"},
        {"iss": "http://127.0.0.1:1"},
        {"iat": int(time.time()) + 3600},
    ],
    ids=["expired", "audience", "issuer", "from the future"],
)
def test_a_token_that_does_not_verify_is_refused(issuer: Issuer, changes: dict[str, Any]) -> None:
    auth = Authenticator(oidc=Oidc.discover(issuer.url, "deliver"))
    assert auth.identify(f"Bearer {issuer.token(**changes)}") is None


def test_an_unsigned_or_foreign_token_is_refused(issuer: Issuer) -> None:
    auth = Authenticator(oidc=Oidc.discover(issuer.url, "deliver"))
    now = int(time.time())
    claims = {"iss": issuer.url, "sub": "eve", "aud": "deliver", "iat": now, "exp": now + 300}
    unsigned = jwt.encode(claims, None, algorithm="none", headers={"kid": "1"})
    foreign = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    forged = jwt.encode(claims, foreign, algorithm="RS256", headers={"kid": "1"})
    assert auth.identify(f"Bearer {unsigned}") is None
    assert auth.identify(f"Bearer {forged}") is None
    assert auth.identify("Bearer not.a.token") is None


def test_an_unreachable_issuer_is_named() -> None:
    with pytest.raises(EnvironmentLacking, match="OIDC issuer"):
        Oidc.discover("http://127.0.0.1:1", None)
