"""Windows of held-out text: how long, how many, and how they begin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_tokenizer import Characters

from delivery.corpus import check_heldout, heldout, heldout_windows, parse
from delivery.errors import DataError, UsageError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"text {i} " + "words " * 20}) for i in range(200)))
    return path


def test_every_window_begins_as_a_served_prompt_and_nothing_is_lost(texts: Path) -> None:
    whole = "".join(d.text for d in heldout(str(texts)))
    ((label, windows),) = heldout_windows(str(texts), Characters(), 7, 50)
    assert label == "own.jsonl"
    assert [len(w) for w in windows] == [50] * 7
    assert {w[0] for w in windows} == {1}
    assert "".join(chr(i) for w in windows for i in w[1:]) == whole[: 7 * 49]


def test_without_a_start_token_windows_are_text_alone(texts: Path) -> None:
    ((_, windows),) = heldout_windows(str(texts), Characters(bos=False), 3, 40)
    whole = "".join(d.text for d in heldout(str(texts)))
    assert "".join(chr(i) for w in windows for i in w) == whole[:120]


def test_conversations_are_not_given_two_start_tokens(tmp_path: Path) -> None:
    class Opening(Characters):
        def encode_chat(self, messages: object) -> list[int]:
            return [1, *super().encode_chat(messages)]  # type: ignore[arg-type]

    turns = [{"role": "user", "content": "how long is it?"}]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps({"messages": [*turns, *turns[: i % 2]]}) for i in range(2)))
    ((_, windows),) = heldout_windows(str(path), Opening(), 1, 400)
    assert windows[0][0] == 1
    assert windows[0].count(1) == 1


def test_two_files_of_one_name_are_refused(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = tmp_path / "b" / "own.jsonl"
    other.write_text(texts.read_text())
    with pytest.raises(UsageError, match=r"'own.jsonl' is named twice[\s\S]*rename one"):
        parse(f"{texts},{other}")


def test_no_held_out_text(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "a"}))
    with pytest.raises(DataError, match=r"one.jsonl has no held-out text"):
        list(heldout_windows(str(tmp_path / "one.jsonl"), Characters(bos=False), 1, 40))


def test_what_holds_nothing_out_is_seen_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a single document of a few words")
    (tmp_path / "broken.jsonl").write_text("{not json\n")
    check_heldout("legal,technical")
    check_heldout("wikitext2")  # a set of a Hub: only asked when it is used
    with pytest.raises(DataError, match=r"corpus one\.txt has no held-out text"):
        check_heldout(f"legal,{tmp_path / 'one.txt'}")
    with pytest.raises(DataError, match="broken"):
        check_heldout(str(tmp_path / "broken.jsonl"))
