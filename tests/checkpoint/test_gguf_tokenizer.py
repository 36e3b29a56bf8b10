"""Tokenizers rebuilt from GGUF metadata: token for token those of transformers' own GGUF loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_samples as samples
import pytest
from tokenizer_samples import SAMPLE, byte_level, sentencepiece

from delivery.checkpoint import Tokenizer
from delivery.checkpoint.gguf_source import GgufSource
from delivery.errors import DataError

TEXTS = [SAMPLE, "plain words", "<|im_start|>user\nx<|im_end|> y", "1234567 12,345.67", "WE'RE I'Ll", ""]
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
BYTE_LEVEL = ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "smaug-bpe", "deepseek-r1-qwen"]


def converted(tmp_path: Path, architecture: str, tiny: Any, tokenizer: Any, **keys: Any) -> Path:
    """A folder with `m.gguf` and, in `out`, the files rebuilt from it."""
    settings = {"vocab_size": 420, **keys}
    path = tmp_path / "m.gguf"
    file = samples.write(path, tiny, architecture, tokenizer=tokenizer, tokenizer_keys=settings)
    source = GgufSource(file)
    files = source.files()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(json.dumps(source.config))
    for name, content in files.items():
        (tmp_path / "out" / name).write_bytes(content)
    return tmp_path


def theirs(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **options)


@pytest.fixture(scope="module")
def model() -> Any:
    return samples.tiny("Llama")


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level_as_transformers_loads_gguf(pre: str, model: Any, tmp_path: Path) -> None:
    folder = converted(tmp_path, "llama", model, byte_level(), pre=pre)
    ours = Tokenizer.open(folder / "out")
    reference = theirs(folder, gguf_file="m.gguf")
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, False) == reference.decode(ids)
        if pre != "qwen2" and "deepseek" not in pre:
            assert ours.decode(ids, False) == text


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2"])
def test_transformers_reads_what_we_write(pre: str, model: Any, tmp_path: Path) -> None:
    folder = converted(tmp_path, "llama", model, byte_level(), pre=pre, chat_template=TEMPLATE)
    ours, reference = Tokenizer.open(folder / "out"), theirs(folder / "out")
    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text)
    chat = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(chat) == reference.apply_chat_template(chat, tokenize=False) == "<s>hi"
    assert ours.eos_token_ids == (1,)


def test_digits_stand_alone_for_smollm(model: Any, tmp_path: Path) -> None:
    folder = converted(tmp_path, "llama", model, byte_level(), pre="smollm")
    ours = Tokenizer.open(folder / "out")
    tokens = [ours.token(i) for i in ours.encode("a 2024")]
    assert tokens[-4:] == ["2", "0", "2", "4"]


SENTENCEPIECE = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "mistral": ("Mistral", {}),
    "gemma2": ("Gemma2", {"tie_word_embeddings": True}),
    "phi3": ("Phi3", {"pad_token_id": None}),
}


@pytest.mark.parametrize("architecture", SENTENCEPIECE)
def test_sentencepiece_as_transformers_loads_gguf(architecture: str, tmp_path: Path) -> None:
    family, changes = SENTENCEPIECE[architecture]
    tiny = samples.tiny(family, **changes)
    keys = {"add_space_prefix": False} if architecture == "gemma2" else {}
    folder = converted(tmp_path, architecture, tiny, sentencepiece(), model="llama", **keys)
    ours = Tokenizer.open(folder / "out")
    reference = theirs(folder, gguf_file="m.gguf")
    # transformers 5 puts a blank before the text once, llama.cpp and the models' own files also after
    # special tokens: those are left out here and stand in the next test.
    for text in [t for t in TEXTS if "<|" not in t]:
        ids = ours.encode(text)
        assert ids[0] == 0
        assert ids == reference.encode(text), text
        assert ours.decode(ids) == text


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "phi3"])
def test_byte_level_of_other_families(architecture: str, tmp_path: Path) -> None:
    changes = {"pad_token_id": None} if architecture == "phi3" else {}
    tiny = samples.tiny(architecture.title(), **changes)
    folder = converted(tmp_path, architecture, tiny, byte_level(), pre="qwen2")
    ours, reference = Tokenizer.open(folder / "out"), theirs(folder, gguf_file="m.gguf")
    for text in TEXTS:
        assert ours.encode(text, False) == reference.encode(text, add_special_tokens=False), text


def test_sentencepiece_puts_a_blank_after_special_tokens(model: Any, tmp_path: Path) -> None:
    folder = converted(tmp_path, "llama", model, sentencepiece(), model="llama")
    ours = Tokenizer.open(folder / "out")
    tokens = [ours.token(i) for i in ours.encode("x<|im_end|>x")]
    assert tokens == ["<s>", "\u2581", "x", "<|im_end|>", "\u2581", "x"] or tokens[-1] == "\u2581x"


def test_bos_follows_the_metadata(model: Any, tmp_path: Path) -> None:
    for adds, expected in ((True, [0]), (False, [])):
        folder = tmp_path / str(adds)
        folder.mkdir()
        converted(folder, "llama", model, byte_level(), add_bos_token=adds)
        assert Tokenizer.open(folder / "out").encode("") == expected
        assert theirs(folder / "out").encode("") == expected
    llama3 = tmp_path / "llama3"
    llama3.mkdir()
    converted(llama3, "llama", model, byte_level(), pre="llama-bpe")
    assert Tokenizer.open(llama3 / "out").encode("") == [0]


def test_eot_ends_generation_too(model: Any, tmp_path: Path) -> None:
    folder = converted(tmp_path, "llama", model, byte_level(), eot_token_id=4)
    assert Tokenizer.open(folder / "out").eos_token_ids == (1, 4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "no-such"}, "the pre-tokenizer 'no-such' is not known"),
        ({"model": "t5"}, "tokenizers of kind 't5' cannot be rebuilt"),
    ],
)
def test_unknown_kinds_are_refused(keys: dict, message: str, model: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        converted(tmp_path, "llama", model, byte_level(), **keys)
    assert caught.value.code == "gguf-tokenizer-unknown"
    assert not (tmp_path / "out").exists()
