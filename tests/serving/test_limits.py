"""Rate buckets, and bodies that are not what they should be."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.serving.limits import RateLimiter, parse_json_object
from delivery.serving.problem import Problem


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_bucket_refills_at_the_rate() -> None:
    clock = Clock()
    limiter = RateLimiter(60, clock)
    assert [limiter.admit("a") for _ in range(10)] == [0.0] * 10
    assert limiter.admit("a") == pytest.approx(1.0)
    assert limiter.admit("b") == 0.0
    clock.now_s = 1.0
    assert limiter.admit("a") == 0.0
    assert limiter.admit("a") > 0


def test_no_rate_is_no_limit() -> None:
    limiter = RateLimiter(0)
    assert {limiter.admit("a") for _ in range(1000)} == {0.0}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"a": "\x01"}', "control_byte"),
        (b'{"a": 1}\x00', "control_byte"),
        (b'{"a": "\\u0000"}', "control_byte"),
        (b'{"a": "\\ud800"}', "lone_surrogate"),
        (b'{"a": ', "broken_json"),
        (b"", "broken_json"),
        (b'{"a": NaN}', "broken_json"),
        (b"[1]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b'{"a": "\xff"}', "not_utf8"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "broken_json"),
        (b"[" * 200_000, "broken_json"),
    ],
)
def test_a_hostile_body_is_a_400_with_a_reason(body: bytes, code: str) -> None:
    with pytest.raises(Problem) as caught:
        parse_json_object(body)
    assert (caught.value.status, caught.value.code) == (400, code)
    assert caught.value.message


@given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_a_problem(body: bytes) -> None:
    try:
        outcome = parse_json_object(body)
    except Problem as problem:
        outcome = problem.to_json() if problem.status == 400 else None
    assert isinstance(outcome, dict)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0")), st.integers()
    )
)
def test_a_good_object_comes_through(data: dict[str, int]) -> None:
    assert parse_json_object(json.dumps(data).encode()) == data


@pytest.mark.parametrize("text", [r"what is \u0000?", r"half a pair: \ud83d", "\U0001f600"])
def test_a_text_about_escapes_holds_none(text: str) -> None:
    assert parse_json_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "invalid_request_error"),
        (500, "server_error"),
        (503, "service_unavailable_error"),
    ],
)
def test_the_type_of_a_refusal_says_whose_fault_it_is(status: int, kind: str) -> None:
    assert Problem(status, "code", "words").to_json()["error"]["type"] == kind
