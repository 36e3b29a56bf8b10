"""Lines of a labelled task: what is a question, and what is refused with its line."""

import pytest

from delivery.bench.tasks import Question, read_task
from delivery.errors import DataError


def test_numbers_are_answers_as_they_are_written(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text(
        '{"prompt": "2 + 2 =", "answer": 4}\n'
        "\n"
        '{"prompt": "2 + 3 =", "answer": [5, "five"], "max_tokens": 3}\n'
        '{"messages": [{"role": "user", "content": "Which?"}], "choices": [1, 2], "answer": 1}\n'
    )
    assert read_task(path) == [
        Question("2 + 2 =", (), (), ("4",), 32),
        Question("2 + 3 =", (), (), ("5", "five"), 3),
        Question("", ({"role": "user", "content": "Which?"},), ("1", "2"), ("1",), 32),
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1, 2]", "expected an object"),
        ("null", "expected an object"),
        ('"text"', "expected an object"),
        ('{"prompt": "a"}', "answer"),
        ('{"prompt": "a", "answer": null}', "expected a text, got None"),
        ('{"prompt": "a", "answer": true}', "expected a text, got True"),
        ('{"prompt": "a", "answer": ""}', "expected a text, got ''"),
        ('{"prompt": "a", "answer": []}', "and an answer"),
        ('{"prompt": "a", "answer": {"x": 1}}', "expected a text"),
        ('{"prompt": ["a"], "answer": "b"}', "prompt is a text"),
        ('{"answer": "b"}', "a prompt or messages"),
        ('{"prompt": "a", "choices": "ab", "answer": "a"}', "choices is a list"),
        ('{"prompt": "a", "choices": ["", "b"], "answer": "b"}', "expected a text"),
        ('{"messages": "abc", "answer": "x"}', "messages is a list"),
        ('{"messages": [{"role": "user"}], "answer": "x"}', "messages is a list"),
        ('{"prompt": "a", "answer": "b", "max_tokens": 0}', "at least 1, got 0"),
        ('{"prompt": "a", "answer": "b", "max_tokens": 1e400}', "at least 1, got inf"),
        ('{"prompt": "a", "answer": "b", "maxtokens": 3}', "unknown key"),
    ],
)
def test_what_is_no_question_is_refused_with_its_line(tmp_path, line, why):
    path = tmp_path / "task.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "b"}}\n{line}\n')
    with pytest.raises(DataError, match=r"task\.jsonl:2 is not a question") as caught:
        read_task(path)
    assert why in caught.value.why
