"""What is told before anything runs: parameters that cannot work with inputs that are known, or predicted."""

from __future__ import annotations

import io

import fake_steps
import pytest

from delivery import device
from delivery.errors import EnvironmentLacking, UsageError
from delivery.pipeline.overrides import as_override
from delivery.pipeline.planner import plan, table
from delivery.pipeline.preflight import Forecast
from delivery.pipeline.progress import Lines
from delivery.pipeline.single import run_step
from delivery.pipeline.spec import load_pipeline


def loaded(path, *overrides):
    return load_pipeline(path, overrides, steps=fake_steps.STEPS)


def test_parameters_that_cannot_work_are_told_before_the_first_step(pipeline_file, store, go, trace):
    wrong = ("make.words=13", "shrink.mode=slow")
    with pytest.raises(UsageError, match=r"step 'shrink': 13 words cannot.*\n  hint: words: 12"):
        go(*wrong)
    assert trace() == []
    with pytest.raises(UsageError, match="step 'shrink': 13 words"):
        plan(loaded(pipeline_file, *wrong), store)
    assert not store.workdir.exists()
    assert go("make.words=13", "shrink.mode=slow", until="make").error is None  # not asked for


def test_what_is_known_after_a_step_is_told_before_the_next(go, trace):
    text = fake_steps.PIPELINE.replace(
        "  - uses: shrink\n", "  - {uses: shrink, id: first}\n  - uses: shrink\n"
    )
    result = go("shrink.limit=2", "shrink.checkpoint=make", text=text)
    assert result.error is not None
    assert result.error.code == "too-many"
    assert "step 'shrink': " in result.error.what
    assert trace() == ["make"]  # `first`, in between, did not run
    assert [s.name for s in result.steps] == ["make"]


def test_a_step_alone_is_told_before_it_starts(go, store, trace):
    made = go(until="make").steps[0].artifact
    trace()
    step = fake_steps.Shrink(checkpoint=made.digest, limit=1)
    with pytest.raises(UsageError, match="more than 1 files"):
        run_step(step, store, Lines(io.StringIO()))
    assert trace() == []


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(device, "gpu_count", lambda: 0)


def test_a_plan_for_a_device_that_is_not_here(pipeline_file, store, without_gpu):
    rows = plan(loaded(pipeline_file, "defaults.device=cuda"), store)
    lacking = {row.id: row.lacks for row in rows}
    assert lacking == {"make": "", "shrink": "a GPU", "assemble": "a GPU", "probe": "a GPU", "pack": "a GPU"}
    assert "after make; needs a GPU, which this machine lacks" in table(rows)
    assert rows[1].to_json()["lacks"] == "a GPU"
    assert not store.workdir.exists()


def test_what_is_made_already_is_known_though_the_device_is_not_here(pipeline_file, store, go, without_gpu):
    go()
    size = sum(p.stat().st_size for p in (store.workdir / "latest/make").resolve().iterdir())
    rows = plan(loaded(pipeline_file, "defaults.device=cuda"), store)
    assert [(r.status, r.why) for r in rows][:3] == [
        ("cached", ""),
        ("run", "unknown without its device"),
        ("run", "after shrink"),
    ]
    # What it takes of the card is predicted all the same, apart from the host's memory.
    told = rows[1].to_json()
    assert (told["predicted_peak_bytes"], told["predicted_gpu_bytes"]) == (10 * size, 2 * size)
    assert ", GPU " in table(rows)
    assert plan(loaded(pipeline_file), store)[1].to_json()["predicted_gpu_bytes"] == 0


def test_the_hint_for_a_missing_gpu_fits_a_pipeline(go, trace, without_gpu):
    with pytest.raises(EnvironmentLacking, match=r"step 'shrink' needs a GPU") as caught:
        go("defaults.device=cuda")
    assert caught.value.hint == "--set defaults.device=cpu; or deliver doctor"
    assert trace() == []
    assert go("defaults.device=cuda", until="make").error is None  # reads files, computes nothing


@pytest.mark.parametrize(
    ("hint", "spoken"),
    [
        ("--group-size 32", "--set s.group_size=32"),
        (
            "a smaller --group-size, --strict, or wait",
            "a smaller --set s.group_size=…, --set s.strict=true, or wait",
        ),
        ("another --mode or other settings", "another --set s.mode=… or other settings"),
        ("--skip a,b; or --scale 0.5.", "--set s.skip=a,b; or --set s.scale=0.5."),
        ("--workdir DIR, or --checkpoint REF", "--workdir DIR, or --checkpoint REF"),
        ("deliver shrink --group-size 3", "deliver shrink --group-size 3"),
    ],
)
def test_hints_speak_of_what_run_takes(hint, spoken):
    assert as_override(hint, "s", fake_steps.Shrink) == spoken


def test_a_hint_from_a_running_step_does_too(go, monkeypatch):
    def fail(self, ctx):
        raise UsageError("bad-group", "too many words", hint="--group-size 3")

    monkeypatch.setattr(fake_steps.Shrink, "run", fail)
    assert go().error.hint == "--set shrink.group_size=3"


def test_the_release_section_takes_values_as_its_step_does(pipeline_file):
    stages = loaded(pipeline_file, "release.chart=7").stages
    assert stages[-1].params["chart"] == "7"
    with pytest.raises(UsageError, match="did you mean 'chart'"):
        loaded(pipeline_file, "release.chrt=7")


def test_an_outline_is_made_once(pipeline_file, store, monkeypatch):
    asked = []

    def outline(self, inputs):
        asked.append(self.words)

    monkeypatch.setattr(fake_steps.Make, "outline", outline)
    stages = loaded(pipeline_file).stages
    forecast = Forecast(stages, store)
    for stage in stages[1:] * 2:
        for found in forecast.inputs(stage).values():
            assert all(ahead.outline is None for ahead in found if ahead.step == "make")
    assert asked == [3]
