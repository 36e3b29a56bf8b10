"""Tool calls are found where templates put them, and nowhere else."""

from __future__ import annotations

import json

import pytest

from delivery.serving.schema import Message
from delivery.serving.tool_calls import split_tool_calls


def test_a_call_is_taken_out_of_the_text() -> None:
    text, calls = split_tool_calls(
        'One moment. <tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call>'
    )
    assert text == "One moment."
    assert calls[0]["function"]["name"] == "add"
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1, "b": "é"}


def test_a_list_holds_several_calls() -> None:
    _, calls = split_tool_calls('<tool_call>[{"name": "a"}, {"name": "b", "arguments": {}}]</tool_call>')
    assert [call["function"]["name"] for call in calls] == ["a", "b"]
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "<tool_call>{broken</tool_call>",
        "<tool_call>[]",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>"text"</tool_call>',
    ],
)
def test_anything_else_stays_text(text: str) -> None:
    assert split_tool_calls(text) == (text, [])


@pytest.mark.parametrize(
    ("sent", "rendered"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("{broken", "{broken"), ("[1]", "[1]"), ({"a": 1}, {"a": 1})],
)
def test_templates_get_the_arguments_of_a_call_as_an_object(sent: object, rendered: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": sent}}
    message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message.for_template()["tool_calls"] == [
        {**call, "function": {"name": "add", "arguments": rendered}}
    ]


def test_a_message_as_clients_send_it_back_is_taken() -> None:
    message = {"role": "assistant", "content": "x", "function_call": None, "audio": None, "annotations": []}
    assert Message.model_validate(message).for_template() == {"role": "assistant", "content": "x"}
