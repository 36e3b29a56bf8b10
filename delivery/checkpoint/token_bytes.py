"""The bytes of a single token, which may be part of a character."""

from __future__ import annotations

import re
from functools import cache

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "▁"  # SentencePiece's


@cache
def byte_alphabet() -> dict[str, int]:
    """Character → byte in GPT-2's kind of vocabulary: printable Latin-1 is itself, the rest comes behind."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def bytes_of(token: str, *, byte_level: bool) -> bytes:
    """The bytes of a token as the vocabulary writes it. byte_level: it is written in that alphabet."""
    if byte_level:
        alphabet = byte_alphabet()
        if all(c in alphabet for c in token):
            return bytes(alphabet[c] for c in token)
    elif found := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    else:
        token = token.replace(_BLANK, " ")
    return token.encode()
