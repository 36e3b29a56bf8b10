"""Ask the server whether it has the model, or for a few tokens of it. Standard library only.

    ask.py ready URL MODEL     is MODEL served? (readiness)
    ask.py test  URL MODEL     and does it answer a completion? (helm test)

The first key of $API_KEYS_FILE, or $DELIVER_API_KEY, is sent as a bearer token.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 5.0
TEST_TIMEOUT_S = 60.0


def key() -> str:
    """A key as it is sent: a line of the file is a key, or a name, a colon and a key."""
    path = os.environ.get("API_KEYS_FILE", "")
    if not path:
        return os.environ.get("DELIVER_API_KEY", "")
    lines = [line.split("#")[0].strip() for line in Path(path).read_text("utf-8").splitlines()]
    return next((line.rpartition(":")[2] for line in lines if line), "")


def call(url: str, body: object = None, timeout_s: float = READY_TIMEOUT_S) -> Any:
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if token := key():
        request.add_header("Authorization", "Bearer " + token)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.load(answer)


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in ("ready", "test"):
        sys.exit(__doc__)
    what, url, model = sys.argv[1:]
    try:
        names = [entry["id"] for entry in call(url + "/v1/models")["data"]]
        if model not in names:
            sys.exit(f"the server has {names}, not {model!r}")
        if what == "test":
            body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            text = call(url + "/v1/completions", body, TEST_TIMEOUT_S)["choices"][0]["text"]
            if not text.strip():
                sys.exit("the server answered a completion with nothing")
            print(f"{model}: {text!r}")
    except (OSError, ValueError, KeyError, IndexError) as error:
        sys.exit(f"{url}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
