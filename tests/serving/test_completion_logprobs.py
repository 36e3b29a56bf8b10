"""Log-probabilities of /v1/completions: tokens as they stand in the text, and where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from delivery.checkpoint import Tokenizer
from delivery.engine.outputs import TokenLogprobs
from delivery.serving.completions import _Logprobs

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

import tokenizer_samples

TEXTS = ["the quick brown fox", "na\u00efve caf\u00e9", "\U0001f642 emoji \U0001f469", "  two  blanks\n"]


@pytest.fixture(scope="module", params=["sentencepiece", "byte_level"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(getattr(tokenizer_samples, request.param)(), {}, None)


def entries(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(i, -1.0, ((i, -1.0),)) for i in ids]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_make_up_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = _Logprobs(tokenizer).of(entries(ids))
    raw = b"".join(
        bytes.fromhex(t.removeprefix("bytes:").replace("\\x", "")) if t.startswith("bytes:") else t.encode()
        for t in found["tokens"]
    )
    assert raw.decode() in (text, f" {text}")  # SentencePiece puts a blank before all
    assert [list(top) for top in found["top_logprobs"]] == [[token] for token in found["tokens"]]


@pytest.mark.parametrize("likeliest", [(), (("b", -0.5),), (("b", -0.5), ("a", -1.0))])
def test_the_chosen_token_is_among_the_likeliest(
    tokenizer: Tokenizer, likeliest: tuple[tuple[str, float], ...]
) -> None:
    def last_id(text: str) -> int:
        return tokenizer.encode(text, add_special_tokens=False)[-1]

    top = tuple((last_id(text), value) for text, value in likeliest)
    found = _Logprobs(tokenizer).of([TokenLogprobs(last_id("a"), -1.0, top)])["top_logprobs"][0]
    assert {token.strip(): value for token, value in found.items()} == {"a": -1.0} | dict(likeliest)


def test_blanks_inside_a_text_are_kept(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("quick brown", add_special_tokens=False)
    tokens = _Logprobs(tokenizer).of(entries(ids))["tokens"]
    assert " b" in "".join(tokens)


def test_offsets_count_characters_of_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\U0001f642b", add_special_tokens=False)
    whole = _Logprobs(tokenizer).of(entries(ids))
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert whole["text_offset"][0] == 0
    assert whole["text_offset"] == sorted(whole["text_offset"])
    # The emoji is one character, of however many tokens.
    assert whole["text_offset"][-1] == text.index("b")
    piecewise = _Logprobs(tokenizer)
    assert [piecewise.of(entries([i]))["text_offset"][0] for i in ids] == whole["text_offset"]


def test_special_tokens_are_named_and_take_no_room(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("</s>")
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    assert end is not None
    found = _Logprobs(tokenizer).of(entries([letter, end, letter]))
    assert found["tokens"][1] == "</s>"
    assert found["text_offset"][2] == found["text_offset"][1]
