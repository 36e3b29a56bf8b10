from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import fake_steps
import pytest

import delivery.pipeline.keys as keys
from delivery.artifact import Artifact, FileRef, Kind, Manifest
from delivery.device import DeviceFingerprint
from delivery.pipeline.keys import Job, differences, key_of, key_parts


def artifact(n: int, kind: Kind = Kind.CHECKPOINT) -> Artifact:
    return Artifact(Path("nowhere"), Manifest(kind, "s", 1, files=(FileRef("f", f"{n:064x}", 1),)))


def shrink(**given) -> Job:
    inputs = {"checkpoint": (given.pop("checkpoint", artifact(1)),), **given.pop("inputs", {})}
    seed, device = given.pop("seed", 0), given.pop("device", "cpu")
    return Job(given.pop("id", "shrink"), fake_steps.Shrink(checkpoint="x", **given), inputs, device, seed)


def key(job: Job) -> str:
    return key_of(key_parts(job))


BASE = key(shrink())


@pytest.mark.parametrize(
    "changed",
    [
        {"group_size": 32},
        {"mode": "slow"},
        {"scale": 2.0},
        {"skip": ("lm_head",)},
        {"strict": True},
        {"limit": 3},
        {"checkpoint": artifact(2)},
        {"inputs": {"hints": (artifact(3, Kind.CALIBRATION),)}},
        {"seed": 1},
    ],
    ids=lambda c: next(iter(c)),
)
def test_what_shapes_the_output_changes_the_key(changed):
    assert key(shrink(**changed)) != BASE


@pytest.mark.parametrize(
    "changed",
    [{"token": "secret"}, {"threads": 8}, {"id": "other"}, {"device": "auto"}, {}],
    ids=lambda c: next(iter(c), "nothing"),
)
def test_what_does_not_shape_it_keeps_the_key(changed):
    assert key(shrink(**changed)) == BASE


def test_the_step_and_its_version():
    @dataclass(frozen=True, kw_only=True)
    class Other(fake_steps.Shrink):
        name: ClassVar[str] = "other"

    @dataclass(frozen=True, kw_only=True)
    class Newer(fake_steps.Shrink):
        version: ClassVar[int] = 2

    found = {key(replace(shrink(), step=cls(checkpoint="x"))) for cls in (fake_steps.Shrink, Other, Newer)}
    assert len(found) == 3


def test_library_versions(monkeypatch):
    assert key_parts(shrink())["libraries"]["no-such-distribution"] == "absent"
    monkeypatch.setattr(keys, "version", lambda name: "99.9")
    assert key(shrink()) != BASE


def test_outside_files(tmp_path):
    source = tmp_path / "source.txt"
    source.write_text("one")
    before = key(Job("make", fake_steps.Make(model=str(source)), {}))
    (tmp_path / "folder").mkdir()
    moved = source.rename(tmp_path / "folder" / "source.txt")
    assert key(Job("make", fake_steps.Make(model=str(moved)), {})) == before
    moved.write_text("two")
    assert key(Job("make", fake_steps.Make(model=str(moved)), {})) != before


def test_the_device_where_it_matters(monkeypatch):
    def on(name: str, step: object) -> str:
        monkeypatch.setattr(keys, "fingerprint", lambda device: DeviceFingerprint(device, name))
        return key(Job("s", step, {"checkpoint": (artifact(1),)}, "cpu"))

    engine, checkpoint = fake_steps.Assemble(checkpoint="x"), fake_steps.Shrink(checkpoint="x")
    assert on("small", engine) != on("large", engine)
    assert on("small", checkpoint) == on("large", checkpoint)


def test_the_seed_only_where_it_matters():
    inputs = {"checkpoint": (artifact(1),)}
    seeds = [Job("a", fake_steps.Assemble(checkpoint="x"), inputs, "cpu", seed) for seed in (0, 1)]
    assert key(seeds[0]) == key(seeds[1])


def test_judging_parameters_and_baselines_are_not_part_of_a_measurement():
    def probe(**params) -> Job:
        return Job(
            "p", fake_steps.Probe(engine="x", **params), {"engine": (artifact(1, Kind.ENGINE),)}, "cpu"
        )

    assert key(probe(tolerance=2.0)) == key(probe())
    assert key(probe(value=2.0)) != key(probe())
    assert probe(tolerance=2.0).params(judging=True)["tolerance"] == 2.0


def test_order_of_many_inputs_counts():
    a, b = artifact(1, Kind.REPORT), artifact(2, Kind.REPORT)
    jobs = [
        Job("k", fake_steps.Pack(engine="x"), {"engine": (artifact(3, Kind.ENGINE),), "report": r}, "cpu")
        for r in ((a, b), (b, a), (a,))
    ]
    assert len({key(j) for j in jobs}) == 3
    assert jobs[2].input_digests()["report"] == (a.digest,)


def test_differences_in_words():
    before, after = (
        key_parts(shrink(checkpoint=artifact(1))),
        key_parts(shrink(checkpoint=artifact(2), group_size=32)),
    )
    assert differences(before, after) == ["group_size 64 → 32", "checkpoint changed"]
    assert differences(before, before) == []
    assert differences(before, {**before, "step_version": 2}) == ["step_version 1 → 2"]
