"""A `tokenizer.json` for checkpoints that come without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from delivery.checkpoint.directory import read_json
from delivery.checkpoint.gguf_tokenizer import as_json, rebuild_tokenizer
from delivery.checkpoint.sentencepiece_file import read_sentencepiece
from delivery.checkpoint.tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON
from delivery.errors import DataError

_SENTENCEPIECE = "tokenizer.model"
_MOST_ADDED = 1 << 16


def made_tokenizer(
    directory: Path, *, generic: bool = False, trust_remote_code: bool = False
) -> tuple[dict[str, bytes], str]:
    """Files that replace or add to the source's tokenizer files, and a note; ({}, "") for none.

    generic: the model becomes another class, so a tokenizer class of its own would not be found.
    trust_remote_code: whether the checkpoint's own Python code may be run to convert its tokenizer.
    """
    config = read_json(directory / TOKENIZER_CONFIG)
    if (directory / TOKENIZER_JSON).is_file():
        return (
            ({TOKENIZER_CONFIG: as_json(_generic(config)).encode()}, "") if generic and config else ({}, "")
        )
    if not (directory / _SENTENCEPIECE).is_file() and not (directory / "vocab.json").is_file():
        return {}, "the checkpoint has no tokenizer"
    try:
        if trust_remote_code or not (directory / _SENTENCEPIECE).is_file():
            text = _by_transformers(directory, trust_remote_code)
        else:
            text = _by_pieces(directory, config)
    except DataError as error:
        return {}, f"no tokenizer.json could be made: {error.why}"
    files = {TOKENIZER_JSON: text.encode()}
    if generic or "auto_map" in config:
        files[TOKENIZER_CONFIG] = as_json(_generic(config)).encode()
    return files, "tokenizer.json made of the source's tokenizer"


def _by_pieces(directory: Path, config: Mapping[str, Any]) -> str:
    metadata = read_sentencepiece(directory / _SENTENCEPIECE)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    declared = _declared(config)
    if (last := max(declared, default=0)) > len(tokens) + _MOST_ADDED:
        raise DataError(
            "tokenizer-damaged", "", why=f"an added token has id {last} behind {len(tokens)} pieces"
        )
    # Added tokens keep the ids that the model knows them by; ids between them are filled.
    for token_id in range(len(tokens), max(declared, default=-1) + 1):
        tokens.append(declared.get(token_id, f"<|unused_{token_id}|>"))
        kinds.append(3 if token_id in declared else 5)
        metadata["tokenizer.ggml.scores"].append(-1e9)
    metadata["tokenizer.ggml.add_bos_token"] = bool(config.get("add_bos_token", True))
    metadata["tokenizer.ggml.add_eos_token"] = bool(config.get("add_eos_token", False))
    return rebuild_tokenizer(metadata)[0]


def _declared(config: Mapping[str, Any]) -> dict[int, str]:
    """Id → text of the tokens that a tokenizer_config.json adds. Raises DataError `tokenizer-damaged`."""
    try:
        return {int(i): _content(t) for i, t in (config.get("added_tokens_decoder") or {}).items()}
    except (ValueError, AttributeError, KeyError) as error:
        raise DataError("tokenizer-damaged", "", why=f"added_tokens_decoder: {error!r}") from error


def _by_transformers(directory: Path, trust_remote_code: bool) -> str:
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=trust_remote_code
        )
        text: str = made.backend_tokenizer.to_str()
    except (ValueError, OSError, AttributeError, ImportError) as error:
        raise DataError("tokenizer-damaged", "", why=str(error).split("\n")[0]) from error
    return text


def _generic(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in config.items() if k != "auto_map"}
    return kept | {"tokenizer_class": "PreTrainedTokenizerFast"}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)
