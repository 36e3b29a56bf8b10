"""The two scripts that a chart brings into the cluster, run as the pod runs them."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

FILES = Path("delivery/release/chart_template/files").resolve()
CONTENT = {"engine.json": b'{"a": 1}', "weights/part 1.bin": os.urandom(3 << 20)}


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT with ranges; cuts the first answer for a large file short; and a tiny OpenAI API."""

    seen: list[tuple[str, str | None, str | None]]
    cut: set[str]
    answer = " Paris."

    def do_GET(self) -> None:
        wanted_range = self.headers.get("Range")
        self.seen.append((self.path, wanted_range, self.headers.get("Authorization")))
        if self.path == "/v1/models":
            self.reply(200, json.dumps({"data": [{"id": "tiny"}]}).encode())
            return
        name = self.path.removeprefix("/files/").replace("%20", " ")
        if name not in CONTENT:
            self.reply(404, b"")
            return
        content, start = CONTENT[name], 0
        if wanted_range:
            start = int(wanted_range.removeprefix("bytes=").rstrip("-"))
        body = content[start:]
        if name in self.cut:
            self.cut.discard(name)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            return
        self.reply(206 if start else 200, body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(200, json.dumps({"choices": [{"text": self.answer}]}).encode())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Server", (Handler,), {"seen": [], "cut": {"weights/part 1.bin"}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", handler
        httpd.shutdown()
        thread.join()


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "model.sha256"
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in CONTENT.items()]
    path.write_text("".join(lines), "utf-8")
    return path


def run(script: str, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", FILES / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "RETRY_SECONDS": "0", **env},
        timeout=60,
    )


def test_fetch_resumes_and_checks(server: tuple[str, type[Handler]], sums: Path, tmp_path: Path) -> None:
    url, handler = server
    model = tmp_path / "model"
    done = run("model.py", "fetch", sums, model, MODEL_URL=f"{url}/files", MODEL_TOKEN="secret")
    assert done.returncode == 0, done.stderr
    assert {name: (model / name).read_bytes() for name in CONTENT} == CONTENT
    ranges = [wanted for path, wanted, _ in handler.seen if "part" in path]
    assert ranges == [None, f"bytes={len(CONTENT['weights/part 1.bin']) // 2}-"]
    assert {token for _, _, token in handler.seen} == {"Bearer secret"}
    assert not list(model.rglob("*.partial"))
    handler.seen.clear()
    assert run("model.py", "fetch", sums, model, MODEL_URL=f"{url}/files").returncode == 0
    assert handler.seen == []


def test_fetch_gives_up_on_other_contents(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    url, handler = server
    handler.cut.clear()
    sums = tmp_path / "model.sha256"
    sums.write_text(f"{'0' * 64}  engine.json\n", "utf-8")
    done = run("model.py", "fetch", sums, tmp_path / "model", MODEL_URL=f"{url}/files")
    assert done.returncode == 1
    assert "engine.json: not fetched after 5 tries: SHA-256 is" in done.stderr


def test_verify_names_the_file_that_differs(sums: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    for name, content in CONTENT.items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(content)
    done = run("model.py", "verify", sums, model)
    assert done.stdout.strip() == "2 files match the release"
    with (model / "weights" / "part 1.bin").open("r+b") as stream:
        stream.seek(1 << 20)
        stream.write(bytes(1024))
    done = run("model.py", "verify", sums, model)
    assert done.returncode == 1
    assert "weights/part 1.bin: SHA-256 is" in done.stderr
    (model / "engine.json").unlink()
    assert "engine.json: missing" in run("model.py", "verify", sums, model).stderr


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "a/../../b"])
def test_paths_that_leave_the_model_are_refused(path: str, tmp_path: Path) -> None:
    sums = tmp_path / "model.sha256"
    sums.write_text(f"{'0' * 64}  {path}\n", "utf-8")
    done = run("model.py", "verify", sums, tmp_path)
    assert done.returncode == 1
    assert "refused" in done.stderr


def test_ready_asks_for_the_model(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    url, handler = server
    keys = tmp_path / "keys"
    keys.write_text("# for the tests\nteam-a:one\ntwo\n", "utf-8")
    assert run("ask.py", "ready", url, "tiny", API_KEYS_FILE=str(keys)).returncode == 0
    assert handler.seen[-1][2] == "Bearer one"
    done = run("ask.py", "ready", url, "other", DELIVER_API_KEY="k")
    assert done.returncode == 1
    assert "not 'other'" in done.stderr
    assert run("ask.py", "ready", "http://127.0.0.1:9", "tiny").returncode == 1


def test_helm_test_wants_an_answer(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    done = run("ask.py", "test", url, "tiny")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    handler.answer = " "
    done = run("ask.py", "test", url, "tiny")
    assert done.returncode == 1
    assert "with nothing" in done.stderr
