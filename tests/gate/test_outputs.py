"""Detectors on real outputs: of a good small model, and of the same model really broken."""

import json
import math
from pathlib import Path

import pytest

from delivery.errors import UsageError
from delivery.gate.outputs.expectations import faults
from delivery.gate.outputs.garbling import entropy_bits, garbled
from delivery.gate.outputs.language import language_of
from delivery.gate.outputs.loops import find_loop
from delivery.gate.outputs.markers import leaked_markers
from delivery.gate.outputs.suite import Expectation, parse_suite, suite_from_json
from delivery.gate.outputs.suite_file import read_suite
from delivery.resources import resource

DATA = Path(__file__).parent / "data"
OUTPUTS = json.loads((DATA / "outputs.json").read_text("utf-8"))["outputs"]
CHINESE = json.loads((DATA / "chinese.json").read_text("utf-8"))


def of(model):
    return [o for o in OUTPUTS if o["model"] == model]


def wrong(output):
    return bool(find_loop(output["text"]) or garbled(output["text"], cut=not output["finished"]))


def test_false_alarms_on_outputs_of_a_good_model():
    """200 outputs, of which 26 were cut at the limit while they really repeated one phrase."""
    good = of("good")
    assert len(good) == 200
    assert sum(wrong(o) for o in good if not o["loops"]) <= 2
    assert sum(bool(garbled(o["text"], cut=not o["finished"])) for o in good) == 0
    looping = [o for o in good if o["loops"]]
    assert len(looping) == 26
    assert all(find_loop(o["text"]) for o in looping)


@pytest.mark.parametrize(
    ("model", "least"), [("swapped", 30), ("noisy", 40), ("deaf", 15), ("wrong_rope", 10)]
)
def test_broken_models_are_seen(model, least):
    assert sum(wrong(o) for o in of(model)) >= least


def test_noise_in_the_weights_garbles_and_swapped_layers_loop():
    assert sum(bool(garbled(o["text"], cut=True)) for o in of("noisy")) >= 40
    assert sum(find_loop(o["text"]) is not None for o in of("swapped")) >= 30


def test_english_outputs_are_never_called_another_language():
    assert {language_of(o["text"]) for o in of("good")} <= {"en", ""}


@pytest.mark.parametrize("text", CHINESE["good"])
def test_good_chinese_is_clean(text):
    assert garbled(text) == []
    assert find_loop(text) is None
    assert language_of(text) == "zh"


@pytest.mark.parametrize("text", CHINESE["looping"])
def test_looping_chinese_is_seen(text):
    assert find_loop(text) is not None


@pytest.mark.parametrize("text", CHINESE["garbled"])
def test_garbled_text_is_seen(text):
    assert garbled(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes.",
        "def f(x):\n    return {'a': [1, 2], \"b\": x**2}\n" * 2,
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n" + "-" * 40,
        "The café serves naïve résumés, doesn't it? It's O'Brien's — “really” good…",
        "See https://example.com/a?b=c&d=e#f and write to me@example.com.",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20",
        "- apples\n- pears\n- plums\n- cherries\n- figs\n- dates\n- grapes\n- limes",
        "Ha ha ha, that is funny!",
        "No, no, no. I said no. No means no.",
    ],
)
def test_what_people_write_is_no_alarm(text):
    assert garbled(text) == []
    assert find_loop(text) is None


def test_a_character_cut_in_half_at_the_limit_is_no_fault():
    assert garbled("Paris is lovely \ufffd", cut=True) == []
    assert garbled("Paris is lovely \ufffd")


def test_a_list_that_counts_its_repetitions_is_a_loop():
    text = "\n".join(f"{i}. Chess" for i in range(1, 14))
    assert find_loop(text).times == 13


