"""Small tokenizers of both kinds, trained here on a few multilingual lines."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SAMPLE = (
    "Hello, world! It's 2024\u5e743\u6708\u306e\u6771\u4eac \u2014 na\u00efve caf\u00e9; "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 12345 "
    "\u03c0\u22483.14159 \U0001f642\U0001f469\u200d\U0001f469\u200d\U0001f467 "
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0939\u093f\u0928\u094d\u0926\u0940"
    "  double  space\n\n\ttabs "
    "def f(x): return x**2  # ok\r\n  indented"
)
CORPUS = [
    SAMPLE,
    SAMPLE.upper(),
    "the quick brown fox jumps over the lazy dog " * 3,
    "we're I'll don't can't",
]
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]


def byte_level(size: int = 400) -> Tokenizer:
    """Byte-level BPE as GPT-2's, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece(size: int = 420) -> Tokenizer:
    """Character BPE with byte fallback and U+2581 for blanks, as converted from SentencePiece."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][: len(SPECIAL)]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, **config: object) -> Path:
    """A directory with `tokenizer.json` and `tokenizer_config.json`."""
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, **config}))
    return directory


__all__ = ["CORPUS", "SAMPLE", "SPECIAL", "AddedToken", "byte_level", "save", "sentencepiece"]
