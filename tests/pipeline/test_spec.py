from __future__ import annotations

import fake_steps
import pytest

from delivery.errors import UsageError
from delivery.pipeline.spec import load_pipeline, read_gate

HEAD = "version: 1\nsteps:\n  - uses: make\n"


def load(path, *overrides, text=None, **how):
    if text is not None:
        path.write_text(text)
    return load_pipeline(path, overrides, steps=fake_steps.STEPS, **how)


def test_every_parameter_has_its_value(pipeline_file):
    text = HEAD + "  - {uses: shrink, id: small, with: {scale: 2, skip: [a]}}\n"
    pipeline = load(pipeline_file, text=text + "model: m\ndefaults: {device: cpu, seed: 7}\n")
    assert [s.id for s in pipeline.stages] == ["make", "small"]
    assert pipeline.stage("make").params == {"model": "m", "words": 3}
    small = pipeline.stage("small").instance()
    assert (small.scale, small.skip, small.checkpoint, small.group_size) == (2.0, ("a",), "make", 64)
    assert (pipeline.device, pipeline.seed) == ("cpu", 7)
    assert load(pipeline_file, model="other").stage("make").params["model"] == "other"


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("[]", "wrong-type", "is not a pipeline"),
        ("", "wrong-type", "is not a pipeline"),
        ("steps: []", "missing-key", "the key 'version' is missing"),
        ("version: 2\nsteps: [{uses: make}]", "bad-value", r"yaml:1: version\n  why:  expected 1, got 2"),
        ("version: 1\nsteps: []", "bad-value", "yaml:2: steps"),
        (
            "version: 1\nstepps: []",
            "unknown-key",
            r"yaml:2: unknown key 'stepps'\n  hint: did you mean 'steps'",
        ),
        (HEAD + "    wiht: {}", "unknown-key", r"yaml:4: unknown key 'wiht'\n  hint: did you mean 'with'"),
        (HEAD + "    with: {wrds: 1}", "unknown-key", "yaml:4: step 'make' has no parameter 'wrds'"),
        (
            HEAD + "    with:\n      words: many",
            "wrong-type",
            r"yaml:5: words\n  why:  expected a whole number",
        ),
        (HEAD + "    with: 3", "wrong-type", r"steps.0.with\n  why:  expected a mapping, got 3"),
        (HEAD + "    id: gate", "bad-value", "an id is a letter"),
        (HEAD + "    id: 3", "wrong-type", r"expected text, got 3 \(a whole number\)"),
        (HEAD + "  - uses: make", "duplicate-stage", "two steps have the id 'make'"),
        (HEAD + "  - uses: shrnk", "unknown-step", "did you mean 'shrink'"),
        (HEAD + "  - {uses: shrink, with: {mode: slw}}", "bad-value", "did you mean 'slow'"),
        (
            HEAD + "  - uses: shrink\n    with: {group_size: 0}",
            "bad-group",
            "yaml:5: step 'shrink': a group of 0 words\n  hint: group_size: 64",
        ),
        (HEAD + "gate: {limit: {}}", "unknown-key", "did you mean 'limits'"),
        (HEAD + "gate: {limits: {ttft_p95: 1}}", "unknown-metric", "yaml:4: there is no metric 'ttft_p95'"),
        (
            HEAD + "gate: {limits: {ttft_p95_ms: fast}}",
            "wrong-type",
            "expected a number or a mapping, got 'fast'",
        ),
        (HEAD + "gate: {slo: {output_throughput: 1, ttft_p95: 1}}", "unknown-metric", "no metric 'ttft_p95'"),
        (HEAD + "gate: {limits: {weights_bytes: 3}}", "bad-limit", "both directions"),
        (HEAD + "gate: {metrics: [itl_p95_ms]}", "metric-not-gated", "cannot be gated"),
        (HEAD + "gate: {missing_baseline: no}", "bad-value", "expected 'bootstrap' or 'fail', got 'no'"),
        (HEAD + "defaults: {device: gpu}", "bad-value", "expected 'auto', 'cpu' or 'cuda', got 'gpu'"),
        (HEAD + "defaults: {seed: 1.5}", "wrong-type", "expected a whole number, got 1.5"),
        (HEAD + "release: {chart: x}", "unknown-key", "no step makes a release"),
    ],
)
def test_one_clear_error_with_its_line(pipeline_file, text, code, words):
    with pytest.raises(UsageError, match=f"(?s:{words})") as caught:
        load(pipeline_file, text=text)
    assert caught.value.code == code


WAIVER = "{metric: ttft_p95_ms, owner: me, reason: known, expires: 2030-01-31}"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("2030-01-31", "soon", "expected a date such as 2027-01-31"),
        ("owner: me, ", "", "gate.waivers.0.owner' is missing"),
        ("owner", "ownr", "did you mean 'owner'"),
        ("ttft_p95_ms", "ttft", "there is no metric 'ttft'"),
        ("owner", "check: prob, owner", "the waiver is for 'prob', which is not a check"),
        ("owner", "check: make, owner", "'make', which is not a check.*the checks are probe"),
    ],
)
def test_waivers_are_checked(pipeline_file, old, new, words):
    text = HEAD + f"gate:\n  waivers:\n    - {WAIVER}\n"
    assert load(pipeline_file, text=text).gate["waivers"][0]["expires"] == "2030-01-31"
    with pytest.raises(UsageError, match=f"(?s:{words})"):
        load(pipeline_file, text=text.replace(old, new))


