"""Fetch and check the model's files inside the cluster. Standard library only; runs in any image with Python.

    model.py fetch  SUMS DIR    download every file named in SUMS from $MODEL_URL, resuming, and check it
    model.py verify SUMS DIR    check every file named in SUMS

SUMS has one line a file: SHA-256, two spaces, path. Exit status 1 names the file that is wrong.
"""

import hashlib
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

CHUNK = 1 << 20
TRIES = 5


def wanted(sums):
    with open(sums, encoding="utf-8") as lines:
        for line in lines:
            digest, _, path = line.rstrip("\n").partition("  ")
            if not path:
                continue
            if os.path.isabs(path) or ".." in path.split("/"):
                sys.exit(f"{path}: refused, it would leave the model's directory")
            yield digest, path


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check(directory, digest, path):
    target = os.path.join(directory, path)
    if not os.path.isfile(target):
        sys.exit(f"{path}: missing from the model's directory")
    found = sha256(target)
    if found != digest:
        sys.exit(f"{path}: SHA-256 is {found}, the release says {digest}")


def download(url, target):
    """Append what is still missing of `url` to `target`."""
    have = os.path.getsize(target) if os.path.exists(target) else 0
    request = urllib.request.Request(url)
    if have:
        request.add_header("Range", f"bytes={have}-")
    if os.environ.get("MODEL_TOKEN"):
        request.add_header("Authorization", "Bearer " + os.environ["MODEL_TOKEN"])
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if have and error.code == 416:
            return
        raise
    with answer, open(target, "ab" if answer.status == 206 else "wb") as out:
        while chunk := answer.read(CHUNK):
            out.write(chunk)


def fetch(directory, digest, path):
    final = os.path.join(directory, path)
    if os.path.isfile(final) and sha256(final) == digest:
        return
    os.makedirs(os.path.dirname(final) or ".", exist_ok=True)
    partial = final + ".partial"
    url = os.environ["MODEL_URL"].rstrip("/") + "/" + urllib.parse.quote(path)
    reason = ""
    for attempt in range(TRIES):
        try:
            download(url, partial)
            found = sha256(partial)
            if found == digest:
                os.replace(partial, final)
                print(f"{path}: fetched", flush=True)
                return
            reason = f"SHA-256 is {found}, the release says {digest}"
            os.remove(partial)
        except (OSError, ValueError) as error:
            reason = str(error)
        time.sleep(min(2**attempt, 10) * float(os.environ.get("RETRY_SECONDS", "1")))
    sys.exit(f"{path}: not fetched after {TRIES} tries: {reason}")


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in ("fetch", "verify"):
        sys.exit(__doc__)
    action = fetch if sys.argv[1] == "fetch" else check
    count = 0
    for digest, path in wanted(sys.argv[2]):
        action(sys.argv[3], digest, path)
        count += 1
    print(f"{count} files match the release", flush=True)


if __name__ == "__main__":
    main()
