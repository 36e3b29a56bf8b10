"""A conversation with an engine in this process, for the terminal."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from delivery.checkpoint import Checkpoint
from delivery.engine.core import EngineCore
from delivery.engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class LocalChat:
    """Answers conversations; a context manager, because it holds an engine."""

    def __init__(self, path: Path, sampling: SamplingParams, *, device: str = "auto") -> None:
        self._sampling = sampling
        self._tokenizer = Checkpoint.open(path).tokenizer()
        self._engine = EngineCore(path, device=device)
        self._ids = map(str, itertools.count())

    def __enter__(self) -> LocalChat:
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.close()

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The answer to the last message, in pieces as they are generated."""
        text = self._tokenizer.apply_chat_template(messages)
        prompt = self._tokenizer.encode(text, add_special_tokens=False)
        request_id = next(self._ids)
        self._engine.add_request(
            Request(request_id=request_id, prompt_token_ids=prompt, sampling=self._sampling)
        )
        try:
            while self._engine.has_unfinished():
                for output in self._engine.step():
                    yield output.new_text
        finally:
            self._engine.abort(request_id)
