"""How accurately `deliver bench` measures: a server with known delays, asked 50 times a second.

    python benchmarks/bench_accuracy.py [--rate 50] [--seconds 10]

The server runs in a process of its own. It answers after a known delay and then sends a token at a time;
what it really did (its own event loop is late, too) travels in the tokens' text, on the clock that all
processes of a machine share.

The error of a TTFT is the sum of three parts, shown apart: the sender's delay, the way to the server (with
the server's own awakening, which is not the load generator's) and the way back. "machine" says how late the
server woke from its sleeps: where that is milliseconds, the machine is busy and the table says little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from delivery.bench.http_stream import Client
from delivery.bench.load import run_load
from delivery.bench.plan import plan
from delivery.bench.url_target import UrlTarget
from delivery.bench.workload import parse_workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from multiprocessing.connection import Connection

FIRST_S, EACH_S, TOKENS = 0.040, 0.010, 16


def serve(pipe: Connection) -> None:
    """A server for one benchmark: `/v1/models` and streaming completions with the delays above."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                came = time.monotonic()
                size = int(head.lower().partition("content-length: ")[2].split("\r")[0])
                body = await reader.readexactly(size)
                if head.startswith("GET"):
                    listed = b'{"data": [{"id": "clockwork"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(listed) + listed)
                    continue
                await answer(writer, came, json.loads(body)["max_tokens"])
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(writer: asyncio.StreamWriter, came: float, tokens: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(tokens):
            await asyncio.sleep(max(0.0, came + FIRST_S + number * EACH_S - time.monotonic()))
            end = "length" if number == tokens - 1 else None
            text = f"{came:.6f},{time.monotonic():.6f};"
            chunk(writer, {"choices": [{"text": text, "finish_reason": end}]})
        chunk(writer, {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": tokens}})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    def chunk(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n")

    async def main() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=512)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


@dataclass(frozen=True)
class Errors:
    """Milliseconds that a measured time lies over the true one."""

    name: str
    median: float
    p95: float
    worst: float

    @classmethod
    def of(cls, name: str, values: list[float]) -> Errors:
        array = np.asarray(values)
        return cls(name, float(np.median(array)), float(np.percentile(array, 95)), float(array.max()))


class Keeping(Client):
    """The client, keeping when each request was sent and what came when."""

    async def request(self, *args: Any, **kwargs: Any) -> Any:
        sent = time.monotonic()
        status, pieces = await super().request(*args, **kwargs)
        kept = [piece async for piece in pieces]
        KEPT.append((sent, kept))
        return status, _again(kept)


async def _again(pieces: list[tuple[float, bytes]]) -> AsyncIterator[tuple[float, bytes]]:
    for piece in pieces:
        yield piece


KEPT: list[tuple[float, list[tuple[float, bytes]]]] = []
"""Per answer: when it was asked for, and (time of arrival, bytes); the clock is `time.monotonic`."""


def measure(rate: float, seconds: float) -> tuple[list[Errors], int]:
    """Errors of TTFT, TPOT and of the sender, and the number of requests."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()
    data = {
        "requests": int(rate * seconds),
        "shape": {"prompt_tokens": 8, "output_tokens": TOKENS},
        "arrival": {"kind": "poisson", "rate": rate},
    }
    try:
        target = UrlTarget(f"http://127.0.0.1:{port}", client=Keeping)
        target.run(plan(parse_workload({**data, "requests": 20})))
        KEPT.clear()
        records = run_load(target, parse_workload(data), warm=False)
    finally:
        server.terminate()
        server.join()
    return _errors(records), len(records)


def _errors(records: list[Any]) -> list[Errors]:
    answers = []
    for asked, pieces in KEPT:
        body = b"".join(data for _, data in pieces)
        if body.startswith(b"data: "):
            events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
            marks = [c["text"].strip(";").split(",") for e in events for c in e["choices"] if c.get("text")]
            answers.append((asked, pieces[0][0], float(marks[0][0]), [float(sent) for _, sent in marks]))
    answers.sort()
    names = ("TTFT", "TPOT", "sender", "way there", "way back", "machine")
    values: dict[str, list[float]] = {name: [] for name in names}
    for record, (asked, first, came, sent) in zip(
        sorted(records, key=lambda r: r.sent_s), answers, strict=True
    ):
        true_ttft_s, true_tpot_s = sent[0] - came, (sent[-1] - sent[0]) / (len(sent) - 1)
        values["TTFT"].append(record.ttft_ms - true_ttft_s * 1e3)
        values["TPOT"].append(record.tpot_ms - true_tpot_s * 1e3)
        values["sender"].append(record.schedule_delay_ms)
        values["way there"].append((came - asked) * 1e3)
        values["way back"].append((first - sent[0]) * 1e3)
        values["machine"].append((true_ttft_s - FIRST_S) * 1e3)
    return [Errors.of(name, values[name]) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    errors, count = measure(options.rate, options.seconds)
    print(f"{count} requests at {options.rate:g}/s, {TOKENS} tokens each; errors in ms")
    print(f"{'':<10}{'median':>10}{'P95':>10}{'worst':>10}")
    for e in errors:
        print(f"{e.name:<10}{e.median:>10.3f}{e.p95:>10.3f}{e.worst:>10.3f}")


if __name__ == "__main__":
    main()
