"""A checkpoint without tokenizer.json gets one from its SentencePiece model, and nobody's code is run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from tokenizer_samples import CORPUS, SAMPLE, byte_level, save

from delivery.checkpoint import Tokenizer
from delivery.checkpoint.sentencepiece_file import read_sentencepiece
from delivery.checkpoint.tokenizer_files import made_tokenizer
from delivery.errors import DataError

spm = pytest.importorskip("sentencepiece")
TEXTS = [SAMPLE, "the quick brown fox", "", "na\u00efve \U0001f642 \u6771", "a  b"]


@pytest.fixture(scope="module")
def model() -> bytes:
    return train("bpe")


def train(kind: str) -> bytes:
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 5),
        model_writer=out,
        vocab_size=400,
        model_type=kind,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        user_defined_symbols=["<extra>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return out.getvalue()


def folder(path: Path, model: bytes, **config: object) -> Path:
    (path / "tokenizer.model").write_bytes(model)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, **config}))
    return path


def made(path: Path, **options: bool) -> tuple[Tokenizer, str]:
    files, note = made_tokenizer(path, **options)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return Tokenizer.open(path), note


def test_pieces_as_sentencepiece_gives_them(model: bytes, tmp_path: Path) -> None:
    reference = spm.SentencePieceProcessor(model_proto=model)
    ours, note = made(folder(tmp_path, model))
    assert note == "tokenizer.json made of the source's tokenizer"
    assert ours.vocab_size == reference.vocab_size()
    for text in TEXTS:
        assert ours.encode(text)[1:] == reference.encode(text), text
        assert ours.encode(text)[0] == reference.bos_id()
        assert ours.decode(ours.encode(text)) == text


def test_bos_can_be_switched_off(model: bytes, tmp_path: Path) -> None:
    ours, _ = made(folder(tmp_path, model, add_bos_token=False))
    assert ours.encode("") == []


def test_declared_tokens_keep_their_ids(model: bytes, tmp_path: Path) -> None:
    size = spm.SentencePieceProcessor(model_proto=model).vocab_size()
    declared = {str(size + 3): {"content": "<|user|>", "special": True}}
    ours, _ = made(folder(tmp_path, model, added_tokens_decoder=declared))
    assert ours.token_id("<|user|>") == size + 3
    assert ours.encode("<|user|>", add_special_tokens=False) == [size + 3]


def test_a_class_of_its_own_is_left_behind(model: bytes, tmp_path: Path) -> None:
    own = {"tokenizer_class": "InternLM2Tokenizer", "auto_map": {"AutoTokenizer": ["x.Y", None]}}
    made(folder(tmp_path, model, **own), generic=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "auto_map" not in config
    assert config["bos_token"] == "<s>"
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(SAMPLE) == Tokenizer.open(tmp_path).encode(SAMPLE)


def test_what_is_there_stays(tmp_path: Path) -> None:
    save(byte_level(), tmp_path / "t")
    assert made_tokenizer(tmp_path / "t") == ({}, "")
    assert made_tokenizer(tmp_path) == ({}, "the checkpoint has no tokenizer")


def test_unigram_models_are_refused_with_a_reason(tmp_path: Path) -> None:
    folder(tmp_path, train("unigram"))
    with pytest.raises(DataError, match="is not a BPE model"):
        read_sentencepiece(tmp_path / "tokenizer.model")
    files, note = made_tokenizer(tmp_path)
    assert files == {}
    assert note == "no tokenizer.json could be made: its model type is 1, BPE is 2"


@pytest.mark.parametrize("content", [b"", b"\xff" * 30, b"\x0a\xff\x01x", b"\x0a\x02\x0a\x09"])
def test_damaged_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read") as caught:
        read_sentencepiece(tmp_path / "tokenizer.model")
    assert caught.value.code == "tokenizer-damaged"


def test_vocab_and_merges_are_read_by_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    tokenizer = byte_level()
    data = json.loads(tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(data["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    ours, _ = made(tmp_path)
    assert ours.encode(SAMPLE) == GPT2Tokenizer.from_pretrained(tmp_path).encode(SAMPLE)


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"first": {"content": "<a>"}}, "'first'"),
        ([1], "added_tokens_decoder"),
        ({"999999999999": {"content": "<a>"}}, "has id 999999999999"),
    ],
)
def test_added_tokens_that_cannot_be_are_said(
    model: bytes, tmp_path: Path, declared: object, reason: str
) -> None:
    files, note = made_tokenizer(folder(tmp_path, model, added_tokens_decoder=declared))
    assert files == {}
    assert reason in note
