from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from delivery.pipeline.collect import verify
from delivery.pipeline.locks import locked
from delivery.pipeline.store import Store

SCRIPT = Path(__file__).with_name("fake_run.py")


def start(workdir, pipeline, *overrides, **env):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(workdir), str(pipeline), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
        # Tests that run in a shell's background inherit an ignored SIGINT, and would hand it on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finish(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return json.loads(out), err


def wait_for(pattern, folder):
    for _ in range(2000):
        if found := [p for p in folder.glob(pattern) if p.read_text()]:
            return found[0]
        time.sleep(0.01)
    raise TimeoutError(pattern)


def test_killed_in_the_middle_of_a_step_then_continued(tmp_path, pipeline_file, trace):
    work = tmp_path / "work"
    process = start(work, pipeline_file, "shrink.wait_s=60")
    wait_for("scratch/*/waiting", work)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert trace() == ["make", "shrink"]
    assert [a.manifest.step for a in Store(work).artifacts()] == ["make"]  # nothing half-written
    made, _ = finish(start(work, pipeline_file))
    # What the step had done layer by layer is not done again.
    assert trace() == [
        "shrink", "shrink skipped 0", "shrink skipped 1", "assemble", "probe", "judge", "pack",
    ]  # fmt: skip
    for artifact in Store(work).artifacts():
        verify(artifact)
    undisturbed, _ = finish(start(tmp_path / "other", pipeline_file))
    assert made == undisturbed
    assert not any((work / "scratch").iterdir())


def test_killed_at_every_access_to_the_workdir(tmp_path, pipeline_file):
    result, _ = finish(start(tmp_path / "work", pipeline_file, KILL_POINTS="13"))
    assert result["differing"] == []
    assert result["points"] > 15


def test_two_runs_at_once_do_the_work_once(tmp_path, pipeline_file, trace):
    work = tmp_path / "work"
    first = start(work, pipeline_file, "shrink.wait_s=60")
    waiting = wait_for("scratch/*/waiting", work)
    second = start(work, pipeline_file)
    told = f"shrink: waiting for process {first.pid}, which is doing the same work\n"
    assert any(line == told for line in second.stderr)
    waiting.unlink()
    (a, _), (b, _) = finish(first), finish(second)
    assert a == b
    done = trace()
    assert {name: done.count(name) for name in ("make", "shrink", "assemble", "probe", "pack")} == {
        "make": 1, "shrink": 1, "assemble": 1, "probe": 1, "pack": 1,
    }  # fmt: skip
    for artifact in Store(work).artifacts():
        verify(artifact)


def test_different_runs_at_once_do_not_disturb_each_other(tmp_path, pipeline_file):
    work = tmp_path / "work"
    started = [start(work, pipeline_file, f"shrink.group_size={g}") for g in (16, 32, 64)]
    made = [finish(p)[0] for p in started]
    assert len({m["make"] for m in made}) == 1
    assert len({m["shrink"] for m in made}) == 3
    for artifact in Store(work).artifacts():
        verify(artifact)


def test_a_lock_tells_who_holds_it(tmp_path):
    path = tmp_path / "locks" / "k"
    with locked(path) as had:
        assert had
        with locked(path, wait=False) as again:
            assert not again
        with locked(path, wait=False, shared=True) as again:
            assert not again
        assert path.read_text() == f"process {os.getpid()}"
    with locked(path, shared=True), locked(path, shared=True, wait=False) as both:
        assert both


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_leaves_nothing_half_done(tmp_path, pipeline_file, sign):
    work = tmp_path / "work"
    process = start(work, pipeline_file, "shrink.wait_s=60")
    wait_for("scratch/*/waiting", work)
    process.send_signal(sign)
    process.communicate(timeout=10)
    assert process.returncode != 0
    if sign == signal.SIGINT:  # SIGTERM is turned into this by the command line alone
        assert not any((work / "tmp").iterdir())
    made, _ = finish(start(work, pipeline_file))
    assert set(made) == {"make", "shrink", "assemble", "probe", "pack"}
