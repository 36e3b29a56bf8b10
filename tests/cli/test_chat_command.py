"""The terminal chat with an engine in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from delivery.cli._group import commands
from delivery.errors import UsageError


def talk(model: Path, said: str, *options: str) -> str:
    words = ["chat", str(model), "--device", "cpu", *options]
    done = CliRunner().invoke(commands, words, input=said, catch_exceptions=False, standalone_mode=False)
    return done.stdout


def test_answers_go_to_stdout_line_by_line(tiny_checkpoint: Path) -> None:
    once = talk(tiny_checkpoint, "hi\n\n/exit\nnever\n", "--max-tokens", "4")
    assert len(once) > 1
    # What is forgotten does not change the next answer.
    assert talk(tiny_checkpoint, "hi\n/reset\nhi\n", "--max-tokens", "4") == once + once


def test_a_conversation_that_grew_too_long_says_how_to_go_on(tiny_checkpoint: Path) -> None:
    with pytest.raises(
        UsageError, match=r"the conversation has become too long[\s\S]*max_model_len is 512"
    ) as e:
        talk(tiny_checkpoint, "x" * 400 + "\nagain\n", "--max-tokens", "90")
    assert e.value.hint.startswith("/reset")
