"""smoke, evaluate and compare run for real on a tiny model, and judge what they measured."""

import contextlib
import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delivery.artifact import Artifact, Kind, Manifest, hash_tree
from delivery.bench.code import engine_code
from delivery.bench.quality import in_turn
from delivery.bench.run import BenchOptions, run_bench
from delivery.errors import DataError, UsageError
from delivery.gate import Verdict
from delivery.report import quality, render
from delivery.steps.compare import Compare
from delivery.steps.evaluate import Evaluate
from delivery.steps.smoke import Smoke

SUITE = """
version: 1
name: tiny
prompts:
  - id: hello
    messages: [{role: user, content: Hello}]
    max_tokens: 6
    expect: {ends: false, loops: true}
  - id: turns
    kind: multi
    messages:
      - {role: user, content: Hello}
      - {role: assistant}
      - {role: user, content: And you}
    max_tokens: 5
    expect: {contains: [never said]}
timing: {prompt: hello, max_tokens: 4}
reference: [Some plain text of a few words.]
"""
WORKLOAD = {
    "requests": 130,
    "warmup": 4,
    "shape": {"kind": "fixed", "prompt_tokens": 4, "output_tokens": 3},
    "arrival": {"kind": "closed", "concurrency": 8},
}


@dataclass
class Context:
    """Stands for the runner's two contexts."""

    out: Path
    engine: Path
    source: Path | None = None
    gate: dict[str, Any] = field(default_factory=lambda: {"missing_baseline": "bootstrap"})
    baseline_engine: Path | None = None
    device: str = "cpu"
    seed: int = 0
    model: str = "tiny"

    def __post_init__(self):
        self.out.mkdir(exist_ok=True)
        self.baselines = self.out.parent / "committed"
        self.local_baselines = self.out.parent / "local"
        self.notes = []

    def input(self, role):
        kind = Kind.CHECKPOINT if role == "source" else Kind.ENGINE
        return Artifact(getattr(self, role), Manifest(kind, "test", 1, params={"role": role}))

    def has(self, role):
        return getattr(self, role, None) is not None

    def progress(self, title, total, unit):
        task = SimpleNamespace(advance=lambda amount=1: None, note=self.notes.append)
        return contextlib.nullcontext(task)

    @property
    def measurement(self):
        made = [f for f in hash_tree(self.out) if f.path.endswith((".json", ".jsonl"))]
        kept = tuple(f for f in made if f.path not in ("report.json", "charts.json"))
        return Artifact(self.out, Manifest(Kind.REPORT, "test", 1, files=kept))


def metric(report, name):
    return next(m for m in report.metrics if m.name == name)


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(SUITE)
    return path


def test_prompts_that_a_short_context_cannot_hold_are_skipped_and_named(tmp_path, tiny_checkpoint):
    """The shipped suite, of which 512 bytes hold neither the long summary nor the reference texts."""
    ctx = Context(tmp_path / "out", tiny_checkpoint, tiny_checkpoint)
    step = Smoke(runs=1)
    step.run(ctx)
    report = step.judge(ctx)
    told = [f for f in report.findings if "was skipped" in f.text]
    assert {f.severity for f in told} == {"warning"}
    (long,) = [f.text for f in told if "'lighthouse'" in f.text]
    assert long.startswith("prompt 'lighthouse' of english was skipped: 1")
    assert long.endswith(" prompt tokens and up to 220 output tokens; the engine holds 512")
    asked = {row["prompt"] for row in json.loads((ctx.out / "smoke.json").read_text())["answers"]}
    assert "lighthouse" not in asked
    assert "ocean" in asked
    assert len(asked) + len(told) == 13
    assert metric(report, "smoke_failed_prompts").value <= len(asked)
    assert metric(report, "smoke_perplexity").value > 1


