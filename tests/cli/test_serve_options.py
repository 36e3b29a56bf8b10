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
        (["bench", "x", "--requests", "0"], "'--requests': 0 is not in the range x>=1"),
        (["bench", "x", "--concurrency", "0"], "'--concurrency': 0 is not in the range x>=1"),
        (["bench", "http://x", "--api-key-file", "none"], "'--api-key-file': File 'none' does not exist"),
        (["bench", "http://x", "--out", "p.yaml"], "'--out': Directory 'p.yaml' is a file"),
        (["bench", "http://x", "--goodput", "ttft=3"], "--goodput ttft=3"),
        (["baseline", "noise", "x", "--runs", "1"], "'--runs': 1 is not in the range x>=2"),
        (["chat", "x", "--max-tokens", "0"], "'--max-tokens': 0 is not in the range x>=1"),
    ],
)
def test_values_that_cannot_be_are_usage_errors(deliver, args, words):
    code, out, err = deliver(*args)
    assert (code, out) == (2, "")
    assert words in err


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
