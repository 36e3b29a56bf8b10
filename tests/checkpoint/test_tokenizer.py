"""Tokens, text and chats are those of transformers' AutoTokenizer, without importing it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import SAMPLE, byte_level, save, sentencepiece

from delivery.checkpoint import Tokenizer
from delivery.checkpoint.detokenize import Incremental
from delivery.errors import DataError

TEXTS = [SAMPLE, "", " ", "<|im_start|>user\nhi<|im_end|>", "a<s>b</s> c", "  two", "\u5e74\u6708"]
KINDS = {"byte-level": byte_level, "sentencepiece": sentencepiece}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(KINDS[request.param](), tmp_path_factory.mktemp("tokenizer") / "t")


def theirs(folder: Path) -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


CONFIGS = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": False, "add_eos_token": True},
    {"add_bos_token": True, "add_eos_token": True, "pad_token": "<pad>"},
    {"additional_special_tokens": ["<|new|>", "<|im_end|>"]},
    {"added_tokens_decoder": {"700": {"content": "<think>", "special": False, "lstrip": True}}},
    {"bos_token": {"content": "<s>", "__type": "AddedToken"}},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_same_ids_and_text_as_transformers(kind: str, config: dict, tmp_path: Path) -> None:
    folder = save(KINDS[kind](), tmp_path / "t", **config)
    reference, ours = theirs(folder), Tokenizer.open(folder)
    for text in [*TEXTS, "a <|new|> b<think>c"]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert ours.bos_token_id == reference.bos_token_id
    assert ours.pad_token_id == reference.pad_token_id
    assert ours.vocab_size == max(reference.get_vocab().values()) + 1


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_text_of_any_kind_survives(text: str) -> None:
    ours = Tokenizer(byte_level_once(), {})
    assert ours.decode(ours.encode(text, False), False) == text


def byte_level_once(cache: list = []) -> object:  # noqa: B006 - trained once
    if not cache:
        cache.append(byte_level())
    return cache[0]


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=30), st.text(max_size=10), st.sampled_from(sorted(KINDS)), st.booleans())
def test_pieces_join_to_the_whole_text(text: str, prompt: str, kind: str, skip: bool) -> None:
    ours = tokenizers_once()[kind]
    start = ours.encode(prompt, add_special_tokens=False)
    ids = ours.encode(f"{text}<|im_end|>{text}", add_special_tokens=False)
    stream = ours.incremental(skip_special_tokens=skip)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == ours.decode(ids, skip)
    continued = ours.incremental(start, skip)
    whole = "".join(continued.push(i) for i in ids) + continued.flush()
    if start and ours.decode(start, skip):
        assert ours.decode(start, skip) + whole == ours.decode(start + ids, skip)


def tokenizers_once(cache: dict = {}) -> dict:  # noqa: B006 - trained once
    if not cache:
        cache.update({name: Tokenizer(make(), {}) for name, make in KINDS.items()})
    return cache


@pytest.mark.parametrize("kind", KINDS)
def test_no_piece_ends_inside_a_character(kind: str) -> None:
    ours = tokenizers_once()[kind]
    # Characters that the samples do not hold: whether a rare one becomes a token is the trainer's luck.
    text = "\U0001f9ec\u9f8d\u9e9f\U0001f9ec\u200d\U0001f9ea"
    stream = ours.incremental()
    pieces = [stream.push(i) for i in ours.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text
    assert len(pieces) > len(text)
    assert not any("\ufffd" in p for p in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_bytes_are_shown_in_the_end(kind: str) -> None:
    ours = tokenizers_once()[kind]
    half = ours.encode("\U0001f9ec", add_special_tokens=False)[:-1]
    stream = ours.incremental()
    assert "".join(stream.push(i) for i in half) == ""
    assert stream.flush() == ours.decode(half)
    assert "\ufffd" in ours.decode(half)
    flood = [half[-1]] * 40
    stream = ours.incremental()
    shown = [stream.push(i) for i in flood]
    assert any(shown[:10])


def test_eos_ids_come_from_the_generation_config_and_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    assert Tokenizer.open(target).eos_token_ids == (1,)
    (target / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Tokenizer.open(target).eos_token_ids == (9, 1)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 1]}))
    assert Tokenizer.open(target).eos_token_ids == (4, 1)


def test_special_tokens_are_named(folder: Path) -> None:
    ours = Tokenizer.open(folder)
    assert {"<s>": 0, "</s>": 1, "<|im_end|>": 4}.items() <= ours.special_tokens.items()
    assert ours.token(4) == "<|im_end|>"
    assert ours.token_id("<|im_end|>") == 4
    assert ours.token(10**6) is None


def test_padding_and_truncation_of_the_file_are_not_applied(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    ours = Tokenizer.open(save(tokenizer, tmp_path / "t"))
    assert ours.decode(ours.encode(SAMPLE)) == SAMPLE


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no tokenizer") as caught:
        Tokenizer.open(tmp_path)
    assert caught.value.code == "tokenizer-missing"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read") as caught:
        Tokenizer.open(tmp_path)
    assert caught.value.code == "tokenizer-damaged"


def test_reading_needs_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from delivery.checkpoint import Tokenizer; t = Tokenizer.open(sys.argv[1]);"
        "t.encode('x'); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0


def test_the_bytes_of_tokens_joined_are_the_text(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    for text in (SAMPLE, "年月 🙂 naïve", "  two  blanks\n"):
        joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
        assert joined.decode() in (text, f" {text}")  # SentencePiece puts a blank before the first word
    face = map(tokenizer.token_bytes, tokenizer.encode("🙂", add_special_tokens=False))
    assert any(part.startswith(b"\xf0") for part in face)
    assert tokenizer.token_bytes(10**6) == b""
    name, special = next(iter(tokenizer.special_tokens.items()))
    assert tokenizer.token_bytes(special) == name.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_of_special_tokens_costs_no_more_each_time(kind: str) -> None:
    ours = tokenizers_once()[kind]
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return ours.decode(ids)

    end = ours.token_id("</s>")
    assert end is not None
    words = ours.encode("the quick fox", add_special_tokens=False)
    for before in ([], words):
        stream = Incremental(decode, before)
        assert (
            "".join(map(stream.push, [end] * 300 + words))
            == ours.decode([*before, *words])[len(ours.decode(before)) :]
        )
    assert longest < 30


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": {"text": "</s>"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"first": {"content": "a"}}}),
        ("tokenizer_config.json", {"additional_special_tokens": 5}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("special_tokens_map.json", {"sep_token": {"id": 1}}),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_settings_of_the_wrong_kind_are_damage(tmp_path: Path, name: str, content: object) -> None:
    folder = save(byte_level(), tmp_path / "t")
    (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(DataError, match="cannot be used") as caught:
        Tokenizer.open(folder)
    assert caught.value.code == "tokenizer-damaged"


@pytest.mark.parametrize(
    "key", ["added_tokens_decoder", "additional_special_tokens", "eos_token", "chat_template"]
)
def test_null_settings_say_nothing(tmp_path: Path, key: str) -> None:
    ours = Tokenizer.open(save(byte_level(), tmp_path / "t", **{key: None}))
    assert ours.decode(ours.encode("abc")) == "abc"


@pytest.mark.parametrize("stated", ["2", [None], {"a": 1}, True, -1])
def test_what_is_no_end_id_leaves_the_configs(tmp_path: Path, stated: object) -> None:
    folder = save(byte_level(), tmp_path / "t")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert 9 in Tokenizer.open(folder).eos_token_ids
