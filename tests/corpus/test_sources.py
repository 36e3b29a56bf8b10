"""Where text comes from: specs, files, named sets, built-in corpora."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from delivery import corpus
from delivery.corpus import named
from delivery.errors import DataError, DeliverError, EnvironmentLacking, UsageError


def texts(path: Path) -> list[str]:
    return sorted(d.plain for d in corpus.load(str(path), "all"))


def test_specs_name_corpora_and_weights(tmp_path: Path) -> None:
    file = tmp_path / "a=b.jsonl"
    file.write_text('{"text": "x"}')
    found = corpus.parse([f"legal,technical=3, {file}", "wikitext2=0.5"])
    assert [(s.label, s.kind, s.weight) for s in found] == [
        ("legal", "builtin", 1.0),
        ("technical", "builtin", 3.0),
        ("a=b.jsonl", "path", 1.0),
        ("wikitext2", "named", 0.5),
    ]


@pytest.mark.parametrize(
    ("spec", "kind", "message"),
    [
        ("", UsageError, "no corpus is named"),
        ("legal,legal=2", UsageError, "corpus 'legal' is named twice"),
        ("legal=0", UsageError, r"the weight of corpus 'legal' is 0\n  why:  expected a number above 0"),
        ("legal=nan", UsageError, "the weight of corpus 'legal' is nan"),
        ("legl", DataError, r"there is no corpus 'legl'[\s\S]*did you mean 'legal'"),
        ("data/faq.jsonl", DataError, r"there is no corpus 'data/faq.jsonl'[\s\S]*check the path"),
    ],
)
def test_specs_that_cannot_be_meant(spec: str, kind: type[DeliverError], message: str) -> None:
    with pytest.raises(kind, match=message):
        corpus.parse(spec)


def test_files_of_every_kind_in_a_folder(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("first paragraph\n\nsecond paragraph")
    chat = {
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi\u2028there"}]
    }
    (tmp_path / "b.jsonl").write_text(f'{{"text": "line"}}\n\n{json.dumps(chat, ensure_ascii=False)}\n')
    table = pyarrow.table({"text": ["row one", "row two"], "other": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    (tmp_path / "ignored.md").write_text("not read")
    assert texts(tmp_path) == [
        "first paragraph\n\nsecond paragraph",
        "hello\nhi\u2028there",
        "line",
        "row one",
        "row two",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": ', r"a\.jsonl, line 2 is not JSON"),
        ("b.jsonl", '{"prompt": "x"}', r"line 1 holds no document[\s\S]*got prompt"),
        ("c.jsonl", '{"messages": [{"role": "user"}]}', "line 1 holds no document"),
        ("d.jsonl", '["x"]', r"got list"),
        ("e.csv", "x", r"e\.csv cannot be read as a corpus[\s\S]*\.txt, \.jsonl, \.parquet"),
        ("f.txt", b"\xff\xfe", r"f\.txt is not UTF-8 text[\s\S]*0xff"),
        ("g.jsonl", b'{"text": "\xe9"}', r"g\.jsonl is not UTF-8 text"),
    ],
)
def test_files_that_are_not_corpora_are_named(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message):
        list(corpus.load(str(file)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", rb'{"text": "cut \ud83d"}', "line 1 is not valid Unicode"),
        ("a.jsonl", rb'{"messages": [{"role": "user", "content": "\udc00"}]}', "line 1 is not valid Unicode"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.parquet", b"PAR1 cut", "cannot be read as Parquet"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        texts(tmp_path / name)
    assert caught.value.code == "corpus-format"


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain", "utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "lines"}', "utf-8-sig")
    assert texts(tmp_path) == ["lines", "plain"]


def test_an_empty_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no corpus files"):
        list(corpus.load(str(tmp_path)))


@pytest.mark.parametrize("name", corpus.builtin_names())
def test_built_in_corpora_are_there_without_a_network(name: str) -> None:
    calibration, held_out = list(corpus.load(name)), list(corpus.heldout(name))
    assert sum(len(d.text) for d in calibration) > 100_000
    assert sum(len(d.text) for d in held_out) > 8_000
    assert not {d.content_hash for d in calibration} & {d.content_hash for d in held_out}
    paragraphs = {p for d in calibration for p in d.text.split("\n\n")}
    assert not paragraphs & {p for d in held_out for p in d.text.split("\n\n")}
    words = {"legal": "copyright", "technical": "return"}
    assert sum(words[name] in d.text.lower() for d in calibration) > len(calibration) / 5
    assert [d.content_hash for d in corpus.load(name)] == [d.content_hash for d in calibration]
    assert corpus.script_shares(d.text for d in calibration)["Latin"] > 0.95


def test_a_digest_is_of_contents_not_of_names(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.txt").write_text("same words")
    one, two = (corpus.digest(str(tmp_path / f)) for f in ("one", "two"))
    assert list(one.values()) == list(two.values())
    (tmp_path / "two" / "two.txt").write_text("other words")
    assert list(corpus.digest(str(tmp_path / "two")).values()) != list(two.values())
    assert corpus.digest("legal,technical").keys() == {"legal", "technical"}


def test_named_sets_come_from_a_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(named.MIRROR_VARIABLE, str(tmp_path))
    (tmp_path / "gsm8k.jsonl").write_text('{"text": "two and two"}')
    before = corpus.digest("gsm8k")
    assert [d.text for d in corpus.load("gsm8k", "all")] == ["two and two"]
    (tmp_path / "gsm8k.jsonl").write_text('{"text": "three"}')
    assert corpus.digest("gsm8k") != before
    (tmp_path / "c4").mkdir()
    (tmp_path / "c4" / "part.txt").write_text("some words")
    assert [d.corpus for d in corpus.load("c4", "all")] == ["c4"]


def test_named_sets_without_datasets_say_what_works_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(named.MIRROR_VARIABLE, raising=False)
    monkeypatch.setattr(named, "find_spec", lambda _: None)
    with pytest.raises(
        EnvironmentLacking, match=r"'datasets' is not installed[\s\S]*--corpus legal,technical"
    ):
        list(corpus.load("wikitext2"))
    assert len(corpus.digest("wikitext2")["wikitext2"]) == 64


def test_an_unreachable_hub_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(*a, **k):\n    raise ConnectionError('no route to huggingface.co')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    with pytest.raises(EnvironmentLacking, match=r"cannot be read\n  why:  ConnectionError: no route"):
        list(corpus.load("c4"))


def test_a_named_set_is_streamed_and_its_fields_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(repository, name, split, streaming, data_files):\n"
        "    assert (repository, name, split, streaming) == ('openai/gsm8k', 'main', 'train', True)\n"
        "    return iter([{'question': 'q1', 'answer': 'a1'}, {'question': 'q2', 'answer': 'a2'}])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    assert sorted(d.text for d in corpus.load("gsm8k", "all")) == ["q1\na1", "q2\na2"]


def test_no_torch_is_loaded() -> None:
    code = "import sys; from delivery import corpus; corpus.digest('legal'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
