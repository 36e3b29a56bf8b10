"""Fetch and check the model's files inside the cluster. Standard library only; runs in any image with Python.

    model.py fetch  SUMS DIR    download every file named in SUMS from $MODEL_URL, resuming, and check it
    model.py verify SUMS DIR    check every file named in SUMS

SUMS has one line a file: SHA-256, two spaces, path. Exit status 1 names the file that is wrong.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CHUNK_BYTES = 1 << 20
TRIES = 5
TIMEOUT_S = 60.0
LONGEST_PAUSE_S = 10.0


def wanted(sums: Path) -> Iterator[tuple[str, str]]:
    """(SHA-256, path) of every file of the release."""
    for line in sums.read_text("utf-8").splitlines():
        digest, _, path = line.partition("  ")
        if not path:
            continue
        if PurePosixPath(path).is_absolute() or ".." in path.split("/"):
            sys.exit(f"{path}: refused, it would leave the model's directory")
        yield digest, path


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def verify(directory: Path, digest: str, path: str) -> None:
    """End with status 1 unless the file is there and is the release's."""
    if not (directory / path).is_file():
        sys.exit(f"{path}: missing from the model's directory")
    found = sha256(directory / path)
    if found != digest:
        sys.exit(f"{path}: SHA-256 is {found}, the release says {digest}")


def download(url: str, target: Path) -> None:
    """Append to `target` what it still lacks of `url`."""
    have = target.stat().st_size if target.exists() else 0
    request = urllib.request.Request(url)
    if have:
        request.add_header("Range", f"bytes={have}-")
    if os.environ.get("MODEL_TOKEN"):
        request.add_header("Authorization", "Bearer " + os.environ["MODEL_TOKEN"])
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if have and error.code == 416:  # everything is there already
            return
        raise
    length = int(answer.headers.get("Content-Length", -1))
    received = 0
    with answer, target.open("ab" if answer.status == 206 else "wb") as out:
        while chunk := answer.read(CHUNK_BYTES):
            received += out.write(chunk)
    if received < length:
        raise OSError(f"the connection ended after {received} of {length} bytes")


def fetch(directory: Path, digest: str, path: str) -> None:
    """Bring the file into place, unless it is there already."""
    final = directory / path
    if final.is_file() and sha256(final) == digest:
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(final.name + ".partial")
    url = os.environ["MODEL_URL"].rstrip("/") + "/" + urllib.parse.quote(path)
    pause_s = float(os.environ.get("RETRY_SECONDS", "1"))
    reason = ""
    for _ in range(TRIES):
        try:
            download(url, partial)
            found = sha256(partial)
            if found == digest:
                partial.replace(final)
                print(f"{path}: fetched", flush=True)
                return
            reason = f"SHA-256 is {found}, the release says {digest}"
            partial.unlink()
        except (OSError, ValueError) as error:
            reason = str(error)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    sys.exit(f"{path}: not fetched after {TRIES} tries: {reason}")


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in ("fetch", "verify"):
        sys.exit(__doc__)
    action = fetch if sys.argv[1] == "fetch" else verify
    files = list(wanted(Path(sys.argv[2])))
    for digest, path in files:
        action(Path(sys.argv[3]), digest, path)
    print(f"{len(files)} files match the release", flush=True)


if __name__ == "__main__":
    main()
