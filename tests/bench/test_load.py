"""The load generator's arithmetic, under a clock that only moves when it is told to."""

import asyncio
import json
import selectors

import pytest

from delivery.bench import EngineTarget, UrlTarget, run_load
from delivery.bench.event_stream import read_stream, shown
from delivery.bench.http_stream import HttpError
from delivery.bench.plan import plan
from delivery.bench.recorder import Recorder
from delivery.bench.workload import parse_workload
from delivery.engine.outputs import RequestOutput
from delivery.errors import DataError, EnvironmentLacking, UsageError


def workload(requests=6, *, out=4, warmup=0, **arrival):
    return parse_workload(
        {
            "requests": requests,
            "warmup": warmup,
            "shape": {"prompt_tokens": 3, "output_tokens": out},
            "arrival": arrival or {"concurrency": 2},
        }
    )


class FakeEngine:
    """Every step takes 10 ms of the fake clock and gives each request one token."""

    def __init__(self, slots=99, refuse=()):
        self.now, self.requests, self.slots, self.refuse = 0.0, {}, slots, refuse
        self.prompts = []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def add_request(self, request):
        if request.request_id in self.refuse:
            raise UsageError("request-too-long", "the request does not fit")
        assert request.sampling.ignore_eos
        self.prompts.append(tuple(request.prompt_token_ids))
        self.requests[request.request_id] = request.sampling.max_tokens

    def step(self):
        self.now += 0.010
        out = []
        for name in list(self.requests)[: self.slots]:
            self.requests[name] -= 1
            done = self.requests[name] == 0
            if done:
                del self.requests[name]
            out.append(RequestOutput(name, [7], "x", "length" if done else None))
        return out


def drive(engine, load, progress=None):
    return EngineTarget(engine, 1000, clock=engine.clock, sleep=engine.sleep).run(plan(load), progress)


def test_a_closed_loop_keeps_its_concurrency_and_sends_at_once():
    seen = []
    records = drive(FakeEngine(), workload(6, concurrency=2), seen.append)
    starts = [round(r.scheduled_s, 6) for r in records]
    assert starts == [0.0, 0.0, 0.04, 0.04, 0.08, 0.08]
    assert all(r.sent_s == r.scheduled_s for r in records)
    assert {round(r.ttft_ms, 6) for r in records} == {10.0}
    assert {round(r.e2e_ms, 6) for r in records} == {40.0}
    assert {round(r.tpot_ms, 6) for r in records} == {10.0}
    assert {r.output_tokens for r in records} == {4}
    assert [p.done for p in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1].total == 6


def test_an_open_loop_counts_waiting_from_the_scheduled_arrival():
    """One slot, 40 ms of service, an arrival every 20 ms: the queue grows and every wait is counted."""
    records = drive(FakeEngine(slots=1), workload(4, kind="constant", rate=50.0))
    assert [round(r.scheduled_s, 6) for r in records] == [0.0, 0.02, 0.04, 0.06]
    assert [round(r.e2e_ms) for r in records] == [40, 60, 80, 100]


def test_an_idle_engine_waits_for_the_next_arrival():
    records = drive(FakeEngine(), workload(3, out=1, kind="constant", rate=1.0))
    assert [round(r.scheduled_s) for r in records] == [0, 1, 2]
    assert {round(r.e2e_ms, 6) for r in records} == {10.0}


def test_a_refused_request_is_an_error_and_the_rest_goes_on():
    records = drive(FakeEngine(refuse={"r1"}), workload(3, concurrency=1))
    assert [r.error for r in records] == [None, "the request does not fit", None]
    assert records[1].first_token_s is None


def test_warm_up_requests_are_not_recorded_and_use_other_prompts():
    engine = FakeEngine()
    target = EngineTarget(engine, 1000, clock=engine.clock, sleep=engine.sleep)
    records = run_load(target, workload(4, warmup=2, concurrency=2))
    assert [r.id for r in records] == ["r0", "r1", "r2", "r3"]
    assert len(engine.prompts) == 6
    assert len(set(engine.prompts)) == 6


class FakeSelector(selectors.DefaultSelector):
    """A selector that never waits: it moves the loop's clock by what it was asked to wait."""

    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        if timeout == 0:
            self.now += 1e-5  # looking at the clock takes time, or a wait that spins would never end
        return super().select(0)


