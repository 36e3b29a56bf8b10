"""Inputs that a step finds for itself are bound where the store has them, in a run and in its plan."""

from dataclasses import dataclass
from typing import ClassVar

import fake_steps
import pytest

from delivery.pipeline.keys import Job
from delivery.pipeline.partners import with_partners
from delivery.pipeline.planner import plan
from delivery.pipeline.spec import load_pipeline
from delivery.steps.step import step

WANTED: dict[str, str] = {}
SEEN: list[object] = []


@step
@dataclass(frozen=True, kw_only=True)
class Probe(fake_steps.Probe):
    """Measure an engine beside another one."""

    name: ClassVar[str] = "probe"

    def partners(self, ctx):
        SEEN.append(ctx)
        return dict(WANTED)


@pytest.fixture(autouse=True)
def _nothing_wanted():
    WANTED.clear()
    SEEN.clear()


@pytest.fixture
def engines(go, store):
    """Two engines of the store."""
    return [go(f"shrink.group_size={size}", stages=["assemble"]).steps[-1].artifact for size in (16, 32)]


def job(engine, **given):
    return Job("probe", Probe(), {"engine": (engine,), **given}, "cpu")


def test_a_partner_is_bound_where_the_store_has_it(engines, store):
    one, other = engines
    WANTED["baseline_engine"] = other.digest
    bound = with_partners(job(one), store, "demo")
    assert bound.inputs["baseline_engine"] == (other,)
    ctx = SEEN[-1]
    assert (ctx.model, ctx.device, ctx.inputs) == ("demo", "cpu", {"engine": one.digest})
    assert ctx.local_baselines == store.workdir / "baselines"
    assert ctx.made_from(one.digest) == one.manifest.inputs
    assert ctx.made_from("0" * 64) == {}


def test_one_that_is_gone_or_damaged_is_left_out(engines, store):
    one, other = engines
    WANTED["baseline_engine"] = "0" * 64
    assert with_partners(job(one), store, "demo") == job(one)
    WANTED["baseline_engine"] = other.digest
    path = other.file("engine.json")
    path.chmod(0o644)
    path.write_text("damaged")
    assert with_partners(job(one), store, "demo") == job(one)


def test_what_was_given_stays_and_unknown_roles_are_ignored(engines, store):
    one, other = engines
    WANTED.update(baseline_engine=other.digest, engine=other.digest, nonsense=other.digest)
    given = job(one, baseline_engine=(one,))
    assert with_partners(given, store, "demo") == given


def test_a_plan_predicts_the_same_key(engines, go, store, pipeline_file, monkeypatch):
    monkeypatch.setitem(fake_steps.STEPS, "probe", Probe)

    def status():
        pipeline = load_pipeline(pipeline_file, ["shrink.group_size=32"], steps=fake_steps.STEPS)
        return plan(pipeline, store)[3].status

    go("shrink.group_size=32")
    assert status() == "judge"
    WANTED["baseline_engine"] = engines[0].digest
    assert status() == "run"
    result = go("shrink.group_size=32")
    assert not result.steps[3].cached
    assert result.steps[3].artifact.manifest.inputs["baseline_engine"] == engines[0].digest
    assert status() == "judge"
