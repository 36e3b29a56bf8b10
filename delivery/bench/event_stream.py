"""A server's answer as a stream of events (`data: {...}` lines) becomes the times and tokens of a request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.bench.recorder import Recorder


def shown(words: bytes | str) -> str:
    """A server's words as one line for a report or a terminal, which they cannot colour or clear."""
    text = words.decode("utf-8", "replace") if isinstance(words, bytes) else words
    return "".join(c if c.isprintable() else " " for c in text).strip()


def read_stream(pieces: list[tuple[float, bytes]], recorder: Recorder, start_s: float) -> None:
    """Fill a recorder from the stamped bytes of an event stream (`data: {...}` lines).

    Without a usage block every chunk with text counts as one token.
    """
    rest = b""
    usage: dict[str, Any] | None = None
    prompt_tokens, output_tokens = recorder.prompt_tokens, 0
    for at, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip()
            if text == b"[DONE]":
                continue
            try:
                event = json.loads(text)
            except ValueError:
                recorder.error = f"not JSON in the stream: {text[:80]!r}"
                return
            try:
                if event.get("error"):
                    recorder.error = shown(str(event["error"])[:300])
                    return
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    if choice.get("text") or (choice.get("delta") or {}).get("content"):
                        recorder.chunk(at - start_s, 1)
                    recorder.finish_reason = choice.get("finish_reason") or recorder.finish_reason
                if usage:
                    prompt_tokens = int(usage.get("prompt_tokens") or prompt_tokens)
                    output_tokens = int(usage.get("completion_tokens") or 0)
            except (AttributeError, TypeError, ValueError):
                recorder.error = f"no completion in the stream: {text[:80]!r}"
                return
    recorder.prompt_tokens, recorder.output_tokens = prompt_tokens, output_tokens or recorder.output_tokens
    if recorder.finish_reason is None and not recorder.error:
        recorder.error = "the stream ended without a finish reason"
