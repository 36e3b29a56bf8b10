"""The code behind a measurement: what is measured is another thing when it changed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from delivery.bench import code
from delivery.bench.facts import facts
from delivery.pipeline.keys import Job, differences, key_parts
from delivery.steps.compare import Compare
from delivery.steps.evaluate import Evaluate
from delivery.steps.smoke import Smoke


@pytest.fixture
def package(tmp_path):
    (tmp_path / "engine" / "deep").mkdir(parents=True)
    (tmp_path / "engine" / "deep" / "sampler.py").write_text("one")
    (tmp_path / "device.py").write_text("two")
    return tmp_path


def digest(package):
    return code.digest_of(package, ("engine", "device.py"))


def test_every_file_counts_by_its_place_and_content(package):
    before = digest(package)
    assert before == digest(package)
    (package / "engine" / "deep" / "sampler.py").write_text("one more")
    changed = digest(package)
    (package / "engine" / "deep" / "sampler.py").rename(package / "engine" / "sampler.py")
    moved = digest(package)
    (package / "device.py").write_text("three")
    assert len({before, changed, moved, digest(package)}) == 4


def test_what_is_not_measured_does_not_count(package):
    before = digest(package)
    (package / "cli").mkdir()
    (package / "cli" / "run.py").write_text("x")
    (package / "engine" / "__pycache__").mkdir()
    (package / "engine" / "__pycache__" / "sampler.pyc").write_text("x")
    assert digest(package) == before


def test_our_own_engine_is_found():
    assert len(code.engine_code()) == 64
    assert code.engine_code() != code.digest_of(code._PACKAGE, ("cli",))
    assert facts("cpu")["versions"]["engine code"] == code.engine_code()[:12]


@pytest.mark.parametrize("step", [Compare(), Smoke(), Evaluate(corpus="legal")])
def test_a_changed_engine_is_measured_again(step, monkeypatch):
    """Same version number, same engine artifact, another engine."""
    engine = SimpleNamespace(digest="e" * 64)
    job = Job("x", step, {"engine": (engine,)}, "cpu")
    before = key_parts(job)
    monkeypatch.setattr(code, "engine_code", lambda: "0" * 64)
    after = key_parts(job)
    assert differences(before, after) == ["engine code changed"]


def test_a_server_elsewhere_and_results_of_others_do_not_depend_on_our_engine(tmp_path):
    results = tmp_path / "run.json"
    results.write_text("{}")
    for step in (Compare(runtime="http://gpu:8000"), Compare(results=(str(results),))):
        assert "engine code" not in step.external()
    assert "engine code" in replace(Compare(), rate=2.0).external()
