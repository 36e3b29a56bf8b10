"""Who may call: API keys from a file, and bearer tokens of an OpenID Connect issuer.

OpenID Connect Discovery 1.0 names the key set (JWKS, RFC 7517); tokens are JWTs (RFC 7519).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jwt
import requests

from delivery.errors import EnvironmentLacking, UsageError

if TYPE_CHECKING:
    from pathlib import Path

_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA")
_TIMEOUT_S = 5.0
_CLOCK_LEEWAY_S = 30


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is calling; `name` never holds a secret, so it may be logged and rate-limited by."""

    name: str


@dataclass(frozen=True)
class Oidc:
    """Verifies bearer tokens of one issuer. `audience` is checked when given."""

    issuer: str
    audience: str | None
    keys: jwt.PyJWKClient

    @classmethod
    def discover(cls, issuer: str, audience: str | None) -> Oidc:
        """Read the issuer's discovery document. Raises EnvironmentLacking `oidc-unreachable`."""
        url = issuer.rstrip("/") + "/.well-known/openid-configuration"
        try:
            reply = requests.get(url, timeout=_TIMEOUT_S)
            reply.raise_for_status()
            document: dict[str, Any] = reply.json()
            return cls(
                document["issuer"], audience, jwt.PyJWKClient(document["jwks_uri"], timeout=_TIMEOUT_S)
            )
        except (requests.RequestException, ValueError, KeyError) as error:
            raise EnvironmentLacking(
                "oidc-unreachable",
                f"the OIDC issuer {issuer} cannot be used",
                why=f"{url}: {error}",
                hint="check --oidc-issuer, and that this host reaches it",
            ) from error

    def verify(self, token: str) -> Principal | None:
        """The token's subject, or None for a token that does not verify (or is out of its time)."""
        try:
            key = self.keys.get_signing_key_from_jwt(token)
            claims = jwt.decode(
                token,
                key,
                algorithms=list(_ALGORITHMS),
                audience=self.audience,
                issuer=self.issuer,
                leeway=_CLOCK_LEEWAY_S,
                options={"verify_aud": self.audience is not None, "require": ["exp", "iat", "sub"]},
            )
        except jwt.PyJWTError:
            return None
        return Principal(f"oidc:{claims['sub']}")


@dataclass(frozen=True)
class Authenticator:
    """Decides on an `Authorization` header. With neither keys nor an issuer, everybody may call."""

    keys: dict[str, bytes] = field(default_factory=dict)
    """Name → SHA-256 of the key."""
    oidc: Oidc | None = None

    @property
    def required(self) -> bool:
        return bool(self.keys) or self.oidc is not None

    def identify(self, authorization: str | None) -> Principal | None:
        """The caller, or None when the header names nobody. Blocks on the network for a new OIDC key."""
        if not self.required:
            return Principal("anonymous")
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return None
        digest = hashlib.sha256(token.strip().encode()).digest()
        # Every key is compared, so that the time taken does not tell which one matched.
        matches = [name for name, known in self.keys.items() if hmac.compare_digest(digest, known)]
        if matches:
            return Principal(f"key:{matches[0]}")
        return self.oidc.verify(token.strip()) if self.oidc else None


def read_keys(path: Path) -> dict[str, bytes]:
    """Keys of a file: one `name:key` or bare `key` a line, `#` starts a comment.

    Raises UsageError `api-keys-unreadable` when there is no key in it.
    """
    try:
        lines = [line.split("#", 1)[0].strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "api-keys-unreadable", f"cannot read the API keys in {path}", why=str(error)
        ) from error
    keys = {}
    for number, line in enumerate((line for line in lines if line), 1):
        name, _, key = line.rpartition(":")
        name = name.strip() or f"key-{number}"
        if not key.strip() or name in keys:
            raise UsageError(
                "api-keys-unreadable",
                f"{path}: entry {number} cannot be used",
                why=f"the name {name!r} occurs twice" if name in keys else f"{name!r} has no key",
                hint="one `name:key` a line, with a name of its own for each key",
            )
        keys[name] = hashlib.sha256(key.strip().encode()).digest()
    if not keys:
        raise UsageError(
            "api-keys-unreadable",
            f"{path} holds no API key",
            why="expected one `name:key` or `key` a line",
            hint=f"python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > {path}",
        )
    return keys


def check_bind(host: str, auth: Authenticator, *, allow_unauthenticated: bool) -> None:
    """Refuse to listen beyond this machine without authentication. Raises UsageError `open-bind`."""
    if auth.required or allow_unauthenticated or _is_loopback(host):
        return
    raise UsageError(
        "open-bind",
        f"refusing to listen on {host} without authentication",
        why="anyone who reaches this address could use the model",
        hint="--api-key-file FILE or --oidc-issuer URL; behind a proxy that checks: --allow-unauthenticated",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
