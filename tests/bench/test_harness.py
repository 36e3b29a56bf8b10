"""Tasks of lm-evaluation-harness: told when it is not installed; a task of ours where it is."""

import json
import sys

import pytest

from delivery.bench import harness
from delivery.errors import DataError, EnvironmentLacking
from delivery.steps.evaluate import Evaluate

CHOICES = """
task: learnt_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["{{{{right}}}}", "{{{{wrong}}}}"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
TEXT = """
task: learnt_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{greedy}}}}"
generation_kwargs: {{until: ["\n\n"], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def test_without_the_package_it_is_told_before_anything_runs(monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentLacking, match="not installed") as caught:
        Evaluate(harness=("hellaswag",)).check()
    assert caught.value.exit_code == 6
    Evaluate().check()


def test_a_task_without_right_answers_is_refused():
    assert harness._share("t", {"acc_norm,none": 0.1, "acc,none": 0.5}) == 0.5
    assert harness._share("t", {"exact_match,strict": 0.25}) == 0.25
    with pytest.raises(DataError, match="reports no accuracy"):
        harness._share("wikitext", {"word_perplexity,none": 12.0})


def test_the_harness_is_part_of_what_identifies_a_measurement(tmp_path, monkeypatch):
    task = tmp_path / "t.yaml"
    task.write_text("task: t")
    corpus = tmp_path / "c.txt"
    corpus.write_text("text")
    monkeypatch.setattr(harness, "installed_version", lambda: "0.4.9")
    found = Evaluate(corpus=str(corpus), harness=(str(task), "hellaswag")).external()
    assert found["lm-eval"] == "0.4.9"
    assert "t.yaml" in found
    assert "lm-eval" not in Evaluate(corpus=str(corpus)).external()


@pytest.mark.slow
def test_tasks_are_answered_by_the_engine(tiny_checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    from delivery.engine import LLM, SamplingParams

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    questions = ["One two three", "The mill stands", "Count to five"]
    with LLM(tiny_checkpoint, device="cpu") as llm:
        rows = []
        for question in questions:
            made = llm.generate([question], SamplingParams(max_tokens=4, temperature=0.0))[0].text
            scores = {c: float(llm.score([question + c])[0][-1]) for c in ("a", "b")}
            right, wrong = sorted(scores, key=scores.__getitem__, reverse=True)
            rows.append({"question": question, "greedy": made, "right": right, "wrong": wrong})
        data = tmp_path / "data.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)))
        for name, text in (("learnt_choice", CHOICES), ("learnt_text", TEXT)):
            (tmp_path / f"{name}.yaml").write_text(text.format(data=data))
        files = [str(tmp_path / f"{name}.yaml") for name in ("learnt_choice", "learnt_text")]
        done = []
        found = harness.run_tasks(llm, files, 0, done.append)
        assert found["learnt_choice"] == {"questions": 3, "right": 3.0}
        assert found["learnt_text"] == {"questions": 3, "right": 3.0}
        assert harness.run_tasks(llm, files[:1], 2, done.append)["learnt_choice"]["questions"] == 2
        assert done == ["learnt_choice", "learnt_text", "learnt_choice"]
    assert "lm_eval" in sys.modules