class FakeClient:
    """A server without a network: first token after 50 ms, then one every 20 ms."""

    def __init__(self, base, headers, timeout_s):
        self.headers = headers
        self.bodies = []
        FakeClient.last = self

    async def request(self, method, path, body=b""):
        if path == "/v1/models":
            return 200, self.listed()
        asked = json.loads(body)
        self.bodies.append(asked)
        if len(self.bodies) == self.fail_at:
            raise HttpError("connection reset")
        return 200, self.stream(asked["max_tokens"])

    fail_at = 0

    def prepare(self):
        pass

    async def listed(self):
        yield 0.0, b'{"data": [{"id": "tiny"}]}'

    async def stream(self, tokens):
        loop = asyncio.get_running_loop()
        yield loop.time(), event({"choices": [{"text": ""}]})
        for i in range(tokens):
            await asyncio.sleep(0.02 if i else 0.05)
            ends = "length" if i == tokens - 1 else None
            yield loop.time(), event({"choices": [{"text": "a", "finish_reason": ends}]})
        usage = {"prompt_tokens": 3, "completion_tokens": tokens}
        yield loop.time(), event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"

    async def close(self):
        pass


def event(data):
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def drive_url(load, client=FakeClient):
    selector = FakeSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    try:
        target = UrlTarget("http://x/v1", api_key="secret", client=client)
        return loop.run_until_complete(target.run_async(plan(load)))
    finally:
        loop.close()


def test_a_url_in_a_closed_loop():
    records = drive_url(workload(4, concurrency=2))
    assert [round(r.scheduled_s, 3) for r in records] == [0.0, 0.0, 0.11, 0.11]
    for record in records:
        assert record.ttft_ms == pytest.approx(50, abs=0.5)
        assert record.tpot_ms == pytest.approx(20, abs=0.5)
        assert record.output_tokens == 4
    asked = FakeClient.last.bodies[0]
    assert asked["model"] == "tiny"
    assert asked["ignore_eos"] is True
    assert FakeClient.last.headers == {"Authorization": "Bearer secret"}


def test_a_url_in_an_open_loop_is_asked_on_time():
    records = drive_url(workload(20, kind="poisson", rate=40.0))
    assert [r.scheduled_s for r in records] == pytest.approx(
        [r.due_s for r in plan(workload(20, kind="poisson", rate=40.0)).requests]
    )
    assert max(r.schedule_delay_ms for r in records) < 0.5
    assert [r.ttft_ms for r in records] == pytest.approx([50.0] * 20, abs=1.0)


def test_a_request_that_breaks_is_an_error_in_its_record():
    class Flaky(FakeClient):
        fail_at = 2

    records = drive_url(workload(3, concurrency=1), Flaky)
    assert [r.error for r in records] == [None, "connection reset", None]


def test_a_servers_words_are_one_line_that_moves_no_cursor():
    assert shown(b"no \x1b[2J\r\nroom\xff\n") == "no  [2J  room\ufffd"


def stamped(*pieces):
    recorder = Recorder("r", 0.0)
    read_stream([(i + 1.0, p) for i, p in enumerate(pieces)], recorder, 0.0)
    return recorder


def test_a_stream_is_read_across_pieces_and_text_that_is_empty_is_no_token():
    whole = event({"choices": [{"text": "héllo"}]}) + event(
        {"choices": [{"text": "", "finish_reason": "stop"}]}
    )
    got = stamped(event({"choices": [{"text": ""}]}), whole[:9], whole[9:])
    assert got.token_times_s == [3.0]
    assert got.finish_reason == "stop"
    assert got.error is None
    chat = stamped(event({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}))
    assert chat.output_tokens == 1


