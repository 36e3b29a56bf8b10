"""Ask the server whether it has the model, or for a few tokens of it. Standard library only.

    ask.py ready URL MODEL     is MODEL served? (readiness)
    ask.py test  URL MODEL     and does it answer a completion? (helm test)

The first key of $API_KEYS_FILE, or $DELIVER_API_KEY, is sent as a bearer token.
"""

import json
import os
import sys
import urllib.request


def key():
    path = os.environ.get("API_KEYS_FILE", "")
    if path:
        with open(path, encoding="utf-8") as lines:
            texts = [line.split("#")[0].strip() for line in lines]
        # A line is a key, or a name and a key.
        return next((text.rpartition(":")[2] for text in texts if text), "")
    return os.environ.get("DELIVER_API_KEY", "")


def call(url, body=None, timeout=5.0):
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if key():
        request.add_header("Authorization", "Bearer " + key())
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in ("ready", "test"):
        sys.exit(__doc__)
    what, url, model = sys.argv[1:]
    try:
        names = [entry["id"] for entry in call(url + "/v1/models")["data"]]
        if model not in names:
            sys.exit(f"the server has {names}, not {model!r}")
        if what == "test":
            body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            text = call(url + "/v1/completions", body, timeout=60.0)["choices"][0]["text"]
            if not text.strip():
                sys.exit("the server answered a completion with nothing")
            print(f"{model}: {text!r}")
    except (OSError, ValueError, KeyError, IndexError) as error:
        sys.exit(f"{url}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