def test_entropy():
    assert entropy_bits("") == 0.0
    assert entropy_bits("abcd") == 2.0


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The answer is that it was not there.", "en"),
        ("Das ist nicht der richtige Weg, und es ist auch nicht gut.", "de"),
        ("Le chat est dans la maison et il ne veut pas sortir.", "fr"),
        ("これは日本語の文章です。とても短いです。", "ja"),
        ("Это русский текст.", "ru"),
        ("한국어 문장입니다.", "ko"),
        ("这是中文。", "zh"),
        ("12345 !?", ""),
        ("Paris", ""),
    ],
)
def test_languages(text, language):
    assert language_of(text) == language


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ("Paris.<|im_end|>\n<|im_start|>user\nThanks", ["<|im_end|>", "<|im_start|>"]),
        ("Paris.\nuser\nAnd Spain?\nassistant\nMadrid.", ["user"]),
        ("The user asked an assistant.", []),
        ("Sure [/INST] yes", ["[/INST]"]),
        ("Odd <turn> token", ["<turn>"]),
        ("Fine.", []),
    ],
)
def test_markers(raw, found):
    assert leaked_markers(raw, ["<turn>", "<s"]) == found


def kinds(text, *, end="stop", raw=None, **expect):
    return [f.kind for f in faults(text, raw or text, end, Expectation(**expect))]


def test_faults_of_an_answer():
    assert kinds("The capital is Paris.", contains=(("paris",),), language="en") == []
    assert kinds("  ") == ["empty"]
    assert kinds("It goes on and", end="length") == ["unstopped"]
    assert kinds("It goes on and", end="length", ends=False) == []
    assert kinds("Paris.", raw="Paris.<|im_end|>x") == ["marker"]
    assert kinds("I do not know that. " * 9) == ["loop"]
    assert kinds("I do not know that. " * 9, loops=True) == []
    assert kinds("It is Rome.", contains=(("Paris", "Lutetia"),)) == ["expectation"]
    assert kinds("It is Lutetia.", contains=(("Paris", "Lutetia"),)) == []
    assert kinds("It is 42.", regex=(r"^\d+$",)) == ["expectation"]
    assert kinds("I am an AI.", absent=("as an ai", "an AI")) == ["expectation"]
    assert kinds("one two three", words=(4, 9)) == ["expectation"]
    assert kinds("这是一个测试句子。", words=(8, 8)) == []
    assert kinds("Das ist nicht die richtige Antwort.", language="en") == ["expectation"]


def test_json_answers():
    assert kinds('{"name": "Ann"}', json=True) == []
    assert kinds('```json\n{"name": "Ann"}\n```', json=("name",)) == []
    assert kinds('{"name": "Ann"}', json=("age",)) == ["expectation"]
    assert kinds("name: Ann", json=True) == ["expectation"]


SUITE = {
    "version": 1,
    "name": "s",
    "language": "en",
    "prompts": [
        {
            "id": "a",
            "messages": [{"role": "user", "content": "Hi"}],
            "expect": {"contains": ["x", ["y", "z"]], "words": [1, 5], "json": ["k"], "language": ""},
        },
        {
            "id": "b",
            "kind": "multi",
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant"},
                {"role": "user", "content": "Bye"},
            ],
        },
    ],
    "timing": {"prompt": "b", "max_tokens": 9},
    "reference": ["Some text."],
}


