"""Small servers on 127.0.0.1: files over HTTP with ranges, an S3 bucket, an OCI registry, a Hub."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class Site:
    """Paths and what they answer; `cut_after` ends the server's patience after so many body bytes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.seen: list[str] = []
        self.sent = 0
        self.cut_after: int | None = None
        self.token: str | None = None
        self.list_bucket = False
        self.url = ""

    def etag(self, path: str) -> str:
        return self.headers.get(path, {}).get("ETag", f'"{hashlib.md5(self.files[path]).hexdigest()}"')


@contextmanager
def serve(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_args: object) -> None:
            return

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            parts = urlsplit(self.path)
            path, query = unquote(parts.path), parse_qs(parts.query)
            site.seen.append(f"{self.command} {path}")
            if path == "/token":
                return self.send(json.dumps({"token": site.token}).encode(), 200, {}, body)
            known = self.headers.get("Authorization") == f"Bearer {site.token}"
            if site.token and path.startswith("/v2/") and not known:
                realm = f'Bearer realm="{site.url}/token",service="s",scope="repository:m:pull"'
                return self.send(b"", 401, {"WWW-Authenticate": realm}, body)
            if site.list_bucket and ("list-type" in query or "delimiter" in query):
                return self.send(listing(site, path, query), 200, {"Content-Type": "application/xml"}, body)
            if path not in site.files:
                return self.send(b"{}", 404, site.headers.get("404", {}), body)
            return self.file(path, body)

        def file(self, path: str, body: bool) -> None:
            data = site.files[path]
            headers = {"ETag": site.etag(path), "Accept-Ranges": "bytes", **site.headers.get(path, {})}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if not wanted:
                return self.send(data, 200, headers, body)
            start, end = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            return self.send(data[start : end + 1], 206, headers, body)

        def send(self, data: bytes, status: int, headers: dict[str, str], body: bool) -> None:
            if site.cut_after is not None and body and site.sent + len(data) > site.cut_after:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                site.sent += len(data)
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def listing(site: Site, bucket: str, query: dict[str, list[str]]) -> bytes:
    """ListObjectsV2 of everything below a prefix."""
    prefix = query.get("prefix", [""])[0]
    root = bucket.rstrip("/") + "/"
    items = "".join(
        f"<Contents><Key>{path.removeprefix(root)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{site.etag(path)}</ETag><Size>{len(data)}</Size></Contents>"
        for path, data in sorted(site.files.items())
        if path.startswith(root + prefix)
    )
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{root.strip('/')}</Name><Prefix>{prefix}</Prefix><IsTruncated>false</IsTruncated>"
        f"{items}</ListBucketResult>"
    ).encode()


def add_oci(site: Site, name: str, tag: str, layers: list[tuple[str, bytes, str]]) -> str:
    """An artifact of (media type, content, title) layers; gives the manifest's digest."""
    described = []
    for media_type, content, title in layers:
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        site.files[f"/v2/{name}/blobs/{digest}"] = content
        layer = {"mediaType": media_type, "digest": digest, "size": len(content)}
        described.append(
            layer | ({"annotations": {"org.opencontainers.image.title": title}} if title else {})
        )
    manifest = json.dumps({"schemaVersion": 2, "layers": described}).encode()
    digest = "sha256:" + hashlib.sha256(manifest).hexdigest()
    for reference in (tag, digest):
        site.files[f"/v2/{name}/manifests/{reference}"] = manifest
    return digest


def add_hub(site: Site, name: str, commit: str, files: dict[str, bytes], branch: str = "main") -> None:
    """A repository of a Hub at one commit; every file is large-file storage, so its ETag is its SHA-256."""
    info = {"id": name, "modelId": name, "sha": commit, "private": False, "tags": [], "downloads": 0}
    info["siblings"] = [{"rfilename": f} for f in files]
    tree = []
    for file, data in files.items():
        sha256 = hashlib.sha256(data).hexdigest()
        tree.append(
            {
                "type": "file",
                "path": file,
                "size": len(data),
                "oid": hashlib.sha1(data).hexdigest(),
                "lfs": {"oid": sha256, "size": len(data), "pointerSize": 100},
            }
        )
        for revision in (branch, commit):
            path = f"/{name}/resolve/{revision}/{file}"
            site.files[path] = data
            site.headers[path] = {
                "ETag": f'"{sha256}"',
                "X-Linked-Etag": f'"{sha256}"',
                "X-Linked-Size": str(len(data)),
                "X-Repo-Commit": commit,
            }
    for revision in (branch, commit):
        site.files[f"/api/models/{name}/revision/{revision}"] = json.dumps(info).encode()
        site.files[f"/api/models/{name}/tree/{revision}"] = json.dumps(tree).encode()
    site.files[f"/api/models/{name}"] = json.dumps(info).encode()
    for path in list(site.files):
        if path.startswith("/api/"):
            site.headers[path] = {"Content-Type": "application/json"}


def tar(members: list[tuple[str, bytes]], change: object = None) -> bytes:
    """An archive of (name, content); `change` may rewrite a member."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if change is not None:
                change(info)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
