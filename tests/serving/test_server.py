"""A real server: the HTTP process, the engine process, and OpenAI's own client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from delivery.serving import metric_names

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "test-key"
DELIVER = str(Path(sys.executable).with_name("deliver"))


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, content: bytes, **headers: str) -> httpx.Response:
        return httpx.post(
            self.url + path, content=content, headers={"Authorization": f"Bearer {KEY}"} | headers, timeout=30
        )

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics").text
        rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

    def total(self, name: str) -> float:
        return sum(value for row, value in self.metrics().items() if re.match(rf"{name}\{{", row))


def start(checkpoint: Path, folder: Path, *options: str) -> Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = folder / "keys"
    keys.write_text(f"tester:{KEY}\n")
    command = [DELIVER, "serve", str(checkpoint), "--port", str(port)]
    command += ["--api-key-file", str(keys), "--model-name", "tiny", "--device", "cpu", *options]
    process = subprocess.Popen(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"})
    server = Server(f"http://127.0.0.1:{port}", process)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{server.url}/ready").status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    process.kill()
    raise RuntimeError(f"the server did not become ready; exit code {process.wait()}")


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(tiny_checkpoint, tmp_path_factory.mktemp("serve"))
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(30) == 0


def test_a_chat_answer_and_its_stream_agree(server: Server) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello, 世界"}],
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = server.client().chat.completions.create(**request)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    stream = server.client().chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_completions_take_texts_and_token_ids(server: Server) -> None:
    client = server.client()
    texts = client.completions.create(
        model="tiny", prompt=["abc", "xyz"], max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [c.index for c in texts.choices] == [0, 1]
    # One token a byte, in the byte-level alphabet's order: "abc" are neighbours.
    alone = client.completions.create(
        model="tiny", prompt="xyz", max_tokens=4, temperature=0, echo=True, extra_body={"ignore_eos": True}
    )
    assert alone.choices[0].text == "xyz" + texts.choices[1].text


def test_seeds_and_choices(server: Server) -> None:
    def sample(seed: int) -> list[str]:
        reply = server.client().completions.create(
            model="tiny",
            prompt="abc",
            max_tokens=16,
            temperature=1.5,
            seed=seed,
            n=3,
            extra_body={"ignore_eos": True},
        )
        return [c.text for c in reply.choices]

    first = sample(1)
    assert first == sample(1)
    assert first != sample(2)
    assert len(set(first)) == 3


def test_logprobs_of_the_chosen_token_are_its_own(server: Server) -> None:
    reply = server.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 5
        assert entry.logprob == pytest.approx(max(t.logprob for t in entry.top_logprobs))
        assert entry.logprob < 0


def test_a_stop_string_ends_the_text_before_it(server: Server) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 24, "temperature": 0}
    free = server.client().completions.create(**request, extra_body={"ignore_eos": True}).choices[0].text
    stop = free[3:5]
    cut = server.client().completions.create(**request, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == free[: free.index(stop)]


def test_only_callers_with_a_key_are_served(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError, match="API key"):
        server.client("wrong").models.list()
    assert [m.id for m in server.client().models.list()] == ["tiny"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_another_model_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="served here"):
        server.client().completions.create(model="gpt-4", prompt="a")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"prompt": "\x07"}', 400, "control_byte"),
        (b"{", 400, "broken_json"),
        (b'{"prompt": "a", "temprature": 1}', 400, "invalid_value"),
        (b'{"prompt": "a", "max_tokens": 0}', 400, "invalid_value"),
        (b'{"prompt": ""}', 400, "invalid_value"),
        (b'{"prompt": "a", "max_tokens": 100000}', 400, "context_length_exceeded"),
        (b'{"prompt": "' + b"a" * 600 + b'"}', 400, "context_length_exceeded"),
        (b" " * (5 * 1024 * 1024), 413, "body_too_large"),
    ],
)
def test_a_bad_body_is_refused_with_a_reason(server: Server, body: bytes, status: int, code: str) -> None:
    reply = server.post("/v1/completions", body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert reply.json()["error"]["message"]


def test_token_ids_outside_the_vocabulary_are_refused(server: Server) -> None:
    reply = server.post("/v1/completions", b'{"prompt": [5, 100000], "max_tokens": 1}')
    assert reply.status_code == 400
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_documents_over_twenty_megabytes_are_a_413(server: Server) -> None:
    assert server.post("/v1/documents/text", "naïve".encode()).json()["text"] == "naïve"
    assert server.post("/v1/documents/text", b"a" * (20 * 1024 * 1024 + 1)).status_code == 413
    assert server.post("/v1/documents/text", b"%PDF-1.7 broken").status_code == 400
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    reply = server.post("/v1/documents/text", b"--x\r\n\r\nhello\r\n--x--", **form)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "form_not_taken")


def test_a_client_that_leaves_frees_its_request(server: Server) -> None:
    before = server.total(metric_names.REQUESTS_CANCELLED_TOTAL)
    body = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as reply:
        next(reply.iter_lines())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if server.total(metric_names.REQUESTS_CANCELLED_TOTAL) > before:
            break
        time.sleep(0.05)
    assert server.total(metric_names.REQUESTS_CANCELLED_TOTAL) == before + 1
    assert server.total(metric_names.REQUESTS_RUNNING) == 0
    assert server.total(metric_names.KV_USAGE_RATIO) == 0


def test_every_named_metric_is_exported(server: Server) -> None:
    server.client().completions.create(model="tiny", prompt="abc", max_tokens=3)
    text = httpx.get(f"{server.url}/metrics").text
    absent_here = {metric_names.GPU_BUSY_RATIO}  # a CPU has no such counter
    for name, value in vars(metric_names).items():
        if name.isupper() and not name.startswith("LABEL_") and value not in absent_here:
            assert re.search(rf"^{value}(_bucket|_sum|_count)?\{{", text, re.MULTILINE), value
    assert 'model="tiny"' in text


def test_pages_need_nothing_from_outside(server: Server) -> None:
    for path in ("/", "/docs"):
        page = httpx.get(server.url + path)
        assert page.status_code == 200
        assert "http://" not in page.text.replace("http://127.0.0.1", "")
        assert "https://" not in page.text
    schema = httpx.get(f"{server.url}/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert "messages" in body["content"]["application/json"]["schema"]["properties"]


def test_running_requests_finish_when_the_server_is_told_to_stop(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    running = start(tiny_checkpoint, tmp_path, "--log-file", str(tmp_path / "log" / "server.log"))
    texts: list[str] = []

    def ask() -> None:
        stream = running.client().completions.create(
            model="tiny",
            prompt="abc",
            max_tokens=300,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            texts.append(chunk.choices[0].text)
            if chunk.choices[0].finish_reason:
                texts.append(chunk.choices[0].finish_reason)

    client = threading.Thread(target=ask)
    client.start()
    while not texts:
        time.sleep(0.01)
    running.process.send_signal(signal.SIGTERM)
    client.join(60)
    assert texts[-1] == "length"
    assert running.process.wait(30) == 0
    assert "draining" in (tmp_path / "log" / "server.log").read_text()


def test_a_dead_engine_ends_the_server_with_a_reason(tiny_checkpoint: Path, tmp_path: Path) -> None:
    running = start(tiny_checkpoint, tmp_path)
    children = f"/proc/{running.process.pid}/task/{running.process.pid}/children"
    pids = Path(children).read_text().split()
    engine = next(pid for pid in pids if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(int(engine), signal.SIGKILL)
    assert running.process.wait(30) == 1


def test_a_model_that_does_not_load_is_one_clear_error(tiny_checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_checkpoint.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    config["architectures"] = ["NoSuchModel"]
    (broken / "config.json").write_text(json.dumps(config))
    command = [DELIVER, "serve", str(broken), "--port", "0", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "error[unknown-architecture]" in done.stderr
    assert "Traceback" not in done.stderr