@pytest.mark.parametrize(
    ("piece", "error"),
    [
        (b"data: {oops\n", "not JSON"),
        (b"data: 5\n", "no completion in the stream: b'5'"),
        (b"data: [1]\n", "no completion"),
        (b'data: {"choices": [5]}\n', "no completion"),
        (b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": "many"}}\n', "no completion"),
        (b'data: {"error": "\\u001b[2Jgone \\ud83d"}\n', "[2Jgone"),
        (event({"error": {"message": "out of memory"}}), "out of memory"),
        (event({"choices": [{"text": "a"}]}), "without a finish reason"),
    ],
)
def test_a_stream_that_went_wrong_is_an_error(piece, error):
    assert error in stamped(piece).error


def test_a_request_without_tokens_is_an_error():
    assert stamped(event({"choices": [{"text": "", "finish_reason": "stop"}]})).record().error


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://", "names no server"),
        ("ftp://host", "names no server"),
        ("http://host:port", "cannot be read"),
        ("http://ann:secret@host:8000/v1", "contains credentials"),
    ],
)
def test_a_url_that_is_none_or_holds_a_secret_is_refused(url, told):
    with pytest.raises(UsageError, match=told) as caught:
        UrlTarget(url)
    assert "secret" not in caught.value.render()


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(EnvironmentLacking, match=r"127\.0\.0\.1:9 cannot be reached"):
        UrlTarget("http://127.0.0.1:9").run(plan(workload(1)))
    with pytest.raises(EnvironmentLacking, match=r"a\.\.b cannot be reached"):
        UrlTarget("http://a..b").run(plan(workload(1)))


@pytest.fixture
def raw_server():
    """A real socket that answers with prepared bytes and counts connections."""

    def run(answers, client_work):
        async def main():
            seen = []

            async def handle(reader, writer):
                seen.append(writer)
                try:
                    while True:
                        head = await reader.readuntil(b"\r\n\r\n")
                        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
                        await reader.readexactly(size)
                        if not answers:
                            return
                        answer = answers.pop(0)
                        writer.write(answer)
                        await writer.drain()
                        if b"Connection: close" in answer:
                            return
                except asyncio.IncompleteReadError:
                    pass
                finally:
                    writer.close()

            server = await asyncio.start_server(handle, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            try:
                return await client_work(f"http://127.0.0.1:{port}"), len(seen)
            finally:
                server.close()
                await server.wait_closed()

        return asyncio.run(main())

    return run


def ok(body, *headers):
    head = "\r\n".join(["HTTP/1.1 200 OK", *headers]) + "\r\n\r\n"
    return head.encode() + body


def chunked(body, size=7):
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in parts) + b"0\r\n\r\n"


def test_over_a_real_socket_connections_are_kept(raw_server):
    stream = event({"choices": [{"text": "a", "finish_reason": "length"}]}) + event(
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}
    )
    answers = [
        ok(b'{"data": [{"id": "m"}]}', "Content-Length: 23"),
        ok(chunked(stream), "Transfer-Encoding: chunked"),
        ok(stream, f"Content-Length: {len(stream)}"),
        b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy",
    ]
    records, connections = raw_server(
        answers, lambda url: UrlTarget(url).run_async(plan(workload(3, concurrency=1)))
    )
    assert connections == 1
    assert [r.prompt_tokens for r in records] == [9, 9, 3]
    assert [r.output_tokens for r in records][:2] == [4, 4]
    assert records[2].error == "status 429: busy"


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        ok(b"zz\r\n", "Transfer-Encoding: chunked"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nConnection: close\r\n\r\nshort",
    ],
)
def test_an_answer_that_is_not_http_is_an_error_of_that_request(raw_server, answer):
    records, _ = raw_server(
        [answer], lambda url: UrlTarget(url, model="m").run_async(plan(workload(1, concurrency=1)))
    )
    assert records[0].error


def test_a_server_that_loads_is_waited_for_and_one_that_refuses_is_not(raw_server):
    models = ok(b'{"data": [{"id": "m"}]}', "Content-Length: 23")
    loading = b"HTTP/1.1 503 Busy\r\nContent-Length: 7\r\n\r\nloading"
    notes = []
    rest = [models, loading, loading, ok(b"{}", "Content-Length: 2")]
    raw_server(rest, lambda url: asyncio.to_thread(UrlTarget(url).wait_until_ready, notes.append))
    assert not rest
    assert [n.partition(": ")[2] for n in notes] == ["loading"]
    refused = b"HTTP/1.1 404 Not\r\nContent-Length: 8\r\n\r\nno model"
    with pytest.raises(DataError, match="one token") as caught:
        raw_server([refused], lambda url: asyncio.to_thread(UrlTarget(url, model="x").wait_until_ready))
    assert "status 404: no model" in (caught.value.why or "")


def test_a_server_without_models_is_refused(raw_server):
    with pytest.raises(DataError, match="lists no model"):
        raw_server([ok(b"{}", "Content-Length: 2")], lambda url: UrlTarget(url).run_async(plan(workload(1))))
