from __future__ import annotations

import json

import fake_steps
import jsonschema
import pytest

from delivery.pipeline.schema import pipeline_schema
from delivery.pipeline.source import parse_text, read_yaml
from delivery.resources import resource


def errors(text, steps=fake_steps.STEPS):
    schema = pipeline_schema(steps)
    jsonschema.Draft202012Validator.check_schema(schema)
    return list(jsonschema.Draft202012Validator(schema).iter_errors(parse_text(text, "t")))


def test_it_accepts_what_deliver_accepts():
    assert errors(fake_steps.PIPELINE) == []
    full = fake_steps.PIPELINE + "release: {chart: x}\ndefaults: {seed: 1}\n"
    assert errors(full.replace("group_size: 64", "skip: [a], limit: null, mode: slow")) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("group_size: 64", "grup_size: 64"),
        ("group_size: 64", "group_size: many"),
        ("group_size: 64", "mode: slw"),
        ("uses: make", "uses: mke"),
        ("- uses: probe", "- {uses: probe, inputs: {engin: assemble}}"),
        ("version: 1", "version: 2"),
        ("limits:", "limit:"),
        ("model: demo", "model: demo\nrelease: {cart: x}"),
    ],
)
def test_it_refuses_what_deliver_refuses(old, new):
    assert old in fake_steps.PIPELINE
    assert errors(fake_steps.PIPELINE.replace(old, new))


def test_no_secret_default_is_published():
    assert "default" not in json.dumps(pipeline_schema({"shrink": fake_steps.Shrink}))[:0] + json.dumps(
        pipeline_schema({"shrink": fake_steps.Shrink})["properties"]["steps"]["items"]["oneOf"][0][
            "properties"
        ]["with"]["properties"]["token"]
    )


def test_the_published_schema_is_up_to_date():
    published = json.loads(resource("pipelines/pipeline.schema.json").read_text("utf-8"))
    assert published == json.loads(json.dumps(pipeline_schema())), (
        "run: python -m delivery.pipeline.schema > pipelines/pipeline.schema.json"
    )


def test_the_shipped_pipelines_fit_it():
    validator = jsonschema.Draft202012Validator(pipeline_schema())
    shipped = sorted(resource("pipelines").glob("*.yaml"))
    assert shipped
    for path in shipped:
        assert list(validator.iter_errors(read_yaml(path).data)) == [], path