def test_a_suite_survives_json():
    from dataclasses import asdict

    suite = parse_suite(SUITE, "s.yaml")
    assert suite.prompts[0].expect.contains == (("x",), ("y", "z"))
    assert suite.prompts[1].expect.language == "en"
    assert suite.timing_prompt == "b"
    assert suite_from_json(json.loads(json.dumps(asdict(suite)))) == suite


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "version is 2"),
        ({"prompt": []}, "did you mean 'prompts'"),
        ({"prompts": []}, "ids that differ"),
        ({"prompts": [SUITE["prompts"][0]] * 2}, "ids that differ"),
        ({"prompts": [{**SUITE["prompts"][0], "kind": "sumary"}]}, "did you mean 'summary'"),
        ({"prompts": [{**SUITE["prompts"][0], "expect": {"contain": []}}]}, "did you mean 'contains'"),
        ({"prompts": [{**SUITE["prompts"][0], "expect": {"regex": ["("]}}]}, r"regex '\('"),
        ({"prompts": [{**SUITE["prompts"][0], "expect": {"words": [5, 1]}}]}, "least, most"),
        ({"prompts": [{"id": "a", "messages": [{"role": "assistant", "content": "x"}]}]}, "last message"),
        ({"prompts": [{"id": "a", "messages": [{"role": "user"}]}]}, "a role of"),
        ({"language": "english"}, "language 'english'"),
        ({"timing": {"prompt": "c"}}, "no prompt 'c'"),
        ({"reference": "text"}, "expected a list"),
        ({"reference": [None]}, "expected a text, got None"),
        ({"name": None}, "expected a text, got None"),
        ({"judged": "no"}, "expected true or false, got 'no'"),
        ({"timing": {"max_tokens": "x"}}, "at least 1, got 'x'"),
        ({"timing": {"max_tokens": -3}}, "at least 1, got -3"),
        ({"prompts": [{**SUITE["prompts"][0], "id": None}]}, "id is not .*\n.*expected a text, got None"),
        ({"prompts": [{**SUITE["prompts"][0], "max_tokens": "abc"}]}, "at least 1, got 'abc'"),
        ({"prompts": [{**SUITE["prompts"][0], "max_tokens": math.inf}]}, "at least 1, got inf"),
        ({"prompts": [{**SUITE["prompts"][0], "expect": {"words": [1, None]}}]}, "whole number .*got None"),
        ({"prompts": [{**SUITE["prompts"][0], "expect": {"contains": [None]}}]}, "expected a text, got None"),
        ({"prompts": [{**SUITE["prompts"][0], "expect": {"contains": [[]]}}]}, "alternatives is empty"),
        ({"prompts": [{**SUITE["prompts"][0], "expect": {"absent": [""]}}]}, "expected a text, got ''"),
        ({"prompts": [{**SUITE["prompts"][0], "expect": {"json": "yes"}}]}, "true or false, got 'yes'"),
        ({"prompts": [{"id": "a", "messages": [{"role": "user", "content": "\ud800"}]}]}, "surrogate"),
    ],
)
def test_a_suite_that_says_nothing_is_refused(change, match):
    with pytest.raises(UsageError) as caught:
        parse_suite({**SUITE, **change}, "s.yaml")
    import re

    assert re.search(match, caught.value.render())


def test_a_number_that_an_answer_has_to_contain_needs_no_quotes():
    expect = {"contains": [42, [7, "seven"]], "absent": [3.5]}
    prompts = [{**SUITE["prompts"][0], "expect": expect}]
    found = parse_suite({**SUITE, "prompts": prompts, "timing": {}}, "s.yaml")
    assert found.prompts[0].expect.contains == (("42",), ("7", "seven"))
    assert found.prompts[0].expect.absent == ("3.5",)


def test_an_answer_may_be_asked_for_in_one_line():
    prompts = [{**SUITE["prompts"][0], "expect": {"absent": ["\n"]}}]
    found = parse_suite({**SUITE, "prompts": prompts, "timing": {}}, "s.yaml")
    assert found.prompts[0].expect.absent == ("\n",)


def test_a_day_that_does_not_exist_is_no_bug(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("version: 1\nname: 2026-02-30\n")
    with pytest.raises(UsageError, match=r"s\.yaml cannot be read"):
        read_suite(path)


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("a: [1")
    with pytest.raises(UsageError, match=r"s\.yaml cannot be read"):
        read_suite(path)
    path.write_text("version: 1\nversion: 2\n")
    with pytest.raises(UsageError, match="cannot be read"):
        read_suite(path)


@pytest.mark.parametrize("path", sorted(resource("smoke").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_suite_is_valid_and_has_all_kinds(path):
    suite = read_suite(path)
    assert suite.name == path.stem
    assert {p.kind for p in suite.prompts} == {"single", "multi", "summary"}
    assert suite.reference