def test_a_suite_of_which_too_little_is_left_is_refused(tmp_path, tiny_checkpoint, suite):
    text = suite.read_text()
    for changed in ("And you" * 90, "And you"):
        suite.write_text(text.replace("And you", changed).replace("Hello}]", f"{'Hello' * 110}}}]"))
        with pytest.raises(UsageError, match=r"\d of 2 prompts of the suite tiny cannot fit") as caught:
            Smoke(suites=(str(suite),), runs=1).run(Context(tmp_path / "out", tiny_checkpoint))
        assert "'hello' has 5" in caught.value.why  # the timed one


def test_smoke_measures_and_judges(tmp_path, tiny_checkpoint, suite):
    ctx = Context(tmp_path / "out", tiny_checkpoint, tiny_checkpoint)
    step = Smoke(suites=(str(suite),), runs=3)
    assert set(step.external()) == {"tiny.yaml", "engine code"}
    step.run(ctx)
    report = step.judge(ctx)
    render(report, ctx.out)
    assert report.verdict is Verdict.FAIL
    assert metric(report, "smoke_failed_prompts").value >= 1
    assert metric(report, "smoke_unstopped_outputs").status == "fail"
    assert metric(report, "smoke_greedy_agreement_ratio").value == 1.0
    assert metric(report, "smoke_perplexity").value > 1
    assert metric(report, "load_s").value > 0
    assert "tiny/turns: " in " ".join(f.text for f in report.findings)
    measured = json.loads((ctx.out / "smoke.json").read_text())
    turns = next(a for a in measured["answers"] if a["prompt"] == "turns")
    assert len(turns["prompt_ids"]) > len(measured["answers"][0]["prompt_ids"]) + 20
    assert len(measured["timings_ms"]) == 3
    assert all(t > 0 for t in measured["timings_ms"])
    again = step.judge(ctx)
    assert again == report


def test_smoke_without_a_source_says_what_was_not_compared(tmp_path, tiny_checkpoint, suite):
    ctx = Context(tmp_path / "out", tiny_checkpoint)
    step = Smoke(suites=(str(suite),), runs=1)
    step.run(ctx)
    report = step.judge(ctx)
    assert "greedy tokens were not compared" in " ".join(f.text for f in report.findings)
    assert all(m.name != "smoke_greedy_agreement_ratio" for m in report.metrics)


def test_smoke_alarms_when_the_runs_got_slower_and_limits_are_the_pipelines(tmp_path, tiny_checkpoint, suite):
    ctx = Context(tmp_path / "out", tiny_checkpoint)
    step = Smoke(suites=(str(suite),), runs=4)
    step.run(ctx)
    assert step.judge(ctx).verdict is Verdict.FAIL
    assert not ctx.local_baselines.exists()  # what failed is nothing to hold others against
    ctx.gate["limits"] = {"smoke_failed_prompts": 5, "smoke_unstopped_outputs": 5}
    assert step.judge(ctx).verdict is Verdict.PASS
    assert len(list(ctx.local_baselines.rglob("*.json"))) == 1
    path = ctx.out / "smoke.json"
    data = json.loads(path.read_text())
    data["timings_ms"] = [t * 3 for t in data["timings_ms"]]
    path.write_text(json.dumps(data))
    report = step.judge(ctx)
    assert metric(report, "smoke_p95_ms").status == "fail"
    assert metric(report, "smoke_failed_prompts").status == "pass"
    assert report.verdict is Verdict.FAIL
    ctx.gate["limits"] |= {"smoke_perplexity": 1.5}
    assert metric(step.judge(ctx), "smoke_perplexity").status == "fail"


def test_an_unknown_suite_gets_a_suggestion():
    with pytest.raises(UsageError, match="no smoke suite 'englsh'"):
        Smoke(suites=("englsh",)).external()


