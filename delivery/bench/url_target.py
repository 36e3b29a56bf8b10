"""Any server with the OpenAI completions API as a target: ours, vLLM, LMDeploy, SGLang, TGI.

Bytes are stamped when they arrive and parsed when the run is over, so that parsing one answer never
delays the stamp of another.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from delivery.bench.event_stream import read_stream, shown
from delivery.bench.http_stream import Client, HttpError
from delivery.bench.load import Progress
from delivery.bench.recorder import Recorder
from delivery.errors import DataError, EnvironmentLacking, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from delivery.bench.plan import LoadPlan, PlannedRequest
    from delivery.gate.record import RequestRecord

_SPIN_S = 0.002
"""An event loop wakes up to a millisecond late; the rest of a wait is spent looking at the clock."""

_READY_POLL_S = 0.5


class UrlTarget:
    """Streams completions from `url` (with or without `/v1`).

    model: name to ask for; None for the first one that the server lists. prompts: "text" sends common
    words, "tokens" token ids below `vocab_size` (vLLM, SGLang and our own server take them).
    Raises UsageError `url-invalid`.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        prompts: Literal["text", "tokens"] = "text",
        vocab_size: int = 30_000,
        timeout_s: float = 600.0,
        client: Callable[..., Any] = Client,
    ) -> None:
        self._base = _checked(url).rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model
        self._prompts = prompts
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._client = client

    def run(self, load: LoadPlan, progress: Callable[[Progress], None] | None = None) -> list[RequestRecord]:
        """Send every request when it is due.

        Raises EnvironmentLacking `server-unreachable`, DataError `server-refused`.
        """
        return asyncio.run(self.run_async(load, progress))

    def owner(self) -> str:
        """What serves, as the server's list of models says (`owned_by`): vllm, sglang, lmdeploy, deliver …"""

        async def ask() -> str:
            client = self._client(base=self._base, headers=self._headers, timeout_s=self._timeout_s)
            try:
                return str((await self._first_listed(client)).get("owned_by") or "unknown").lower()
            finally:
                await client.close()

        return asyncio.run(ask())

    def wait_until_ready(self, note: Callable[[str], None] | None = None) -> None:
        """Ask for one token until the server has loaded its model; 503 means that it has not yet.

        note: called once when waiting begins. Raises EnvironmentLacking
        `server-unreachable`, DataError `server-refused` with the server's words.
        """

        async def wait() -> None:
            client = self._client(base=self._base, headers=self._headers, timeout_s=self._timeout_s)
            try:
                await self._wait_until_ready(client, note)
            finally:
                await client.close()

        asyncio.run(wait())

    async def _wait_until_ready(self, client: Any, note: Callable[[str], None] | None) -> None:
        asked = {"model": self._model or await self.first_model(client), "prompt": "a", "max_tokens": 1}
        clock = asyncio.get_running_loop().time
        until = clock() + self._timeout_s
        while True:
            try:
                status, pieces = await client.request("POST", "/v1/completions", json.dumps(asked).encode())
                words = shown(b"".join([data async for _, data in pieces])[:300])
            except HttpError as error:
                raise self._unreachable(error) from error
            if status == 200:
                return
            if status != 503 or clock() > until:
                raise DataError(
                    "server-refused",
                    f"{self._base} does not answer a completion of one token",
                    why=f"status {status}: {words}",
                    hint="401: an API key is needed; 404: wrong model name; otherwise see the server's log",
                )
            if note:
                note(f"waiting until {self._base} is ready: {words}")
                note = None
            await asyncio.sleep(_READY_POLL_S)

    async def run_async(
        self, load: LoadPlan, progress: Callable[[Progress], None] | None = None
    ) -> list[RequestRecord]:
        """As `run`, on the running event loop and its clock."""
        client = self._client(base=self._base, headers=self._headers, timeout_s=self._timeout_s)
        try:
            model = self._model or await self.first_model(client)
            return await _Run(self, client, model, load, progress).records()
        finally:
            await client.close()

    async def first_model(self, client: Any) -> str:
        """The first name in `/v1/models`."""
        return str((await self._first_listed(client))["id"])

    async def _first_listed(self, client: Any) -> dict[str, Any]:
        try:
            status, pieces = await client.request("GET", "/v1/models")
            body = b"".join([data async for _, data in pieces])
        except HttpError as error:
            raise self._unreachable(error) from error
        try:
            first: dict[str, Any] = json.loads(body)["data"][0]
            first["id"] = str(first["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise DataError(
                "server-refused",
                f"{self._base}/v1/models lists no model",
                why=f"status {status}: {body[:200]!r}",
                hint="is the URL that of an OpenAI-compatible server? does it ask for an API key?",
            ) from error
        return first

    def _unreachable(self, error: HttpError) -> EnvironmentLacking:
        return EnvironmentLacking(
            "server-unreachable",
            f"{self._base} cannot be reached",
            why=str(error),
            hint="start the server, or correct the URL",
        )

    def body(self, request: PlannedRequest, model: str) -> bytes:
        """The JSON of one request: greedy, streaming, and exactly as many tokens as planned."""
        prompt = request.text() if self._prompts == "text" else request.token_ids(self._vocab_size)
        asked = {
            "model": model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(asked).encode()


def _checked(url: str) -> str:
    """The URL of a server. Raises UsageError `url-invalid`, without repeating credentials."""
    try:
        parts = urlsplit(url)
        host, secret, _ = parts.hostname, parts.username or parts.password, parts.port
    except ValueError as error:
        raise UsageError("url-invalid", "the server's URL cannot be read", why=str(error)) from error
    if secret:
        raise UsageError(
            "url-invalid",
            "the server's URL contains credentials",
            why="URLs are written into reports and releases",
            hint="take them out of the URL; bench and chat read a key with --api-key-file",
        )
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError("url-invalid", f"{url!r} names no server", hint="http://HOST:PORT")
    return url


class _Run:
    """One plan on one event loop."""

    def __init__(
        self,
        target: UrlTarget,
        client: Any,
        model: str,
        load: LoadPlan,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._client, self._load = client, load
        self._progress = progress
        self._clock = asyncio.get_running_loop().time
        self._recorders: dict[str, Recorder] = {}
        self._answers: dict[str, list[tuple[float, bytes]]] = {}
        # Written before the clock starts: long prompts take time to write.
        self._bodies = {r.id: target.body(r, model) for r in load.requests}
        self._start = 0.0
        self._done = 0

    async def records(self) -> list[RequestRecord]:
        self._start = self._clock()
        if self._load.concurrency:
            queue = iter(self._load.requests)
            await asyncio.gather(*(self._worker(queue) for _ in range(self._load.concurrency)))
        else:
            async with asyncio.TaskGroup() as group:
                for request in self._load.requests:
                    due = self._start + (request.due_s or 0.0)
                    self._client.prepare()
                    await self._until(due)
                    group.create_task(self._ask(request, due))
        for name, pieces in self._answers.items():
            read_stream(pieces, self._recorders[name], self._start)
        return [self._recorders[r.id].record() for r in self._load.requests]

    async def _worker(self, queue: Any) -> None:
        for request in queue:
            await self._ask(request, self._clock())

    async def _until(self, due: float) -> None:
        if (rest := due - self._clock() - _SPIN_S) > 0:
            await asyncio.sleep(rest)
        while self._clock() < due:
            await asyncio.sleep(0)

    async def _ask(self, request: PlannedRequest, due: float) -> None:
        recorder = Recorder(request.id, due - self._start, prompt_tokens=request.prompt_tokens)
        self._recorders[request.id] = recorder
        pieces: list[tuple[float, bytes]] = []
        recorder.sent_s = self._clock() - self._start
        try:
            status, stream = await self._client.request("POST", "/v1/completions", self._bodies[request.id])
            async for piece in stream:
                pieces.append(piece)
            if status != 200:
                recorder.error = f"status {status}: {shown(b''.join(d for _, d in pieces)[:200])}"
            else:
                self._answers[request.id] = pieces
        except (HttpError, TimeoutError) as error:
            recorder.error = str(error) or type(error).__name__
        self._done += 1
        if self._progress:
            failed = sum(r.error is not None for r in self._recorders.values())
            elapsed_s = self._clock() - self._start
            self._progress(Progress(self._done, len(self._load.requests), failed, elapsed_s))
