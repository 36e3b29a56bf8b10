from __future__ import annotations

from pathlib import Path

import pytest

from delivery.errors import UsageError
from delivery.pipeline.source import parse_text, read_yaml


def read(tmp_path: Path, text: str) -> object:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return read_yaml(path)


def test_plain_data_is_read_as_yaml_1_2():
    text = "a: 1\nb: [x, 2.5, yes, 0o17, 2026-12-31, ~, 1e3]\nc: {d: true, e: 'no'}"
    assert parse_text(text, "t") == {
        "a": 1,
        "b": ["x", 2.5, "yes", 15, "2026-12-31", None, 1000.0],
        "c": {"d": True, "e": "no"},
    }


def test_every_value_knows_its_line(tmp_path):
    document = read(tmp_path, "a: 1\nb:\n  - c: 2\n    d: 3\n")
    assert document.where(("b", 0, "d")) == f"{tmp_path}/p.yaml:4"
    assert document.where(("b", 0, "missing")) == f"{tmp_path}/p.yaml:3"


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("a: 1\nb: 2\na: 3", "yaml-duplicate-key", r"t:3: duplicate key 'a'\n.*first at t:1"),
        ("a: {b: 1, b: 2}", "yaml-duplicate-key", "duplicate key 'b'"),
        ("a: [1", "yaml-invalid", "t:1 is not YAML"),
        ("a:\n\t- b", "yaml-invalid", "t:2 is not YAML"),
        ("a: !!python/object:os.system x", "yaml-invalid", "t:1: the tag .* is not allowed"),
        ("a: !mine 1", "yaml-invalid", "the tag !mine is not allowed"),
        ("? [a]\n: b", "yaml-invalid", "a key must be plain text"),
        ("<<: {a: 1}", "yaml-invalid", "a key must be plain text"),
        ("a: 1\n---\nb: 2", "yaml-invalid", "another document"),
        ("a: .inf", "yaml-invalid", "t:1: .inf is not a finite number"),
        ("&x [*x]", "yaml-invalid", "an alias contains itself"),
        ("a: \x00", "yaml-invalid", "is not YAML"),
    ],
)
def test_what_is_refused(text, code, words):
    with pytest.raises(UsageError, match=words) as caught:
        parse_text(text, "t")
    assert caught.value.code == code


def test_a_missing_file_and_a_binary_one(tmp_path):
    with pytest.raises(UsageError, match="there is no pipeline file") as caught:
        read_yaml(tmp_path / "no.yaml")
    assert caught.value.code == "pipeline-not-found"
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        read_yaml(tmp_path / "b.yaml")