def test_evaluate_of_a_model_against_itself_is_perfect(tmp_path, tiny_checkpoint):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(
        "\n\n".join(f"Paragraph {i} tells of a small thing number {i * 7}." for i in range(200))
    )
    ctx = Context(tmp_path / "out", tiny_checkpoint, tiny_checkpoint)
    step = Evaluate(corpus=str(corpus), windows=2, window_tokens=160, bleu_prompts=1, bleu_tokens=4)
    step.run(ctx)
    too_strict = {**ctx.gate, "limits": {"perplexity": 2.0}}
    assert step.judge(replace(ctx, gate=too_strict)).verdict is Verdict.FAIL
    assert not ctx.local_baselines.exists()
    report = step.judge(ctx)
    render(report, ctx.out)
    assert report.verdict is Verdict.PASS
    assert metric(report, "corpus_txt_perplexity_ratio").value == pytest.approx(1.0)
    assert metric(report, "corpus_txt_kl_nats").value == pytest.approx(0.0, abs=1e-6)
    assert metric(report, "corpus_txt_kl_late_nats").value == pytest.approx(0.0, abs=1e-6)
    assert metric(report, "corpus_txt_top1_agreement_ratio").value == 1.0
    assert metric(report, "bleu4_ratio").value == 1.0
    garbled = metric(report, "corpus_txt_garbled_ratio")
    assert garbled.value == garbled.baseline
    data = json.loads((ctx.out / "evaluate.json").read_text())
    spans = data["corpora"]["corpus.txt"]
    assert spans["early"]["tokens"] == 2 * 128
    assert spans["late"]["tokens"] == 2 * 31
    assert {**data["corpus_digests"], "engine code": engine_code()} == step.external()
    ctx.gate["limits"] = {"perplexity": 2.0}
    limited = step.judge(ctx)
    assert limited.verdict is Verdict.FAIL
    assert metric(limited, "corpus_txt_perplexity").limit == 2.0
    for part in spans.values():
        if isinstance(part, dict):
            part["nll"] *= 1.05
            part["source_nll"] *= 1.05
    (ctx.out / "evaluate.json").write_text(json.dumps(data))
    ctx.gate["limits"] = {}
    drifted = step.judge(ctx)
    assert drifted.verdict is Verdict.FAIL
    assert "against the last release's" in " ".join(f.text for f in drifted.findings)
    data["read_as"]["tokenizer"] = "f" * 64
    (ctx.out / "evaluate.json").write_text(json.dumps(data))
    other = step.judge(ctx)
    assert other.verdict is Verdict.PASS
    told = "not compared with the last release's perplexities: another tokenizer"
    assert told in [f.text for f in other.findings]


def test_of_two_tasks_or_suites_with_one_name_neither_hides_the_other(tmp_path, suite):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "quiz.jsonl").write_text('{"prompt": "a", "answer": "b"}')
    tasks = tuple(str(tmp_path / folder / "quiz.jsonl") for folder in ("a", "b"))
    with pytest.raises(UsageError, match="two tasks are named 'quiz'"):
        Evaluate(tasks=tasks).preflight({})
    twin = tmp_path / "twin.yaml"
    twin.write_bytes(suite.read_bytes())
    with pytest.raises(UsageError, match="two suites are named"):
        Smoke(suites=(str(suite), str(twin))).preflight({})


def test_garbled_continuations_are_counted_per_corpus_for_both_models():
    clean, broken = "A sentence that anyone could have written about a small thing.", "\ufffdA\ufffd\x00b"
    outputs = {
        "engine": [[1], [2], [3]],
        "source": [[1], [2], [3]],
        "corpora": ["legal", "notes", "legal"],
        "texts": {"engine": [broken, clean, clean], "source": [clean, clean, clean]},
    }
    measured = {"corpora": {}, "continuations": outputs, "tasks": {}}
    judged = {m.name: m for m in quality.metrics(measured, {"garbled_ratio": 0.0})}
    assert (judged["legal_garbled_ratio"].value, judged["legal_garbled_ratio"].baseline) == (0.5, 0.0)
    assert judged["legal_garbled_ratio"].status == "fail"
    assert judged["notes_garbled_ratio"].status == "pass"


def test_a_limit_on_continuations_that_were_not_made_is_told():
    empty = {"engine": [], "source": [], "corpora": [], "texts": {"engine": [], "source": []}}
    metrics = quality.metrics({"corpora": {}, "continuations": empty, "tasks": {}}, {})
    told = quality.not_continued({"bleu4_ratio": 0.5, "garbled_ratio": 0.0, "kl_nats": 1.0}, metrics)
    assert [f.text.split()[2] for f in told] == ["bleu4_ratio", "garbled_ratio"]


