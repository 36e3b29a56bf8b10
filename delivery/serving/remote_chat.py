"""A conversation with a server that speaks the OpenAI API, for the terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import requests

from delivery.errors import DataError, EnvironmentLacking

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT_S = (5.0, 300.0)


class RemoteChat:
    """Streams answers from `url`, which may or may not end in `/v1`."""

    def __init__(self, url: str, api_key: str | None, max_tokens: int, temperature: float) -> None:
        base = url.rstrip("/")
        self._url = base if base.endswith("/v1") else f"{base}/v1"
        self._session = requests.Session()
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"
        self._options = {"max_tokens": max_tokens, "temperature": temperature, "stream": True}
        self._model: str | None = None

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The answer to the last message, in pieces as they arrive.

        Raises EnvironmentLacking `server-unreachable`, DataError `server-refused`.
        """
        try:
            self._model = self._model or self._first_model()
            body = {"model": self._model, "messages": messages, **self._options}
            with self._session.post(
                f"{self._url}/chat/completions", json=body, stream=True, timeout=_TIMEOUT_S
            ) as reply:
                self._check(reply)
                for line in reply.iter_lines():
                    if not line.startswith(b"data: ") or line == b"data: [DONE]":
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise DataError("server-refused", chunk["error"]["message"])
                    for choice in chunk["choices"]:
                        yield choice["delta"].get("content") or ""
        except requests.RequestException as error:
            raise EnvironmentLacking(
                "server-unreachable", f"no answer from {self._url}", why=str(error), hint="deliver serve REF"
            ) from error

    def _first_model(self) -> str:
        reply = self._session.get(f"{self._url}/models", timeout=_TIMEOUT_S)
        self._check(reply)
        return str(reply.json()["data"][0]["id"])

    def _check(self, reply: requests.Response) -> None:
        if not reply.ok:
            raise DataError(
                "server-refused", f"{self._url} answered {reply.status_code}", why=reply.text[:500]
            )
