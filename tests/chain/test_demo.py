"""The demo as users run it: packaged in one command, then cached, then re-run from what changed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from demo_run import DELIVER, PIPELINE, run_demo, user_environment

from delivery.artifact import read_artifact, read_hash, walk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STAGES = ["convert", "calibrate", "quantize", "build", "smoke", "evaluate", "compare", "package"]
PEAK_BYTES = 4 << 30


def test_the_demo_ends_in_a_release(demo, workdir):
    assert demo.code == 0, demo.err
    assert demo.names == STAGES
    release = Path(demo.shown["release"])
    assert release.is_dir()
    assert (release / "report.html").is_file()
    assert list(release.glob("*.tgz"))
    records = [json.loads(path.read_text("utf-8")) for path in workdir.glob("artifacts/*/run.json")]
    peaks = {r["stage"]: r["peak_rss_bytes"] for r in records if "peak_rss_bytes" in r}
    assert set(peaks) == set(STAGES)
    assert all(0 < peak < PEAK_BYTES for peak in peaks.values()), peaks


def test_again_everything_is_cached(demo, workdir):
    again = run_demo(workdir)
    assert (again.code, again.cached) == (0, STAGES)
    assert [s["artifact"] for s in again.shown["steps"]] == [s["artifact"] for s in demo.shown["steps"]]


def test_a_changed_parameter_re_runs_what_follows(demo, workdir):
    planned = run_demo(workdir, "--plan", "--set", "quantize.group_size=32")
    assert [s["id"] for s in planned.shown["steps"] if s["status"] == "cached"] == ["convert", "calibrate"]


def test_killed_and_continued(source, tmp_path):
    """Killed in quantize: what was done stays, nothing is half-written, and the rest follows."""
    work = tmp_path / "work"
    command = [*DELIVER, "run", str(PIPELINE), "--workdir", str(work), "--model", str(source)]
    command += ["--until", "build", "--set", "quantize.scheme=rtn-w4a16"]
    told = tmp_path / "err"
    with told.open("w") as err:
        child = subprocess.Popen(
            command,
            stderr=err,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=user_environment(),
        )
        deadline = time.monotonic() + 900
        # Hidden states are kept every twenty seconds; calibrate's are gone once it is done.
        while "quantize: layer" not in told.read_text() or not list(work.glob("scratch/*/layers/state.json")):
            assert child.poll() is None, told.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    for folder in (work / "artifacts").iterdir():
        artifact = read_artifact(folder)
        assert {name: read_hash(path).sha256 for name, path in walk(folder)} == {
            f.path: f.sha256 for f in artifact.manifest.files
        }
    done = subprocess.run(command, capture_output=True, text=True, env=user_environment())
    assert done.returncode == 0, done.stderr
    assert "quantize: resuming after layer" in done.stderr
    assert "quantize: layer 1 of" not in done.stderr  # finished layers are not made again
