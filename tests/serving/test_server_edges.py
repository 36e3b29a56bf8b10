"""A real server at its edges: null fields, values that contradict each other, clients that leave early."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from test_server import KEY, Server, start

from delivery.serving import metric_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One request runs at a time, so that a second one waits."""
    running = start(tiny_checkpoint, tmp_path_factory.mktemp("edges"), "--max-num-seqs", "1")
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(30) == 0


def complete(server: Server, path: str = "/v1/completions", **changes: Any) -> tuple[int, dict[str, Any]]:
    body = {"prompt": "hello", "max_tokens": 3, "temperature": 0} | changes
    if "chat" in path:
        body |= {"messages": [{"role": "user", "content": "hi"}]} | changes
        del body["prompt"]
    reply = server.post(path, json.dumps(body).encode())
    return reply.status_code, reply.json()


NULLABLE = ["stream", "n", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty"]
NULLABLE += ["seed", "stop", "logit_bias", "user", "logprobs", "stream_options"]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/v1/completions", [*NULLABLE, "echo", "best_of", "suffix"]),
        ("/v1/chat/completions", [*NULLABLE, "tools", "tool_choice", "top_logprobs", "response_format"]),
    ],
)
def test_null_is_the_default_of_every_optional_field(server: Server, path: str, names: list[str]) -> None:
    status, reply = complete(server, path, **(dict.fromkeys(names) | {"stop_token_ids": list(range(259))}))
    assert status == 200, reply


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"nonsense": None}, "nonsense"),
        ({"logit_bias": {"65": 101}}, "logit_bias.65"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a.[key]"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": ""}, None),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a"] * 1026}, None),
        ({"stop": ["x"] * 17}, "stop"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Server, changes: dict[str, Any], param: str | None
) -> None:
    status, reply = complete(server, **changes)
    assert (status, reply["error"]["param"]) == (400, param)
    assert reply["error"]["message"][0] not in ":V"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
        ({"prompt": ["a"] * 1026}, "1026 outputs were asked for, this server takes 1025"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens is 5: expected from 0 to max_tokens"),
        ({"stop_token_ids": [10**9], "min_tokens": 1}, "token id 1000000000 is outside the vocabulary"),
        ({"logit_bias": {"400": 1}}, "token id 400 is outside the vocabulary"),
        ({"echo": True, "logprobs": 1}, "echo cannot be combined with logprobs"),
    ],
)
def test_values_that_cannot_work_are_a_400_and_the_engine_lives_on(
    server: Server, changes: dict[str, Any], said: str
) -> None:
    status, reply = complete(server, **changes)
    assert status == 400
    assert said in reply["error"]["message"]
    assert complete(server)[0] == 200


def test_a_bias_moves_the_choice(server: Server) -> None:
    client = server.client()
    reply = client.completions.create(
        model="tiny", prompt="hello", max_tokens=3, temperature=0, logit_bias={"65": 100}
    )
    assert reply.usage is not None
    free = client.completions.create(model="tiny", prompt="hello", max_tokens=3, temperature=0)
    assert reply.choices[0].text != free.choices[0].text
    assert len(set(reply.choices[0].text)) == 1


def test_completions_end_after_sixteen_tokens_unless_told(server: Server) -> None:
    _, reply = complete(server, max_tokens=None, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 16
    _, reply = complete(server, max_tokens=None, min_tokens=20, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 20
    _, reply = complete(server, max_tokens=None, prompt="x" * 505, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 7


def test_streamed_offsets_go_on_from_chunk_to_chunk(server: Server) -> None:
    client = server.client()
    wanted: dict[str, Any] = {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": 6,
        "temperature": 1,
        "seed": 3,
        "logprobs": 1,
    }
    whole = client.completions.create(**wanted).choices[0].logprobs
    pieces = [c.choices[0].logprobs for c in client.completions.create(**wanted, stream=True)]
    assert whole is not None
    assert [o for piece in pieces if piece for o in piece.text_offset or []] == whole.text_offset
    assert whole.text_offset
    assert whole.text_offset[-1] > 0


def test_a_stream_says_null_until_it_knows_its_usage(server: Server) -> None:
    body = b'{"prompt": "hi", "max_tokens": 3, "stream": true, "stream_options": {"include_usage": true}}'
    lines = server.post("/v1/completions", body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["prompt_tokens"] == 2
    assert chunks[-1]["choices"] == []


def test_a_refused_part_of_a_message_is_named(server: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    status, reply = complete(server, "/v1/chat/completions", messages=[{"role": "user", "content": [part]}])
    assert (status, reply["error"]["param"]) == (400, "messages.0.content.0.type")
    assert "should be 'text'" in reply["error"]["message"]


def test_a_model_of_an_organisation_is_looked_up(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="'org/model' is not served here"):
        server.client().models.retrieve("org/model")
    assert server.client().models.retrieve("tiny").id == "tiny"


def test_a_wrong_method_names_the_right_one(server: Server) -> None:
    reply = server.post("/v1/models", b"")
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_message_without_content_is_refused(server: Server, role: str) -> None:
    with pytest.raises(openai.BadRequestError, match="needs content"):
        server.client().chat.completions.create(model="tiny", messages=[{"role": role}])  # type: ignore[misc, list-item]


def send(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer is not read."""
    content = json.dumps({"ignore_eos": True, "temperature": 0, "stream": True} | body).encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    link = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
    link.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return link


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("kind", ["completion", "chat", "chat with tools"])
def test_a_stream_whose_client_leaves_before_the_first_token_is_dropped(server: Server, kind: str) -> None:
    def count(name: str) -> float:
        return server.total(f"deliver_requests_{name}")

    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
    body = {
        "completion": {"prompt": "hello", "max_tokens": 40},
        "chat": chat,
        "chat with tools": {**chat, "tools": [tool]},
    }[kind]
    path = "/v1/completions" if kind == "completion" else "/v1/chat/completions"
    # Long requests hold the engine's only place while the other one waits and its client leaves.
    holding = [send(server, "/v1/completions", {"prompt": "hold", "max_tokens": 500}) for _ in range(12)]
    try:
        assert eventually(lambda: count("running") == 1 and count("waiting") == 11)
        cancelled = count("cancelled_total")
        leaving = send(server, path, body)
        assert eventually(lambda: count("waiting") >= 11)
        time.sleep(0.3)
        leaving.close()
        assert eventually(lambda: count("cancelled_total") == cancelled + 1)
        assert count("waiting") > 0
    finally:
        for link in holding:
            link.close()
    assert eventually(lambda: count("running") == 0 and count("waiting") == 0)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    running = start(tiny_checkpoint, tmp_path, "--log-file", str(log), "--drain-timeout", "0.2")
    host, _, port = running.url.removeprefix("http://").partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection((host, int(port))) as link:
        link.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"prompt":'.encode())
        time.sleep(0.2)
    refused = f'{metric_names.REQUESTS_REFUSED_TOTAL}{{code="client_closed_request",model="tiny"}}'
    assert eventually(lambda: running.metrics().get(refused) == 1)
    # Requests that outlast the drain end with an error, and the server with them.
    with send(running, "/v1/completions", {"prompt": "x", "max_tokens": 500, "n": 16}) as link:
        assert eventually(lambda: running.total(metric_names.REQUESTS_RUNNING) == 16)
        running.process.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: link.recv(65536), b""))
    assert b"server_stopped" in answer
    assert running.process.wait(20) == 0
    assert "Traceback" not in log.read_text()
