"""Tokenizer: a model's own tokenizer and chat template, by the `tokenizers` library. No torch.

`tokenizer.json` is read as it is, and its own post-processor decides whether a BOS is added: as in
transformers 5, `add_bos_token` of `tokenizer_config.json` says nothing beside it. Loading takes a
fraction of transformers' import. A checkpoint without `tokenizer.json` is read by its converters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from delivery.checkpoint import chat
from delivery.checkpoint.detokenize import Incremental
from delivery.checkpoint.directory import CONFIG, GENERATION_CONFIG, read_json
from delivery.checkpoint.token_bytes import bytes_of
from delivery.errors import DataError
from delivery.model.families.reading import token_ids

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back, and conversations to text."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        template: str | Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._backend = backend
        self._config = config
        self._template = template
        self._named = {k: _text(config[k]) for k in _NAMED if config.get(k)}
        backend.no_truncation()
        backend.no_padding()
        self._add_declared_tokens()
        own = self._id("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if own is None else [own])]))

    @classmethod
    def open(cls, path: Path | str) -> Tokenizer:
        """The tokenizer in a model (or engine) directory.

        Raises DataError `tokenizer-missing` or `tokenizer-damaged`.
        """
        directory = Path(path)
        config = read_json(directory / TOKENIZER_CONFIG)
        special = read_json(directory / "special_tokens_map.json")
        config = {**{k: v for k, v in special.items() if k in _NAMED}, **config}
        if (directory / TOKENIZER_JSON).is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER_JSON))
            except Exception as error:  # the library raises bare Exception
                raise DataError(
                    "tokenizer-damaged", f"{directory / TOKENIZER_JSON} cannot be read", why=str(error)
                ) from error
        else:
            backend = _converted(directory)
        try:
            return cls(backend, config, _template(directory, config), _eos_ids(directory))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                "tokenizer-damaged",
                f"the tokenizer files in {directory} cannot be used",
                why=f"{TOKENIZER_CONFIG}, or a file beside it, holds what it should not: {error!r}",
                hint="get the tokenizer files from where the checkpoint came from",
            ) from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it become their ids."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; incomplete UTF-8 becomes U+FFFD, ids outside the vocabulary nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it; None for an id outside it."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the UTF-8 of a text; not whole characters where it holds a part of one."""
        token = self.token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return token.encode()
        return bytes_of(token, byte_level=self._byte_level)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in str(self._backend.decoder)

    def token_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def apply_chat_template(
        self,
        messages: Sequence[chat.Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Raises DataError `chat-template-missing` and what `chat.render` raises.
        """
        return chat.render(
            self._choose_template(bool(tools)),
            messages,
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._named, **variables},
        )

    def encode_chat(self, messages: Sequence[chat.Message], **kwargs: Any) -> list[int]:
        """Token ids of `apply_chat_template`; the template itself writes the special tokens."""
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    def incremental(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> Incremental:
        """A detokeniser for ids that arrive one by one after `prompt_ids`."""
        return Incremental(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), prompt_ids)

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id("pad_token")

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Every special token with its id; `decode` leaves them out."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def _id(self, name: str) -> int | None:
        return self.token_id(self._named[name]) if name in self._named else None

    def _choose_template(self, with_tools: bool) -> str:
        if isinstance(self._template, str):
            return self._template
        named = self._template or {}
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in named:
                return named[name]
        raise DataError(
            "chat-template-missing",
            "this model has no chat template",
            why=f"only templates named {', '.join(named)} are there" if named else "it may be a base model",
            hint="use text prompts, or put chat_template.jinja next to the tokenizer",
        )

    def _add_declared_tokens(self) -> None:
        declared = self._config.get("added_tokens_decoder") or {}
        known = self._backend.get_added_tokens_decoder()
        tokens = []
        for token_id, entry in sorted(declared.items(), key=lambda item: int(item[0])):
            token = _added(entry)
            if int(token_id) not in known or known[int(token_id)].content != token.content:
                tokens.append(token)
        extra = (
            self._config.get("additional_special_tokens") or self._config.get("extra_special_tokens") or []
        )
        names = [*self._named.values(), *map(_text, extra.values() if isinstance(extra, Mapping) else extra)]
        contents = {t.content for t in known.values()} | {t.content for t in tokens}
        tokens += [AddedToken(n, special=True, normalized=False) for n in names if n not in contents]
        if tokens:
            self._backend.add_tokens(tokens)


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _added(entry: Any) -> AddedToken:
    if not isinstance(entry, Mapping):
        return AddedToken(str(entry), special=True, normalized=False)
    flags = {
        k: bool(entry[k]) for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry
    }
    return AddedToken(str(entry["content"]), **flags)


def _template(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    named: dict[str, str] = {}
    if (directory / "chat_template.jinja").is_file():
        named["default"] = (directory / "chat_template.jinja").read_text("utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = path.read_text("utf-8")
    if named:
        return named["default"] if list(named) == ["default"] else named
    found = read_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, list):
        return {str(t["name"]): str(t["template"]) for t in found}
    return None if found is None else str(found)


def _eos_ids(directory: Path) -> list[int]:
    """The generation config's end-of-text ids; the model config's where it names none."""
    for name in (GENERATION_CONFIG, CONFIG):
        if found := token_ids(read_json(directory / name).get("eos_token_id")):
            return list(found)
    return []


def _converted(directory: Path) -> tokenizers.Tokenizer:
    if not any((directory / n).is_file() for n in ("tokenizer.model", "vocab.json", "spiece.model")):
        raise DataError(
            "tokenizer-missing",
            f"{directory} has no tokenizer",
            why=f"neither {TOKENIZER_JSON}, tokenizer.model nor vocab.json is there",
            hint="get the tokenizer files from where the checkpoint came from",
        )
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)._tokenizer
    except (ValueError, OSError, AttributeError, ImportError) as error:
        raise DataError(
            "tokenizer-damaged",
            f"the tokenizer of {directory} cannot be converted",
            why=str(error).split("\n")[0],
            hint=f"save it once with transformers so that {TOKENIZER_JSON} exists",
        ) from error
    converted: tokenizers.Tokenizer = backend
    return converted
