"""`deliver baseline noise`: one engine against itself."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_paired import Machine

from delivery.artifact import Artifact, Kind, Manifest
from delivery.bench import noise
from delivery.cli._group import commands
from delivery.errors import Undecided, UsageError
from delivery.gate.record import RequestRecord


@pytest.fixture
def deliver(monkeypatch, tmp_path):
    """Exit output of `deliver baseline noise`, with an engine whose runs take turns at `slower`."""

    def call(*arguments, slower=(1.0,), broken=None, settings=None):
        log = []

        @contextmanager
        def session(path, device, options):
            assert options["cache_max_entry_count"] > 0
            machine = Machine("a", log, slower=slower)
            machine.settings = settings or {}
            if broken:
                run = machine.run
                failing = RequestRecord("r0", 0.0, 0.0, None, None, 4, 0, error=broken)
                machine.run = lambda *asked: ([failing, *run(*asked)[0][1:]], run(*asked)[1])
            yield machine

        monkeypatch.setattr(noise, "worker_session", session)
        found = Artifact(Path(tmp_path), Manifest(Kind.ENGINE, "build", 1))
        monkeypatch.setattr("delivery.cli.baseline.resolve", lambda *_: found)
        command = ["baseline", "noise", "e1", "--device", "cpu", "--workdir", str(tmp_path), *arguments]
        done = CliRunner().invoke(commands, command, catch_exceptions=False, standalone_mode=False)
        return done.stdout, log

    return call


def test_a_quiet_machine_shows_small_changes(deliver):
    out, log = deliver("--json", "--runs", "6")
    found = json.loads(out)
    assert [number for _, number in log] == ["warm", 0, 1, 2, 3, 4, 5]
    assert set(found["metrics"]) == {"ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms"}
    tpot = found["metrics"]["tpot_p95_ms"]
    assert tpot["value_ms"] == pytest.approx(52, abs=3)
    assert tpot["spread"] < 0.02
    assert 0 < tpot["minimum_effect"] < 0.03
    assert not tpot["noisy"]


def test_a_loud_one_is_warned_about(deliver):
    out, _ = deliver(slower=(1.0, 1.15))
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["metric", "value", "spread", "smallest", "effect"]
    assert all("noisy: over 5 %" in line for line in out.splitlines()[1:])
    assert len(rows) == 4


def test_the_noise_of_a_queue_is_not_measured(deliver, tmp_path):
    """The engine can sustain 40 requests a second; `mixed` asks 8."""
    assert json.loads(deliver("--json", "--workload", "mixed")[0])["metrics"]
    shape, arrival = {"prompt_tokens": 4, "output_tokens": 8}, {"kind": "poisson", "rate": 30.0}
    path = tmp_path / "fast.json"
    path.write_text(json.dumps({"requests": 130, "shape": shape, "arrival": arrival}))
    with pytest.raises(Undecided, match="the noise of a queue") as caught:
        deliver("--workload", str(path))
    assert "send at most 20" in caught.value.render()


def test_requests_that_the_engine_refuses_are_no_noise(deliver):
    with pytest.raises(UsageError, match=r"workload fixed cannot fit\n  why:  1024 .* the engine holds 256"):
        deliver("--workload", "fixed", settings={"max_model_len": 256})
    with pytest.raises(Undecided, match=r"5 of 650 requests failed\n  why:  first: it burns"):
        deliver("--runs", "5", broken="it burns")
