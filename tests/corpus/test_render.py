"""From documents to samples: budgets, BOS, templates, what is said about the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_tokenizer import Characters

from delivery import corpus
from delivery.corpus.render import RECOMMENDED_SAMPLES, serving_prefix
from delivery.corpus.script import script_shares, uncovered_scripts
from delivery.errors import DataError

CHINESE = "床前明月光疑是地上霜举头望明月低头思故乡" * 20


def write(path: Path, rows: list[object]) -> str:
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows), "utf-8")
    return str(path)


def plain(path: Path, count: int = 200, size: int = 50) -> str:
    return write(path, [{"text": f"{i:05d}" + chr(97 + i % 26) * size} for i in range(count)])


def test_samples_are_full_and_begin_as_a_served_prompt(tmp_path: Path) -> None:
    found = corpus.render(plain(tmp_path / "a.jsonl"), Characters(), samples=10, sequence_length=32)
    assert len(found.samples) == 10
    assert all(len(s.token_ids) == 32 and s.token_ids[0] == 1 for s in found.samples)
    without = corpus.render(
        plain(tmp_path / "a.jsonl"), Characters(bos=False), samples=10, sequence_length=32
    )
    assert all(s.token_ids[0] != 1 for s in without.samples)
    assert serving_prefix(Characters()) == [1]
    assert serving_prefix(Characters(bos=False)) == []


def test_weights_share_out_the_tokens(tmp_path: Path) -> None:
    spec = f"{plain(tmp_path / 'a.jsonl')}=3,{plain(tmp_path / 'b.jsonl', size=70)}"
    found = corpus.render(spec, Characters(), samples=16, sequence_length=40)
    assert found.tokens == 640
    assert (found.corpora["a.jsonl"].tokens, found.corpora["b.jsonl"].tokens) == (480, 160)
    summary = found.summary()
    assert summary["corpora"]["b.jsonl"]["token_share"] == 0.25  # type: ignore[index]
    # Mixed, not one corpus after the other: resuming and truncating see both.
    assert len({s.corpus for s in found.samples[:6]}) == 2


def test_conversations_go_through_the_template_and_stand_alone(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a"}]}
        for n in range(5, 90)
    ]
    found = corpus.render(write(tmp_path / "chat.jsonl", rows), Characters(), samples=8, sequence_length=50)
    assert all(s.token_ids[0] == 2 for s in found.samples)
    assert max(len(s.token_ids) for s in found.samples) == 50
    report = found.corpora["chat.jsonl"]
    assert report.truncated > 0
    assert report.documents == len(found.samples)
    assert found.tokens <= 8 * 50


def test_a_conversation_that_the_template_leaves_out_is_no_sample(tmp_path: Path) -> None:
    class Silent(Characters):
        def encode_chat(self, messages: object) -> list[int]:
            return []

    talk = [{"messages": [{"role": "user", "content": f"{i}"}]} for i in range(3)]
    path = write(tmp_path / "a.jsonl", [*talk, {"text": "x" * 200}])
    found = corpus.render(path, Silent(), samples=4, sequence_length=32, part="all")
    assert all(sample.token_ids for sample in found.samples)


def test_the_same_text_gives_the_same_samples(tmp_path: Path) -> None:
    spec = plain(tmp_path / "a.jsonl")
    one, two = (corpus.render(spec, Characters(), 5, 30, seed=3) for _ in range(2))
    assert one == two
    assert corpus.render(spec, Characters(), 5, 30, seed=4).samples != one.samples
    held_out = corpus.render(spec, Characters(), 5, 30, part="heldout")
    assert not {s.token_ids for s in held_out.samples} & {s.token_ids for s in one.samples}


def test_short_text_is_reported_and_too_little_is_refused(tmp_path: Path) -> None:
    found = corpus.render(plain(tmp_path / "a.jsonl", count=10), Characters(), samples=50, sequence_length=64)
    assert any("of 3,200 tokens found" in w for w in found.warnings)
    with pytest.raises(DataError, match=r"the corpora give \d+ tokens[\s\S]*at least 64"):
        corpus.render(
            plain(tmp_path / "b.jsonl", count=2, size=10), Characters(), samples=4, sequence_length=64
        )


def test_a_short_text_gives_one_short_sample(tmp_path: Path) -> None:
    found = corpus.render(plain(tmp_path / "a.jsonl", count=3), Characters(), samples=1, sequence_length=5000)
    assert len(found.samples) == 1
    assert found.samples[0].token_ids[0] == 1


def test_a_model_of_another_script_is_warned_about(tmp_path: Path) -> None:
    bilingual = Characters(vocabulary="abcdefghijklmnopqrstuvwxyz的一是不了人我在有他这为之大来以个中上们")
    english = plain(tmp_path / "english.jsonl")
    warnings = corpus.render(english, bilingual, samples=4, sequence_length=64).warnings
    assert len(warnings) == 1
    assert "model's vocabulary are Han, but only 0%" in warnings[0]
    chinese = write(tmp_path / "zh.jsonl", [{"text": f"{i}{CHINESE}"} for i in range(9)])
    mixed = corpus.render(f"{english},{chinese}", bilingual, samples=8, sequence_length=64)
    assert mixed.warnings == ()
    assert mixed.scripts["Han"] > 0.3
    assert corpus.render(english, Characters(), samples=4, sequence_length=64).warnings == ()


def test_scripts_are_counted_by_letters() -> None:
    shares = script_shares(["abc де 1234 !?", "漢字", "かな", "한글", "שלום", "αβ"])
    assert shares == pytest.approx(
        {"Latin": 3 / 17, "Hebrew": 4 / 17, "Cyrillic": 2 / 17, "Han": 2 / 17, "Kana": 2 / 17,
         "Hangul": 2 / 17, "Greek": 2 / 17}
    )  # fmt: skip
    assert next(iter(shares)) == "Hebrew"
    assert script_shares(["123 --"]) == {}
    assert uncovered_scripts({"Latin": 0.9, "Han": 0.02}, {"Latin": 1.0}) == []


def test_few_samples_come_with_advice() -> None:
    assert "1024 or more" in (corpus.recommendation(128) or "")
    assert corpus.recommendation(RECOMMENDED_SAMPLES) is None
