"""What smoke and evaluate predict, with an engine that is there and with one that is still to be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from delivery.engine import build
from delivery.errors import UsageError
from delivery.steps.build import Build
from delivery.steps.evaluate import Evaluate
from delivery.steps.package import Package
from delivery.steps.smoke import Smoke
from delivery.steps.step import Ahead, Known


@pytest.fixture(scope="module")
def known(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Known]:
    """The same inputs: made, and predicted."""
    folder = tmp_path_factory.mktemp("engine") / "engine"
    build(tiny_checkpoint, folder, device="cpu", max_model_len=128)
    source = [Ahead("convert", {}, tiny_checkpoint)]
    engine = Ahead("build", {"max_session_len": 128}, predict=lambda: Build().outline({"checkpoint": source}))
    return {
        "made": {"engine": [Ahead("build", {}, folder)], "source": source},
        "predicted": {"engine": [engine], "source": source},
    }


def test_peaks(known: dict[str, Known]) -> None:
    for step in (Smoke(), Evaluate()):
        made, predicted = (step.predict_peak(known[k]) for k in ("made", "predicted"))
        assert made is not None
        assert predicted is not None
        assert 450e6 < made.host_bytes < 600e6
        assert abs(made.host_bytes / predicted.host_bytes - 1) < 0.05
        assert made.gpu_bytes == 0
        assert step.predict_peak({}) is None
    more = Evaluate(window_tokens=4096).predict_peak(known["made"])
    assert more is not None
    assert more.host_bytes > 480e6


@pytest.mark.parametrize("when", ["made", "predicted"])
def test_windows_longer_than_the_engine_holds(when: str, known: dict[str, Known]) -> None:
    with pytest.raises(
        UsageError, match=r"--window-tokens is 256\n  why:  the engine was built for 128 tokens"
    ) as e:
        Evaluate().preflight(known[when])
    assert e.value.hint == "--window-tokens 128 or less"
    Evaluate(window_tokens=128).preflight(known[when])
    with pytest.raises(UsageError, match="--bleu-tokens is 128, after 64 tokens of a window"):
        Evaluate(window_tokens=128, bleu_prompts=1).preflight(known[when])
    with pytest.raises(UsageError, match="the source was made for 512 tokens"):
        Evaluate(window_tokens=100_000).preflight({"source": known[when]["source"]})


def test_prompts_longer_than_the_engine_holds(known: dict[str, Known]) -> None:
    with pytest.raises(UsageError, match=r"of the suite english cannot fit\n  why: .* was built for 128"):
        Smoke().preflight(known["made"])
    Smoke().preflight({"source": known["made"]["source"]})  # most prompts fit 512 tokens
    Smoke().preflight({})  # nothing is known yet


def test_sessions_longer_than_the_model(known: dict[str, Known]) -> None:
    with pytest.raises(UsageError, match="--max-session-len 1000 exceeds the model's maximum length"):
        Build(max_session_len=1000).preflight({"checkpoint": known["made"]["source"]})


def test_checks_that_nothing_reports() -> None:
    reports = [Ahead("smoke", {}), Ahead("compare", {})]
    with pytest.raises(UsageError, match=r"no report of evaluate [\s\S]*given of: compare, smoke"):
        Package().preflight({"report": reports})
    Package(require=["smoke", "compare"]).preflight({"report": reports})
    with pytest.raises(UsageError, match=r"names 'smok', which is not a check[\s\S]*did you mean 'smoke'"):
        Package(require=["smok"]).check()