def test_every_corpus_has_its_turn_in_what_is_continued():
    windows = {"a": [[1], [2], [3]], "b": [[4]]}
    assert in_turn(windows, 3) == [("a", [1]), ("b", [4]), ("a", [2])]
    assert in_turn({}, 3) == []


def test_evaluate_sees_another_model(tmp_path, tiny_checkpoint):
    import tiny_checkpoint as tiny_model

    other = tiny_model.write(tmp_path / "other", seed=5)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(
        "\n\n".join(f"Paragraph {i} tells of a small thing number {i * 7}." for i in range(200))
    )
    ctx = Context(tmp_path / "out", other, tiny_checkpoint)
    step = Evaluate(corpus=str(corpus), windows=1, window_tokens=64)
    step.run(ctx)
    ctx.gate["limits"] = {"kl_nats": 0.005}
    report = step.judge(ctx)
    assert report.verdict is Verdict.FAIL
    assert metric(report, "corpus_txt_kl_nats").status == "fail"
    assert "KL divergence from the source (corpus txt) is" in report.findings[0].text


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(WORKLOAD))
    return path


@pytest.mark.slow
def test_compare_measures_pairs_in_processes_of_their_own(tmp_path, tiny_checkpoint, workload):
    ctx = Context(tmp_path / "out", tiny_checkpoint, baseline_engine=tiny_checkpoint)
    step = Compare(workload=str(workload), foreign_limit=1.0)
    step.run(ctx)
    report = step.judge(ctx)
    render(report, ctx.out)
    data = json.loads((ctx.out / "compare.json").read_text())
    assert set(data["sides"]) == {"candidate", "baseline"}
    assert data["sides"]["candidate"]["runs"] in (5, 8, 12)
    assert data["kv_tokens"] == data["sides"]["candidate"]["memory"]["kv_tokens"] == 64 * 8 * 2
    assert report.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL)
    assert metric(report, "weights_bytes").value == metric(report, "weights_bytes").baseline
    records = [json.loads(line) for line in (ctx.out / "runs" / "candidate-0.jsonl").read_text().splitlines()]
    assert len(records) == 130
    assert {r["output_tokens"] for r in records} == {3}
    assert all(r["error"] is None for r in records)


@pytest.mark.slow
def test_compare_alone_bootstraps(tmp_path, tiny_checkpoint, workload):
    ctx = Context(tmp_path / "out", tiny_checkpoint)
    step = Compare(workload=str(workload), foreign_limit=1.0, self_test=True)
    step.run(ctx)
    report = step.judge(ctx)
    assert report.verdict is Verdict.BOOTSTRAPPED
    assert metric(report, "self_test_missed").value == 0


@pytest.mark.slow
def test_an_open_loop_is_measured_after_a_look_at_what_the_engine_can_sustain(
    tmp_path, tiny_checkpoint, workload
):
    ctx = Context(tmp_path / "out", tiny_checkpoint)
    step = Compare(workload=str(workload), rate=25.0, foreign_limit=1.0)
    step.run(ctx)
    report = step.judge(ctx)
    data = json.loads((ctx.out / "compare.json").read_text())
    assert data["offered_rate"] == 25.0
    assert data["sides"]["candidate"]["capacity"] == metric(report, "request_capacity").value > 25.0
    assert any(note.startswith("64 in flight: ") for note in ctx.notes)
    fair = metric(report, "request_capacity").value >= 50.0
    assert report.verdict is (Verdict.BOOTSTRAPPED if fair else Verdict.INVALID)


@pytest.mark.slow
def test_an_engine_that_cannot_be_loaded_says_so_through_its_process(tmp_path):
    from delivery.bench.worker import EngineWorker

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"config\.json does not say what the model is"):
        EngineWorker(tmp_path, "cpu")


