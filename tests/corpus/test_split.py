"""The held-out tenth: by content, the same everywhere, never calibrated on."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from delivery import corpus
from delivery.corpus.document import Document, is_held_out, split
from delivery.corpus.passages import PASSAGE_CHARS, passages


def documents(texts: list[str]) -> list[Document]:
    return [Document("c", t) for t in texts]


@given(st.lists(st.text(min_size=1), max_size=60))
@settings(max_examples=80, deadline=None)
def test_the_parts_share_nothing_and_lose_nothing(texts: list[str]) -> None:
    everything = [d.content_hash for d in split(documents(texts), "all")]
    calibration = [d.content_hash for d in split(documents(texts), "calibration")]
    held_out = [d.content_hash for d in split(documents(texts), "heldout")]
    assert not set(calibration) & set(held_out)
    assert sorted(calibration + held_out) == sorted(everything)
    assert len(set(everything)) == len(everything)
    if len(everything) > 1:
        assert held_out
        assert calibration or all(is_held_out(d) for d in documents(texts) if d.text.strip())


def test_about_a_tenth_is_held_out() -> None:
    found = sum(is_held_out(d) for d in documents([f"text number {i}" for i in range(4000)]))
    assert 320 < found < 480


def test_line_breaks_and_the_corpus_do_not_decide() -> None:
    one, two = Document("a", "the same\nwords  here"), Document("b", "the same words here")
    assert one.content_hash == two.content_hash
    chat = Document("c", messages=({"role": "user", "content": "the same words here"},))
    assert chat.content_hash == one.content_hash


def test_the_order_of_files_does_not_matter(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {i}"}) for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("\n".join(reversed(lines)))
    found = [[d.text for d in corpus.load(str(tmp_path / f"{n}.jsonl"))] for n in "ab"]
    assert found[0] == found[1]
    assert [d.text for d in corpus.load(str(tmp_path / "a.jsonl"), seed=1)] != found[0]


def test_passages_are_whole_paragraphs_of_bounded_length() -> None:
    text = "\n\n".join(f"paragraph {i} " + "word " * 60 for i in range(40)) + "\n\n" + "x" * 9000
    found = list(passages(text))
    assert all(len(p) <= 2 * PASSAGE_CHARS + 10 for p in found)
    assert sum(p.count("paragraph") for p in found) == 40
    seen: set[str] = set()
    once = list(passages(text, seen))
    assert list(passages(text, seen)) == []
    assert "".join(once).count("paragraph") == 40
