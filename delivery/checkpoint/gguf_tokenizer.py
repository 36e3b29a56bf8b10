"""A `tokenizer.json` and `tokenizer_config.json` rebuilt from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from delivery.errors import DataError

_CONTROL, _USER_DEFINED = 3, 4

# Splits of text before merging, by the file's `tokenizer.ggml.pre`.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_TAIL_SLASH}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_TAIL_SLASH}"
)
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")
_WHOLE_WORDS = frozenset({*_LLAMA3_NAMES, "tekken"})
"""A word that is in the vocabulary is one token, whatever the merges say; a BOS unless the file says no."""
_SPLITS: Mapping[str, str] = {
    **dict.fromkeys((*_LLAMA3_NAMES, "smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
}
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_PLAIN = frozenset({"gpt-2", "gpt2", "default", "phi-2", "olmo", "mpt", "jina-en", "jina-es", "jina-de"})
_NFC = frozenset({"qwen2", "deepseek-r1-qwen", "megrez", "qwen35"})
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def rebuild_tokenizer(metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """`tokenizer.json` as text, and `tokenizer_config.json`.

    Raises DataError `gguf-tokenizer-unknown`, `gguf-metadata-missing`.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise DataError("gguf-metadata-missing", "the GGUF file holds no tokenizer")
    if kind not in _BUILDERS:
        raise DataError(
            "gguf-tokenizer-unknown",
            f"tokenizers of kind {kind!r} cannot be rebuilt from GGUF",
            why="supported are gpt2 (byte-level BPE) and llama (SentencePiece BPE)",
            hint="use the model's Hugging Face directory",
        )
    try:
        backend = _BUILDERS[kind](metadata, tokens)
        _add_special(backend, metadata, tokens)
        config = _config(metadata, tokens, kind)
        backend.post_processor = _post_processor(backend, config)
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            "tokenizer-damaged",
            "the tokenizer of the GGUF file cannot be rebuilt",
            why=str(error),
            hint="get the file again from its source",
        ) from error
    return backend.to_str(pretty=False), config


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges", [])]
    backend = Tokenizer(models.BPE(vocab=_vocab(tokens), merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    backend.decoder = decoders.ByteLevel()
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    elif pre in _DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif pre in _PLAIN:
        backend.pre_tokenizer = words
    else:
        known = sorted({*_SPLITS, *_DIGITS_APART, *_PLAIN})
        raise DataError(
            "gguf-tokenizer-unknown",
            f"the pre-tokenizer {pre!r} is not known",
            why=f"known are {', '.join(known)}",
            hint="use the model's Hugging Face directory",
        )
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    architecture = str(metadata.get("general.architecture", ""))
    gemma = architecture.startswith("gemma")
    if gemma:
        # Runs of blanks are stored as real blanks; the model looks them up as U+2581.
        tokens = ["\u2581" * len(t) if t and not t.strip(" ") else t for t in tokens]
        ranks = [-float(i) for i in range(len(tokens))]
    else:
        ranks = [float(s) for s in metadata.get("tokenizer.ggml.scores", [])]
        if len(ranks) != len(tokens):
            raise DataError("gguf-metadata-missing", "the GGUF file holds no scores for its tokens")
    prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(
        models.BPE(
            vocab=_vocab(tokens),
            merges=_merges(tokens, ranks),
            unk_token=tokens[unknown] if unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    blanks = normalizers.Replace(" ", "\u2581")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), blanks]) if prefix_space else blanks
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_space else steps)
    return backend


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges(tokens: Sequence[str], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece BPE vocabulary implies: every way to split a token in two known ones.

    Higher-ranked tokens merge first, as in SentencePiece; within one token, pairs of early tokens.
    """
    index = _vocab(tokens)
    found: list[tuple[float, list[tuple[str, str]]]] = []
    for token, rank in zip(tokens, ranks, strict=True):
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in index and token[cut:] in index
        ]
        if pairs:
            pairs.sort(key=lambda pair: (index[pair[0]], index[pair[1]]))
            found.append((-rank, pairs))
    found.sort(key=lambda item: item[0])
    return [pair for _, pairs in found for pair in pairs]


def _vocab(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _add_special(backend: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    marked = [(t, k) for t, k in zip(tokens, kinds, strict=False) if k in (_CONTROL, _USER_DEFINED)]
    named = {tokens[i] for i in _special_ids(metadata).values() if i < len(tokens)}
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in marked if k == _CONTROL]
        + [AddedToken(t, special=True, normalized=False) for t in sorted(named - {t for t, _ in marked})]
    )
    backend.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t, k in marked if k == _USER_DEFINED]
    )


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    found = {k: metadata.get(f"tokenizer.ggml.{v}_token_id") for k, v in _SPECIAL.items()}
    return {k: int(v) for k, v in found.items() if v is not None}


def _post_processor(backend: Tokenizer, config: Mapping[str, Any]) -> processors.TemplateProcessing:
    bos = config.get("bos_token") if config["add_bos_token"] else None
    eos = config.get("eos_token") if config["add_eos_token"] else None
    return processors.TemplateProcessing(
        single=" ".join(filter(None, [bos, "$A", eos])),
        pair=" ".join(filter(None, [bos, "$A", eos, bos, "$B", eos])),
        special_tokens=[(t, backend.token_to_id(t)) for t in (bos, eos) if t],
    )


def _config(metadata: Mapping[str, Any], tokens: Sequence[str], kind: str) -> dict[str, Any]:
    adds_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    config |= {k: tokens[i] for k, i in _special_ids(metadata).items() if i < len(tokens)}
    templates = {
        key.removeprefix("tokenizer.chat_template."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template.")
    }
    default = metadata.get("tokenizer.chat_template")
    if templates:
        named = {**({"default": default} if default else {}), **templates}
        config["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    elif default:
        config["chat_template"] = default
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return config | ({"model_max_length": int(length)} if length else {})


def as_json(value: Mapping[str, Any]) -> str:
    """JSON as these files are usually written."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
