from __future__ import annotations

import fake_steps
import pytest

from delivery.errors import UsageError
from delivery.pipeline.spec import load_pipeline


def sources(path, text):
    path.write_text("version: 1\nsteps:\n" + text)
    pipeline = load_pipeline(path, steps=fake_steps.STEPS)
    return {
        s.id: {role: [str(x) for x in found] for role, found in s.sources.items()} for s in pipeline.stages
    }


CHAIN = "- uses: make\n- uses: shrink\n- uses: assemble\n- uses: probe\n- uses: pack\n"


def test_the_chain_wires_itself(pipeline_file):
    assert sources(pipeline_file, CHAIN) == {
        "make": {},
        "shrink": {"checkpoint": ["make"]},
        "assemble": {"checkpoint": ["shrink"]},
        # `source` is the origin, not the nearest; a second engine is never guessed.
        "probe": {"engine": ["assemble"], "source": ["make"]},
        "pack": {"engine": ["assemble"], "report": ["probe"]},
    }


def test_source_follows_the_engine_to_its_own_origin(pipeline_file):
    two = "- {uses: make, id: a}\n- {uses: make, id: b}\n- uses: shrink\n- uses: assemble\n- uses: probe\n"
    assert sources(pipeline_file, two)["probe"]["source"] == ["b"]


def test_reports_about_another_engine_stay_out(pipeline_file):
    text = (
        "- uses: make\n- {uses: assemble, id: plain}\n- {uses: probe, id: probe_plain}\n"
        "- uses: shrink\n- {uses: assemble, id: small}\n- {uses: probe, id: probe_small}\n- uses: pack\n"
    )
    wired = sources(pipeline_file, text)
    assert wired["plain"]["checkpoint"] == ["make"]
    assert wired["small"]["checkpoint"] == ["shrink"]
    assert wired["pack"] == {"engine": ["small"], "report": ["probe_small"]}


def test_explicit_inputs(pipeline_file):
    text = CHAIN.replace(
        "- uses: probe\n",
        '- {uses: probe, inputs: {source: null, baseline_engine: "ref:last"}}\n',
    ).replace("- uses: pack", "- {uses: pack, inputs: {report: [probe]}}")
    wired = sources(pipeline_file, text)
    assert wired["probe"] == {"engine": ["assemble"], "baseline_engine": ["ref:last"]}
    assert wired["pack"]["report"] == ["probe"]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (
            "- uses: shrink\n",
            "missing-input",
            "input 'checkpoint' is missing\n.*no earlier step makes a checkpoint",
        ),
        ("- uses: make\n- uses: probe\n", "missing-input", "no earlier step makes an engine"),
        (
            "- uses: make\n- {uses: shrink, inputs: {chekpoint: make}}\n",
            "unknown-key",
            "did you mean 'checkpoint'",
        ),
        ("- {uses: make, inputs: {x: y}}\n", "unknown-key", "it has no inputs"),
        (
            "- uses: make\n- {uses: shrink, inputs: {checkpoint: mke}}\n",
            "unknown-stage",
            "did you mean 'make'",
        ),
        (
            "- {uses: shrink, inputs: {checkpoint: make}}\n- uses: make\n",
            "unknown-stage",
            "comes after those",
        ),
        (
            "- uses: make\n- {uses: assemble, id: e}\n- {uses: shrink, inputs: {checkpoint: e}}\n",
            "wrong-kind",
            "yaml:5: .*expected a step that makes a checkpoint, got one that makes an engine",
        ),
        (
            "- uses: make\n- {uses: shrink, inputs: {checkpoint: [make, make]}}\n",
            "wrong-type",
            "takes one step",
        ),
        ("- uses: make\n- {uses: shrink, inputs: {checkpoint: null}}\n", "missing-input", "is missing"),
    ],
)
def test_what_cannot_be_wired(pipeline_file, text, code, words):
    with pytest.raises(UsageError, match=f"(?s:{words})") as caught:
        sources(pipeline_file, text)
    assert caught.value.code == code
