"""OutputText: tokens become text; stop strings are found across token borders. No torch."""

from __future__ import annotations

from typing import Protocol


class Detokenizer(Protocol):
    """What `Tokenizer.incremental` returns: text of complete characters only."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class OutputText:
    """The text of one request.

    Text that may be the beginning of a stop string is held back until it is decided. stops_after: tokens in
    whose text no stop string is looked for.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], stops_after: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = () if stops_after else stops
        self._all_stops = stops
        self._tokens_before_stops = stops_after
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that can be given out after this token; sets `stopped` when a stop string is complete."""
        text = self._give(self._detokenizer.push(token_id))
        self._tokens_before_stops -= 1
        if self._tokens_before_stops == 0:
            self._stops = self._all_stops
        return text

    def finish(self) -> str:
        """What is left when the request ends otherwise. Empty after a stop string."""
        if self.stopped:
            return ""
        text = self._give(self._detokenizer.flush())
        rest = "" if self.stopped else self._held
        self._held = ""
        return text + rest

    def _give(self, new: str) -> str:
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The longest end of `text` that begins `stop`."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
