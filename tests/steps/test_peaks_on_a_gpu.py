"""Memory predicted for a GPU: the card's and the host's apart, without a card or torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from delivery.errors import EnvironmentLacking
from delivery.steps import sizes
from delivery.steps.build import Build
from delivery.steps.calibrate import Calibrate
from delivery.steps.compare import Compare
from delivery.steps.evaluate import Evaluate
from delivery.steps.quantize import Quantize
from delivery.steps.smoke import Smoke
from delivery.steps.step import Ahead, Known

GIB = 1 << 30
H200_BYTES = 139 * GIB


@pytest.fixture(scope="module")
def known(tiny_checkpoint: Path) -> Known:
    model = [Ahead("convert", {}, tiny_checkpoint)]
    engine = [Ahead("build", {}, predict=lambda: Build().outline({"checkpoint": model}))]
    return {"checkpoint": model, "source": model, "engine": engine}


@pytest.mark.parametrize("step", [Calibrate(), Quantize(scheme="rtn-w4a16"), Smoke(), Evaluate(), Compare()])
def test_host_and_card_are_told_apart(step: object, known: Known) -> None:
    on_cpu, on_gpu = (step.predict_peak(known, device) for device in ("cpu", "cuda"))  # type: ignore[attr-defined]
    assert on_cpu.gpu_bytes == 0
    assert on_gpu.gpu_bytes > 0.5e9  # a process' context alone
    assert 1e9 < on_gpu.host_bytes < 8e9


def test_an_engine_takes_its_share_of_the_card_that_is_here(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "card_bytes", lambda: None)
    elsewhere = Build().predict_peak(known, "cuda")
    monkeypatch.setattr(sizes, "card_bytes", lambda: H200_BYTES)
    here, most = Build().predict_peak(known, "cuda"), Build(max_session_len=512).predict_peak(known, "cuda")
    counted = Build(cache_max_entry_count=200).predict_peak(known, "cuda")
    assert elsewhere is not None
    assert here is not None
    assert most is not None
    assert counted is not None
    assert elsewhere.gpu_bytes < counted.gpu_bytes < here.gpu_bytes <= H200_BYTES
    assert most.gpu_bytes == here.gpu_bytes


def test_smaller_batches_take_less(known: Known) -> None:
    params = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    small = [Ahead("build", params, predict=known["engine"][0]._predict)]
    few, many = (Smoke().predict_peak({"engine": e}, "cuda") for e in (small, known["engine"]))
    assert few is not None
    assert many is not None
    assert few.gpu_bytes < many.gpu_bytes


def test_a_card_too_old_for_the_scheme_is_told_before_anything_runs(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delivery.quantization.hardware.compute_capability", lambda: (7, 5))
    with pytest.raises(EnvironmentLacking, match="sm89 or newer, this GPU has sm75"):
        Quantize(scheme="fp8-dynamic").preflight({}, "cuda")
    with pytest.raises(EnvironmentLacking, match="sm89 or newer"):
        Quantize(scheme="w8a16", recipe="*.down_proj=fp8-dynamic").preflight({}, "cuda")
    Quantize(scheme="fp8-dynamic").preflight({}, "cpu")
    Quantize(scheme="w8a16").preflight({}, "cuda")
    monkeypatch.setattr("delivery.quantization.hardware.compute_capability", lambda: None)
    Quantize(scheme="fp8-dynamic").preflight({}, "cuda")  # planned for a card that is elsewhere
