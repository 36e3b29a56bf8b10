"""Tool calls are found where templates put them, and nowhere else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from delivery.checkpoint import Tokenizer
from delivery.serving.chat import prompt_ids
from delivery.serving.schema import ChatRequest, Message
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
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
        *(
            (left, left)
            for left in (
                "{broken",
                "[1]",
                "[" * 100_000,
                '{"a":' * 100 + "1" + "}" * 100,
                '{"a": "\\ud800"}',
                '{"a": "\\u0000"}',
            )
        ),
    ],
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


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("call.function.arguments | tojson", '{"a": 1}'),
        ("'```json\\n' + call.function.arguments", '```json\n{"a":1}'),  # DeepSeek's way
    ],
)
def test_templates_may_want_objects_or_text(
    arguments: str, written: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    loops = "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    (model / "chat_template.jinja").write_text(f"{loops}{{{{ {arguments} }}}}{{% endfor %}}{{% endfor %}}")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    tokenizer = Tokenizer.open(model)
    ids = prompt_ids(tokenizer, ChatRequest.model_validate({"messages": messages}))
    assert tokenizer.decode(ids) == written
