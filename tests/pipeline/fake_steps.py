"""Small steps that behave like the real ones: a chain from a source file to a release, in milliseconds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from safetensors import SafetensorError

from delivery.artifact import Kind, hash_file
from delivery.errors import DataError, UsageError
from delivery.gate.report import Finding, Metric, Report, Verdict
from delivery.steps.step import Input, JudgeContext, Known, Peak, StepContext, param, path_of, step, takes


def count(name: str) -> None:
    """Leave a trace of a run, so that tests can tell work from cache: one line in $FAKE_TRACE."""
    if trace := os.environ.get("FAKE_TRACE"):
        with Path(trace).open("a") as stream:
            stream.write(f"{name}\n")


@step
@dataclass(frozen=True, kw_only=True)
class Make:
    """Read a source file into a checkpoint."""

    name: ClassVar[str] = "make"
    uses_device: ClassVar[bool] = False
    makes: ClassVar[Kind] = Kind.CHECKPOINT

    model: str = param("demo", "Path of the source.", path=True)
    words: int = param(3, "How many words.")

    def run(self, ctx: StepContext) -> None:
        count("make")
        with ctx.progress("words", self.words, "words") as task:
            for i in range(self.words):
                (ctx.out / f"word{i}.txt").write_text(f"{self._text()} {i}")
                task.advance()
        (ctx.out / "config.json").write_text('{"architectures": ["Fake"]}')
        ctx.metric("words", self.words, "words", "higher")

    def external(self) -> Mapping[str, str]:
        path = Path(self.model)
        if path.suffix and not path.is_file():
            raise DataError("no-source", f"there is no source {path}")
        return {"source": hash_file(path).sha256} if path.is_file() else {}

    def _text(self) -> str:
        path = Path(self.model)
        return path.read_text() if path.is_file() else self.model


@step
@dataclass(frozen=True, kw_only=True)
class Shrink:
    """Make a checkpoint smaller.

    More words about it.
    """

    name: ClassVar[str] = "shrink"
    makes: ClassVar[Kind] = Kind.CHECKPOINT
    libraries: ClassVar[tuple[str, ...]] = ("click", "no-such-distribution")

    checkpoint: Input = takes(Kind.CHECKPOINT)
    hints: Input = takes(Kind.CALIBRATION, optional=True)
    group_size: int = param(64, "Words per group.")
    mode: str = param("fast", "How.", choices=("fast", "slow"))
    scale: float = param(1.0, "Scale.")
    skip: tuple[str, ...] = param((), "Words to leave.")
    strict: bool = param(False, "Be strict.")
    limit: int | None = param(None, "Most words.")
    token: str = param("", "A password.", secret=True)
    threads: int = param(1, "Threads.", local=True)
    wait_s: float = param(0.0, "Longest wait in the middle.", local=True)
    fail: str = param("", "How to fail.", local=True)

    def check(self) -> None:
        if self.group_size < 1:
            raise UsageError("bad-group", f"a group of {self.group_size} words", hint="group_size: 64")

    def run(self, ctx: StepContext) -> None:
        count("shrink")
        done = sorted(p.name for p in ctx.scratch.iterdir())
        for i in range(3):
            if f"layer{i}" in done:
                count(f"shrink skipped {i}")
                continue
            (ctx.out / f"partial{i}").write_bytes(b"x" * 1000)
            (ctx.scratch / f"layer{i}").write_text("done")
            if i == 1:
                self._pause(ctx)
        for path in ctx.out.iterdir():
            path.unlink()
        (ctx.out / "config.json").write_text(json.dumps({"g": self.group_size, "mode": self.mode}))
        (ctx.out / "weights.bin").write_bytes(bytes(range(256)) * 8192)  # over the size that exports copy

    def _pause(self, ctx: StepContext) -> None:
        if self.wait_s:  # until someone takes the file away
            waiting, end = ctx.scratch / "waiting", time.monotonic() + self.wait_s
            waiting.write_text(str(os.getpid()))
            while waiting.exists() and time.monotonic() < end:
                time.sleep(0.01)
        if self.fail == "disk":
            raise OSError(28, "No space left on device", "weights.bin")
        if self.fail == "serialize":  # how safetensors tells of a full disk
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        if self.fail == "memory":
            raise MemoryError
        if self.fail == "noise":
            print("noise of a library")
            os.write(1, b"noise of a child\n")
        if self.fail == "bug":
            raise TypeError("a bug of this step")

    def preflight(self, inputs: Known, device: str = "cpu") -> None:
        if self.mode == "slow" and inputs["checkpoint"][0].params.get("words") == 13:
            raise UsageError("bad-words", "13 words cannot be made smaller slowly", hint="words: 12")
        folder = path_of(inputs, "checkpoint")
        if folder is not None and self.limit is not None and len(list(folder.iterdir())) > self.limit:
            raise UsageError("too-many", f"{folder.name} has more than {self.limit} files")

    def predict_peak(self, inputs: Known, device: str = "cpu") -> Peak | None:
        folder = path_of(inputs, "checkpoint")
        if folder is None:
            return None
        size = sum(p.stat().st_size for p in folder.iterdir())
        return Peak(10 * size, 2 * size if device == "cuda" else 0)


@step
@dataclass(frozen=True, kw_only=True)
class Assemble:
    """Build an engine."""

    name: ClassVar[str] = "assemble"
    version: ClassVar[int] = 2
    makes: ClassVar[Kind] = Kind.ENGINE
    device_matters: ClassVar[bool] = True
    seed_matters: ClassVar[bool] = False

    checkpoint: Input = takes(Kind.CHECKPOINT)

    def run(self, ctx: StepContext) -> None:
        count("assemble")
        (ctx.out / "engine.json").write_text(ctx.input("checkpoint").digest)


@step
@dataclass(frozen=True, kw_only=True)
class Probe:
    """Measure an engine."""

    name: ClassVar[str] = "probe"
    makes: ClassVar[Kind] = Kind.REPORT

    engine: Input = takes(Kind.ENGINE)
    source: Input = takes(Kind.CHECKPOINT, optional=True)
    baseline_engine: Input = takes(Kind.ENGINE, optional=True)
    value: float = param(10.0, "What is measured.")
    tolerance: float = param(1.0, "Factor on the limit.", judges=True)

    def run(self, ctx: StepContext) -> None:
        count("probe")
        (ctx.out / "measured.json").write_text(json.dumps({"value": self.value, "source": ctx.has("source")}))

    def judge(self, ctx: JudgeContext) -> Report:
        count("judge")
        value = json.loads(ctx.measurement.file("measured.json").read_text())["value"]
        limit = ctx.gate["limits"].get("ttft_p95_ms", 100.0) * self.tolerance
        verdict = Verdict.PASS if value <= limit else Verdict.FAIL
        if value < 0:
            verdict = Verdict.INVALID
        return Report(
            check="probe",
            subject=ctx.input("engine").digest,
            verdict=verdict,
            metrics=(Metric("ttft_p95_ms", value, "ms", "lower", limit, verdict.value),),
            findings=(Finding("info", f"measured for {ctx.model}"),),
            evidence=("measured.json",),
        )


@step
@dataclass(frozen=True, kw_only=True)
class Pack:
    """Package an engine."""

    name: ClassVar[str] = "pack"
    makes: ClassVar[Kind] = Kind.RELEASE

    engine: Input = takes(Kind.ENGINE)
    report: Input = takes(Kind.REPORT, many=True)
    chart: str = param("chart", "Name of the chart.")

    def run(self, ctx: StepContext) -> None:
        count("pack")
        reports = [a.digest for a in ctx.inputs("report")]
        (ctx.out / "release.json").write_text(json.dumps({"chart": self.chart, "reports": reports}))


STEPS = {cls.name: cls for cls in (Make, Shrink, Assemble, Probe, Pack)}

PIPELINE = """\
version: 1
model: demo
steps:
  - uses: make
  - uses: shrink
    with: {group_size: 64}
  - uses: assemble
  - uses: probe
  - uses: pack
gate:
  limits: {ttft_p95_ms: 20}
"""


def render(report: Report, out: Path) -> None:
    """Stands in for `delivery.report.render`: a page."""
    (out / "report.html").write_text(f"<p>{report.verdict.value}")
