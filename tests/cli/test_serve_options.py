"""What `serve`, `bench` and `chat` refuse before they load anything, and the name a model is served under."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))

from delivery.artifact import Kind, Manifest
from delivery.cli._session import Session
from delivery.cli.serve import _name
from delivery.pipeline.refs import resolve


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "x", "--port", "99999"], "'--port': 99999 is not in the range 0<=x<=65535"),
        (["serve", "x", "--rate-limit", "-5"], "'--rate-limit': -5.0 is not in the range x>=0"),
        (["serve", "x", "--max-queue", "0"], "'--max-queue': 0 is not in the range x>=1"),
        (["serve", "x", "--drain-timeout", "-1"], "'--drain-timeout': -1.0 is not in the range x>=0"),
        (["serve", "x", "--log-max-mib", "0"], "'--log-max-mib': 0.0 is not in the range x>0"),
        (["chat", "x", "--temperature", "-1"], "'--temperature': -1.0 is not in the range x>=0"),
        (["bench", "x", "--requests", "0"], "'--requests': 0 is not in the range x>=1"),
        (["bench", "x", "--concurrency", "0"], "'--concurrency': 0 is not in the range x>=1"),
        (["bench", "http://x", "--api-key-file", "none"], "'--api-key-file': File 'none' does not exist"),
        (["bench", "http://x", "--out", "p.yaml"], "'--out': Directory 'p.yaml' is a file"),
        (["bench", "http://x", "--goodput", "ttft=3"], "--goodput ttft=3"),
        (["bench", "http://x", "--goodput", "ttft:nan"], "--goodput ttft:nan"),
        (["bench", "http://x", "--goodput", "ttft:inf"], "--goodput ttft:inf"),
        (["baseline", "noise", "x", "--runs", "1"], "'--runs': 1 is not in the range x>=2"),
        (["chat", "x", "--max-tokens", "0"], "'--max-tokens': 0 is not in the range x>=1"),
    ],
)
def test_values_that_cannot_be_are_usage_errors(deliver, args, words):
    code, out, err = deliver(*args)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--max-model-len=100000", "--max-model-len 100000 exceeds the model's maximum length"),
        ("--block-size=0", "block_size is 0"),
        ("--cache-max-entry-count=-1", "cache_max_entry_count is -1"),
        ("--device=cuda", "no NVIDIA GPU can be used"),
    ],
)
def test_the_engines_options_are_checked_before_the_server_starts(
    deliver, tiny_checkpoint, monkeypatch, option, words
):
    monkeypatch.setattr("delivery.device.gpu_count", lambda: 0)
    code, out, err = deliver("serve", str(tiny_checkpoint), "--port", "0", option)
    assert code in (2, 6)
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("error[")
    assert words in lines[0]
    assert sum("error[" in line for line in lines) == 1
    assert "serving" not in err


def test_a_log_that_cannot_be_written(deliver, tiny_checkpoint):
    code, _, err = deliver("serve", str(tiny_checkpoint), "--port", "0", "--log-file", "/proc/none/log")
    assert (code, "error[log-file-unusable]: cannot log to /proc/none/log" in err) == (2, True)


def test_chat_takes_the_key_of_a_server_from_a_file(deliver, tmp_path, monkeypatch):
    given = []

    class Remote:
        def __init__(self, url, key, *_):
            given.append(key)

        def answer(self, messages):
            return iter(())

    monkeypatch.setattr("delivery.serving.remote_chat.RemoteChat", Remote)
    monkeypatch.setattr("builtins.input", lambda _: "/exit")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for text in ("sk-1\n", "# mine\nme:sk-1  # of May\n"):
        (tmp_path / "key").write_text(text)
        assert deliver("chat", "http://x", "--api-key-file", "key")[0] == 0
    assert given == ["sk-1", "sk-1"]
    (tmp_path / "key").write_text("# none\n")
    code, _, err = deliver("chat", "http://x", "--api-key-file", "key")
    assert (code, "error[api-keys-unreadable]: key contains no key" in err) == (2, True)
    (tmp_path / "key").write_text("ann:schlüssel\n", "utf-8")
    code, _, err = deliver("bench", "http://x", "--api-key-file", "key")
    assert (code, "error[api-keys-unreadable]: the key in key cannot be sent" in err) == (2, True)


def test_what_lies_under_a_digest_is_served_under_the_models_name(tmp_path):
    session = Session(workdir=tmp_path / "work")
    with session.store.building() as out:
        (out / "config.json").write_text("{}")
        record = {"params": {"model": "org/Model-7B"}}
        made = session.store.commit(out, Manifest(Kind.CHECKPOINT, "convert", 1), record)
    assert _name(session, made) == "Model-7B"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert _name(session, resolve(session.store, str(tmp_path / "mine"))) == "mine"