def test_bench_of_a_path(tmp_path, tiny_checkpoint, workload):
    options = BenchOptions(
        target=str(tiny_checkpoint),
        workload=str(workload),
        requests=20,
        goodput={"ttft": 60_000.0},
        device="cpu",
        out=tmp_path / "bench",
    )
    seen = []
    summary = run_bench(options, seen.append)
    assert summary["completed"] == 20
    assert summary["output_lens"] == [3] * 20
    assert summary["request_goodput"] == summary["request_throughput"]
    assert seen[-1].done == 20
    assert json.loads((tmp_path / "bench" / "summary.json").read_text())["completed"] == 20
    assert len((tmp_path / "bench" / "records.jsonl").read_text().splitlines()) == 20


def test_compare_judges_results_of_another_load_generator(tmp_path, tiny_checkpoint):
    names = []
    for run in range(5):
        data = {
            "input_lens": [16] * 130,
            "output_lens": [8] * 130,
            "ttfts": [0.1 + 0.001 * i + 0.0001 * run for i in range(130)],
            "itls": [[0.01] * 7] * 130,
            "start_times": [float(i) for i in range(130)],
        }
        names.append(str(tmp_path / f"run{run}.json"))
        Path(names[-1]).write_text(json.dumps(data))
    ctx = Context(tmp_path / "out", tiny_checkpoint)
    step = Compare(results=tuple(names), runtime_name="sglang")
    assert len(step.external()) == 5
    step.run(ctx)
    report = step.judge(ctx)
    assert report.verdict is Verdict.BOOTSTRAPPED
    assert report.details["runtime"] == "sglang"
    assert metric(report, "tpot_p95_ms").value == pytest.approx(10.0)
    assert "--results" in report.details["reproduce"]


def test_labelled_tasks_are_counted_for_both_models(tmp_path, tiny_checkpoint):
    from delivery.bench.tasks import read_task

    corpus = tmp_path / "corpus.txt"
    corpus.write_text(
        "\n\n".join(f"Paragraph {i} tells of a small thing number {i * 7}." for i in range(200))
    )
    task = tmp_path / "quiz.jsonl"
    task.write_text(
        '{"prompt": "Say something", "answer": "surely never this", "max_tokens": 3}\n'
        '{"prompt": "Pick", "choices": [" a", " b"], "answer": [" a", " b"]}\n'
        '{"messages": [{"role": "user", "content": "Pick"}], "choices": [" a", " b"], "answer": " a"}\n'
    )
    ctx = Context(tmp_path / "out", tiny_checkpoint, tiny_checkpoint)
    step = Evaluate(corpus=str(corpus), windows=1, window_tokens=32, tasks=(str(task),))
    step.run(ctx)
    report = step.judge(ctx)
    found = metric(report, "quiz_accuracy_ratio")
    assert found.value in (1 / 3, 2 / 3)
    assert found.baseline == found.value
    assert "quiz.jsonl" in step.external()
    ctx.gate["limits"] = {"quiz_accuracy_ratio": 0.9}
    assert step.judge(ctx).verdict is Verdict.FAIL
    task.write_text('{"prompt": "x", "answer": "a", "choices": ["b"]}')
    with pytest.raises(DataError, match=r"quiz\.jsonl:1 is not a question"):
        read_task(task)


def test_a_template_that_never_ends_the_turn_is_seen(tmp_path, tiny_checkpoint, suite):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, broken)
    config = json.loads((broken / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("<|im_end|>", "")
    (broken / "tokenizer_config.json").write_text(json.dumps(config))
    for engine, turns in ((tiny_checkpoint, 0), (broken, 2)):
        ctx = Context(tmp_path / f"out{turns}", engine)
        step = Smoke(suites=(str(suite),), runs=1)
        step.run(ctx)
        report = step.judge(ctx)
        assert metric(report, "smoke_open_turns").value == turns
        assert (metric(report, "smoke_open_turns").status == "fail") is (turns > 0)
    assert "ends assistant turns with no token" in " ".join(f.text for f in report.findings)
