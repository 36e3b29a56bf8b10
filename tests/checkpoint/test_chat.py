"""Chat templates render as in transformers, in a sandbox; their refusals keep their own words."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizer_samples import byte_level, save

from delivery.checkpoint import Tokenizer
from delivery.checkpoint.chat import render
from delivery.errors import DataError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi \u6771\u4eac <b>"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": "\u00e9<>"}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "tools": "{{ bos_token }}{% if tools %}{{ tools | tojson }}\n{% endif %}{%- for m in messages %}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c | tojson(indent=2) }}{% endfor %}"
    "{% else %}{{ m['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}",
    "loops": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "whitespace": "  {% if true %}\n    x\n  {% endif %}\n{{ strftime_now('%Y') | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(name: str, tools: list | None, prompt: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = save(byte_level(), tmp_path / "t", chat_template=TEMPLATES[name])
    ours = Tokenizer.open(folder).apply_chat_template(CHAT, tools=tools, add_generation_prompt=prompt)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CHAT, tools=tools, add_generation_prompt=prompt, tokenize=False
    )
    assert ours == theirs


def test_ids_of_a_chat_hold_the_special_tokens_of_the_template_only(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path / "t", chat_template=TEMPLATES["chatml"], add_bos_token=True)
    ids = Tokenizer.open(folder).encode_chat([{"role": "user", "content": "x"}])
    assert ids[0] == 3
    assert ids.count(3) == 2
    assert 0 not in ids


def test_where_templates_are_found(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path / "t", chat_template="from the config")
    assert Tokenizer.open(folder).apply_chat_template([]) == "from the config"
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert Tokenizer.open(folder).apply_chat_template([]) == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.open(folder).apply_chat_template([]) == "from jinja"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert Tokenizer.open(folder).apply_chat_template([]) == "from jinja"
    assert Tokenizer.open(folder).apply_chat_template([], tools=TOOLS) == "with tools"


def test_named_templates_of_the_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = save(byte_level(), tmp_path / "t", chat_template=named)
    assert Tokenizer.open(folder).apply_chat_template([]) == "plain"
    assert Tokenizer.open(folder).apply_chat_template([], tools=TOOLS) == "tools"


def test_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(save(byte_level(), tmp_path / "t"))

    with pytest.raises(DataError, match="has no chat template"):
        tokenizer.apply_chat_template(CHAT)
    only_other = save(byte_level(), tmp_path / "u", chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(DataError, match="only templates named rag are there"):
        Tokenizer.open(only_other).apply_chat_template(CHAT)


def test_a_template_that_refuses_keeps_its_words() -> None:
    with pytest.raises(DataError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", CHAT)
    assert caught.value.code == "chat-template-refused"


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ missing.attribute.of }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_broken_and_hostile_templates_are_one_error(template: str) -> None:
    with pytest.raises(DataError, match="chat template cannot be rendered") as caught:
        render(template, CHAT)
    assert caught.value.code == "chat-template-damaged"


def test_templates_see_plain_values_only() -> None:
    class Sneaky(str):
        def write(self) -> str:
            return "called"

    assert render("{{ messages[0].content.write is defined }}", [{"content": Sneaky("x")}]) == "False"
    assert render("{{ messages[0].content }}", [{"content": object()}]) == "<object>"
