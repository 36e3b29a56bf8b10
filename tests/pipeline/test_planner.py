from __future__ import annotations

import fake_steps

from delivery.pipeline.planner import plan, table
from delivery.pipeline.spec import load_pipeline
from delivery.pipeline.store import Store


def rows(path, store, *overrides, **how):
    pipeline = load_pipeline(path, overrides, steps=fake_steps.STEPS)
    return plan(pipeline, Store(store.workdir, read_only=True), **how)


def snapshot(folder):
    return {p: (p.lstat().st_mtime_ns, p.lstat().st_size) for p in folder.rglob("*")}


def test_before_anything_ran(pipeline_file, store):
    made = rows(pipeline_file, store)
    assert [(r.id, r.status) for r in made] == [
        (s, "run") for s in ("make", "shrink", "assemble", "probe", "pack")
    ]
    assert [r.why for r in made][:2] == ["not made yet", "after make"]
    assert not store.workdir.exists()


def test_after_a_run_it_touches_nothing(pipeline_file, store, go):
    go()
    before = snapshot(store.workdir)
    made = rows(pipeline_file, store)
    assert [r.status for r in made] == ["cached", "cached", "cached", "judge", "cached"]
    assert made[1].peak.host_bytes == 10 * sum(
        p.stat().st_size for p in (store.workdir / "latest/make").resolve().iterdir()
    )
    assert snapshot(store.workdir) == before


def test_it_says_why_a_step_runs_again(pipeline_file, store, go):
    go()
    made = rows(pipeline_file, store, "shrink.group_size=32", until="assemble")
    assert [(r.status, r.why) for r in made] == [
        ("cached", ""),
        ("run", "group_size 64 → 32"),
        ("run", "after shrink"),
    ]
    assert made[1].peak
    assert "group_size 64 → 32" in table(made)
    assert rows(pipeline_file, store, force=["make"])[0].why == "forced"
    assert [r.id for r in rows(pipeline_file, store, stages=["shrink"])] == ["make", "shrink"]


def test_damage_is_predicted_and_left_alone(pipeline_file, store, go):
    result = go()
    path = result.steps[1].artifact.file("weights.bin")
    path.chmod(0o644)
    path.write_bytes(b"x")
    row = rows(pipeline_file, store)[1]
    assert (row.status, row.why) == ("run", "damaged")
    assert path.read_bytes() == b"x"
    assert row.to_json()["why"] == "damaged"
