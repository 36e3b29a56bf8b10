"""Incremental detokenisation: token ids arrive one by one, and only complete characters come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_MAX_HELD = 8
_PROMPT_CONTEXT = 6


class Incremental:
    """The results of `push`, followed by `flush`, make up the whole text.

    A token is decoded together with those before it that last gave text, since its own text may depend
    on them (a leading blank, a character spread over tokens). A trailing incomplete character is held
    back; after 8 tokens that complete nothing the bytes are taken for garbage and shown as U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-_PROMPT_CONTEXT:])
        self._settled = len(self._ids)
        """Ids whose text was shown; those behind are undecided."""
        self._shown = len(decode(self._ids)) if self._ids else 0
        """Characters of the text of all of `_ids` that were given out or belong to the prompt."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; '' while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.endswith(_REPLACEMENT) or len(self._ids) - self._settled >= _MAX_HELD:
            return self._settle(text)
        whole = text.rstrip(_REPLACEMENT)
        new = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        return new

    def flush(self) -> str:
        """What is left at the end of the output: an incomplete character becomes U+FFFD."""
        return self._settle(self._decode(self._ids)) if len(self._ids) > self._settled else ""

    def _settle(self, text: str) -> str:
        new = text[self._shown :]
        if not new and len(self._ids) > _MAX_HELD:
            # Special tokens, as a model repeats them that may not end: as context they would grow for ever.
            del self._ids[self._settled :]
        if new:
            # Context for the next token: the ids that gave this text. Where they gave none (special
            # tokens), the earlier context stays, or a blank after them would be lost.
            self._ids = self._ids[self._settled :]
            text = self._decode(self._ids)
        self._settled = len(self._ids)
        self._shown = len(text)
        return new
