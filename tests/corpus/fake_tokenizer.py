"""A tokenizer of characters: ids are code points, BOS is 1, a chat turn is wrapped in 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Characters:
    def __init__(self, bos: bool = True, vocabulary: str = "abcdefghijklmnopqrstuvwxyz") -> None:
        self.bos = bos
        self.vocabulary = vocabulary

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(c) for c in text]
        return [1, *ids] if self.bos and add_special_tokens else ids

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        ids = []
        for message in messages:
            ids += [2, *self.encode(f"{message['role']}:{message['content']}", False), 3]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(ids) == 1 and ids[0] < len(self.vocabulary):
            return self.vocabulary[ids[0]]
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i < 4))
