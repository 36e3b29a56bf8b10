"""GitLab's and GitHub's comment APIs on a real loopback socket: they keep what they are told."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

TOKEN = "glpat-secret"
_LARGEST_PAGE = 100


@dataclass
class ReviewServer:
    """`comments` by id in order of creation; `log` has (method, path) of every request."""

    url: str = ""
    comments: dict[int, str] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)
    broken: int = 0
    """Status that every request gets instead of an answer; 0 for none."""

    def wrote(self) -> list[str]:
        return [method for method, _ in self.log if method != "GET"]


@contextmanager
def serving(lists: str, one: str, token_header: str, token: str, change: str) -> Iterator[ReviewServer]:
    """`lists` and `one` are patterns of paths; `one` has a group for the comment's id."""
    state = ReviewServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._handle()

        def do_POST(self) -> None:
            self._handle()

        def do_PUT(self) -> None:
            self._handle()

        def do_PATCH(self) -> None:
            self._handle()

        def _handle(self) -> None:
            url = urlsplit(self.path)
            size = int(self.headers.get("Content-Length") or 0)
            told = json.loads(self.rfile.read(size)) if size else {}
            state.log.append((self.command, url.path))
            if state.broken:
                self._answer(state.broken, {"message": "no"})
            elif self.headers.get(token_header) != token:
                self._answer(401, {"message": "401 Unauthorized"})
            elif re.fullmatch(lists, url.path) and self.command == "GET":
                asked = parse_qs(url.query)
                size = min(int(asked["per_page"][0]), _LARGEST_PAGE)
                first = (int(asked["page"][0]) - 1) * size
                rows = [{"id": i, "body": body} for i, body in state.comments.items()]
                self._answer(200, rows[first : first + size])
            elif re.fullmatch(lists, url.path) and self.command == "POST":
                number = len(state.comments) + 1
                state.comments[number] = told["body"]
                self._answer(201, {"id": number, "body": told["body"]})
            elif (found := re.fullmatch(one, url.path)) and self.command == change:
                state.comments[int(found[1])] = told["body"]
                self._answer(200, {"id": int(found[1]), "body": told["body"]})
            else:
                self._answer(404, {"message": "404 Not Found"})

        def _answer(self, status: int, data: object) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def gitlab() -> Iterator[tuple[ReviewServer, dict[str, str]]]:
    """A server, and the variables of a job in merge request 7 of project 42."""
    notes = r"/api/v4/projects/42/merge_requests/7/notes"
    with serving(notes, rf"{notes}/(\d+)", "PRIVATE-TOKEN", TOKEN, "PUT") as server:
        yield (
            server,
            {
                "GITLAB_CI": "true",
                "CI_API_V4_URL": f"{server.url}/api/v4",
                "CI_PROJECT_ID": "42",
                "CI_MERGE_REQUEST_IID": "7",
                "DELIVER_COMMENT_TOKEN": TOKEN,
            },
        )


@contextmanager
def github() -> Iterator[tuple[ReviewServer, dict[str, str]]]:
    """A server, and the variables of a job in pull request 7 of org/weights."""
    issues = r"/repos/org/weights/issues"
    with serving(
        rf"{issues}/7/comments", rf"{issues}/comments/(\d+)", "Authorization", f"Bearer {TOKEN}", "PATCH"
    ) as server:
        yield (
            server,
            {
                "GITHUB_ACTIONS": "true",
                "GITHUB_API_URL": server.url,
                "GITHUB_REPOSITORY": "org/weights",
                "GITHUB_REF": "refs/pull/7/merge",
                "DELIVER_COMMENT_TOKEN": TOKEN,
            },
        )