def test_a_waiver_of_a_check_and_a_target_with_two_sides_are_kept(pipeline_file):
    text = HEAD + f"gate:\n  slo: {{weights_bytes: {{min: 1, max: 2}}}}\n  waivers:\n    - {WAIVER}\n"
    gate = load(pipeline_file, text=text.replace("owner", "check: probe, owner")).gate
    assert gate["waivers"][0]["check"] == "probe"
    assert gate["slo"] == {"weights_bytes": {"min": 1.0, "max": 2.0}}


def test_release_section_gives_parameters_to_the_step_that_makes_it(pipeline_file):
    pipeline = load(pipeline_file, text=fake_steps.PIPELINE + "release: {chart: mine}\n")
    assert pipeline.stage("pack").params == {"chart": "mine"}
    with pytest.raises(UsageError, match="step 'pack' has no parameter 'cart'"):
        load(pipeline_file, text=fake_steps.PIPELINE + "release: {cart: mine}\n")


def test_missing_baseline_depends_on_where_it_runs(pipeline_file, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    assert load(pipeline_file).gate["missing_baseline"] == "bootstrap"
    monkeypatch.setenv("CI", "true")
    assert load(pipeline_file).gate["missing_baseline"] == "fail"
    assert load(pipeline_file, "gate.missing_baseline=bootstrap").gate["missing_baseline"] == "bootstrap"
    assert read_gate(pipeline_file)["limits"] == {"ttft_p95_ms": 20.0}


def test_overrides_are_typed(pipeline_file):
    pipeline = load(
        pipeline_file,
        "shrink.group-size=32",
        "shrink.skip=a,b",
        "shrink.limit=none",
        "shrink.strict=true",
        "shrink.token=123",
        "gate.limits.tpot_p95_ms=3",
        "defaults.seed=5",
        "release.chart=x",
        "model=m",
    )
    params = pipeline.stage("shrink").params
    assert params["group_size"] == 32
    assert params["skip"] == ("a", "b")
    assert params["limit"] is None
    assert params["strict"] is True
    assert params["token"] == "123"
    assert pipeline.gate["limits"] == {"ttft_p95_ms": 20.0, "tpot_p95_ms": 3.0}
    assert (pipeline.seed, pipeline.model) == (5, "m")
    assert pipeline.stage("pack").params["chart"] == "x"


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("shrink", "bad-override", "expected ID.KEY=VALUE"),
        ("shrink=1", "bad-override", "expected ID.KEY=VALUE"),
        ("shrink.=1", "bad-override", "expected ID.KEY=VALUE"),
        ("shrnk.mode=slow", "unknown-stage", "--set shrnk.mode: .*no step 'shrnk'\n.*did you mean 'shrink'"),
        ("shrink.grup_size=1", "unknown-key", "did you mean 'group_size'"),
        ("shrink.mode.x=1", "unknown-key", "no parameter 'mode.x'"),
        ("shrink.group_size=x", "wrong-type", "error.wrong-type.: --set shrink.group_size\n.*whole number"),
        ("shrink.mode=slw", "bad-value", "--set shrink.mode: mode\n.*did you mean 'slow'"),
        ("gate.limts.x=1", "unknown-key", "--set gate.limts.*unknown key 'limts'"),
        ("defaults.seed=x", "wrong-type", "--set defaults.seed: defaults.seed"),
        ("defaults.seed.x=1", "wrong-type", "defaults.seed"),
        ("gate.limits.ttft_p95_ms.high=1", "bad-override", "gate.limits.ttft_p95_ms has no keys"),
    ],
)
def test_bad_overrides_name_the_option(pipeline_file, override, code, words):
    with pytest.raises(UsageError, match=f"(?s:{words})") as caught:
        load(pipeline_file, override)
    assert caught.value.code == code


def test_an_override_can_rewire(pipeline_file):
    text = fake_steps.PIPELINE.replace("- uses: assemble", "- uses: assemble\n    inputs: {checkpoint: make}")
    assert str(load(pipeline_file, text=text).stage("assemble").sources["checkpoint"][0]) == "make"
    again = load(pipeline_file, "assemble.checkpoint=shrink")
    assert str(again.stage("assemble").sources["checkpoint"][0]) == "shrink"


def test_selections(pipeline_file):
    pipeline = load(pipeline_file)
    assert [s.id for s in pipeline.needed_for(["assemble"])] == ["make", "shrink", "assemble"]
    assert [s.id for s in pipeline.until("shrink")] == ["make", "shrink"]
    with pytest.raises(UsageError, match=r"has no stage 'shrnk'\n.*did you mean 'shrink'"):
        pipeline.needed_for(["shrnk"])
