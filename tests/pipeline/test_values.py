from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import fake_steps
import pytest

from delivery.pipeline.values import NotAllowed, check_field, checked, describe, is_flag, is_list, parsed
from delivery.steps.step import fields_of


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        ("x", str, "x"),
        (True, bool, True),
        (None, int | None, None),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, 2.5], list[float], [1.0, 2.5]),
        (["a"], Sequence[str], ("a",)),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ("b", Literal["a", "b"], "b"),
        ("x", int | str, "x"),
        ([1], list[int | str], [1]),
        ({"any": [1]}, Any, {"any": [1]}),
    ],
)
def test_values_of_the_right_type(value, hint, expected):
    found = checked(value, hint)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "words"),
    [
        ("3", int, r"expected a whole number, got '3' \(text\)"),
        (True, int, r"expected a whole number, got True \(true or false\)"),
        (True, float, "expected a number"),
        (2.0, int, r"expected a whole number, got 2.0 \(a number\)"),
        (1, bool, "expected true or false, got 1"),
        (None, str, "expected text, got nothing"),
        ("a", tuple[str, ...], r"expected a list of text, got 'a' \(text\)"),
        ([1], list[str], "expected a list of text, got a list"),
        ({1: 2}, dict[str, int], "expected a mapping to a whole number, got a mapping"),
        ("c", Literal["a", "b"], "expected 'a' or 'b'"),
        ("x", int | None, "expected a whole number or nothing"),
    ],
)
def test_values_of_a_wrong_type(value, hint, words):
    with pytest.raises(ValueError, match=words):
        checked(value, hint)


@pytest.mark.parametrize(
    ("text", "hint", "expected"),
    [
        ("3", int, 3),
        ("3", float, 3.0),
        ("3", str, "3"),
        ("true", bool, True),
        ("False", bool, False),
        ("none", int | None, None),
        ("none", str, "none"),
        ("null", str | None, None),
        ("a, b", tuple[str, ...], ("a", "b")),
        ("[a, 'b,c']", list[str], ["a", "b,c"]),
        ("1,2", list[int], [1, 2]),
        ("a=1,b=2", dict[str, int], {"a": 1, "b": 2}),
        ("{a: 1}", dict[str, float], {"a": 1.0}),
        ("1", Literal[1, 2], 1),
        ("", tuple[str, ...], ()),
    ],
)
def test_texts_of_the_command_line(text, hint, expected):
    found = parsed(text, hint)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("text", "hint"), [("x", int), ("1.5", int), ("yes", bool), ("a", float | None)])
def test_texts_that_are_no_such_value(text, hint):
    with pytest.raises(ValueError, match=f"expected .*, got {text!r}"):
        parsed(text, hint)


def test_choices_suggest_the_nearest():
    mode = next(f for f in fields_of(fake_steps.Shrink) if f.name == "mode")
    assert check_field(fake_steps.Shrink, mode, "slow") == "slow"
    with pytest.raises(ValueError, match="'slw' is not a choice; did you mean 'slow'"):
        check_field(fake_steps.Shrink, mode, "slw")


def test_a_number_is_text_where_text_is_wanted():
    token = next(f for f in fields_of(fake_steps.Shrink) if f.name == "token")
    assert check_field(fake_steps.Shrink, token, 64) == "64"
    for value in (True, 1.5, None):
        with pytest.raises(ValueError, match="expected text"):
            check_field(fake_steps.Shrink, token, value)


def test_shapes():
    assert is_list(tuple[str, ...] | None)
    assert not is_list(str)
    assert is_flag(bool)
    assert not is_flag(bool | str)
    assert describe(dict) == "any value"


def test_numbers_out_of_range_are_named_with_their_range():
    from dataclasses import dataclass

    from delivery.artifact import Kind
    from delivery.steps.step import param, step

    @step
    @dataclass(frozen=True, kw_only=True)
    class Bounded:
        name = "bounded"
        makes = Kind.CHECKPOINT
        ranks: int = param(1, "", at_least=1)
        share: float = param(0.5, "", at_least=0, at_most=1)
        free: float = param(0.0, "")

    ranks, share, free = fields_of(Bounded)
    assert check_field(Bounded, ranks, 1) == 1
    assert check_field(Bounded, share, 1) == 1.0
    for field, value, words in (
        (ranks, 0, "expected a number of at least 1, got 0"),
        (share, 1.5, "expected a number from 0 to 1, got 1.5"),
        (share, -1, "expected a number from 0 to 1, got -1"),
        (free, float("nan"), "expected a number that is finite, got nan"),
    ):
        with pytest.raises(NotAllowed, match=words):
            check_field(Bounded, field, value)
