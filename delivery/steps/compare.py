"""The compare check: latency and memory of the engine against a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from delivery.artifact import Artifact, Kind, hash_files
from delivery.bench.code import code_in_key
from delivery.errors import UsageError
from delivery.steps.step import (
    Input,
    JudgeContext,
    Known,
    PartnerContext,
    Peak,
    StepContext,
    param,
    step,
    takes,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from delivery.bench.session import Session
    from delivery.bench.workload import Workload
    from delivery.gate.baseline import Snapshot
    from delivery.gate.lookup import Place
    from delivery.gate.report import Report


@step
@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare latency and memory with a baseline, using statistics that are robust to noise.

    Both engines run side by side, interleaved A B B A, in 5, 8 or 12 pairs until the result is clear: with
    --baseline-engine, or with the engine of the stored baseline while the workdir still has it. Otherwise
    the runs are compared with the stored runs of this model, device and workload; `missing_baseline` in
    the pipeline's gate decides what happens if there are none.
    """

    name: ClassVar[str] = "compare"
    version: ClassVar[int] = 2
    makes: ClassVar[Kind] = Kind.REPORT
    libraries: ClassVar[tuple[str, ...]] = ("torch", "triton")
    device_matters: ClassVar[bool] = True

    engine: Input = takes(Kind.ENGINE, "The engine to judge.")
    baseline_engine: Input = takes(Kind.ENGINE, "The engine to compare with, side by side.", optional=True)
    workload: str = param(
        "demo", "Workload: the name of a built-in one, or a JSON file.", metavar="NAME|FILE", path=True
    )
    rate: float = param(
        0.0,
        "Requests per second, Poisson arrivals; 0: the workload's arrivals.",
        metavar="R",
        at_least=0,
    )
    runs: int = param(5, "Number of runs against a stored baseline; at least 5.")
    kv_tokens: int = param(
        0,
        "KV cache size of both sides in tokens; 0: twice what the workload needs.",
        metavar="TOKENS",
        at_least=0,
    )
    paired: str = param(
        "auto",
        "Run the stored baseline's engine side by side if the workdir has it; off: use its stored runs.",
        choices=("auto", "off"),
        local=True,
    )
    runtime: str = param(
        "", "Measure this OpenAI-compatible server instead of the bundled engine.", metavar="URL"
    )
    runtime_name: str = param(
        "",
        "Engine behind --runtime: vllm, lmdeploy, sglang; default: as the server reports it.",
        metavar="NAME",
    )
    results: tuple[str, ...] = param(
        (),
        "Result files of vllm bench serve or GuideLLM, one per run, to judge instead of measuring.",
        metavar="FILE",
        path=True,
    )
    limit: float = param(
        1.15,
        "Maximum ratio of a latency percentile to the baseline's.",
        metavar="RATIO",
        judges=True,
        at_least=1,
    )
    memory_limit: float = param(
        0.10,
        "Maximum relative deviation of memory from the baseline's (0.1: 10 %).",
        metavar="SHARE",
        judges=True,
        at_least=0.001,
        at_most=0.999,
    )
    memory_floor_bytes: int = param(
        16 << 20,
        "Memory differences up to this many bytes count as noise on a CPU.",
        metavar="BYTES",
        judges=True,
        at_least=0,
    )
    foreign_limit: float = param(
        0.5,
        "Share of the device that other processes may use during the measurement (0.5: half).",
        metavar="SHARE",
        judges=True,
        at_least=0,
    )
    self_test: bool = param(
        False,
        "Test the gate: inject known regressions into a copy of the baseline; each must be detected.",
        judges=True,
    )

    def external(self) -> Mapping[str, str]:
        if self.results:
            return hash_files(map(Path, self.results))
        workload = self._workload()
        found = {"workload": workload.digest} | ({} if self.runtime else code_in_key())
        if workload.trace_sha256:
            found["trace"] = workload.trace_sha256
        path = Path(self.workload)
        return found | (hash_files([path]) if path.is_file() else {})

    def check(self) -> None:
        if self.runs < 5:
            raise UsageError(
                "too-few-runs",
                f"--runs is {self.runs}",
                why="a comparison needs at least 5 runs on each side",
                hint="--runs 5",
            )

    def preflight(self, inputs: Known, device: str = "cpu") -> None:
        """Check that the workload or the results are readable and that all requests fit the engines."""
        from delivery.bench.plan import check_lengths
        from delivery.gate.imports import read_results
        from delivery.steps.sizes import longest

        if self.results:
            for name in self.results:
                read_results(Path(name))
            return
        workload = self._workload()
        if self.runtime:
            return
        if limit := longest(inputs):
            check_lengths(workload, *limit)
        if self.kv_tokens:
            hint = f"--kv-tokens {self._reserved(kv_tokens=0)}"
            check_lengths(workload, "both sides reserve KV tokens:", self.kv_tokens, hint)

    def predict_peak(self, inputs: Known, device: str = "cpu") -> Peak | None:
        """One process per engine, both at the same time if there are two."""
        from delivery.steps.sizes import loaded, with_runtime

        if self.results or self.runtime:
            return None
        sides = [r for r in ("engine", "baseline_engine") if inputs.get(r)]
        found = [loaded(inputs, role, self._reserved(self.kv_tokens), device) for role in sides]
        if not found or found[0] is None:
            return None
        needed = found[0].beside(found[1] or found[0]) if len(found) > 1 else found[0]
        return with_runtime(needed, device, processes=len(found))

    def _reserved(self, kv_tokens: int) -> int:
        """KV cache size of each side in tokens."""
        from delivery.bench.plan import engine_options

        options = engine_options(self._workload(), kv_tokens)
        return options["cache_max_entry_count"] * options["block_size"]

    def partners(self, ctx: PartnerContext) -> Mapping[str, str]:
        """The stored baseline's engine, to run side by side.

        The engine that became the baseline keeps the partner that it was measured with, so that it can be
        judged again without a new measurement.
        """
        from delivery.device import fingerprint
        from delivery.gate.lookup import find
        from delivery.report.comparison_baseline import place_ahead

        if self.paired == "off" or self.runtime or self.results:
            return {}
        place = place_ahead(ctx.model, fingerprint(ctx.device), self._workload().to_json())
        found = find(place, ctx.baselines, ctx.local_baselines)
        if found is None:
            return {}
        partner = found.current.engine
        if partner == ctx.inputs.get("engine"):
            partner = str(ctx.made_from(found.current.measurement).get("baseline_engine", ""))
        return {"baseline_engine": partner} if partner else {}

    def run(self, ctx: StepContext) -> None:
        from delivery.bench import comparison
        from delivery.bench.measured import imported
        from delivery.bench.plan import offered_rate
        from delivery.gate.metrics import DEFAULT_FAMILY

        about: dict[str, Any] = {"workload": {}, "kv_tokens": 0, "offered_rate": None}
        if self.results:
            made, about["workload"] = imported(self.results, self.runtime_name)
        else:
            workload = self._workload()
            candidate, baseline = self._sides(ctx, workload)
            total = self.runs * workload.requests * (1 if baseline is None else 2)
            with ctx.progress(f"{workload.requests} requests, runs", total, "request") as task:
                made = comparison.measure(
                    candidate,
                    baseline,
                    workload,
                    task,
                    runs=self.runs,
                    limit=self.limit,
                    metrics=tuple(ctx.gate.get("metrics") or DEFAULT_FAMILY),
                    foreign_limit=self.foreign_limit,
                )
            about["workload"] = {"name": workload.name, **workload.to_json()}
            about["kv_tokens"] = self._reserved(self.kv_tokens)
            about["offered_rate"] = offered_rate(workload)
        comparison.write(
            ctx.out,
            made,
            device=ctx.device,
            engine=ctx.input("engine").digest,
            baseline_engine=ctx.input("baseline_engine").digest if made.baseline else None,
            **about,
        )

    def _sides(
        self, ctx: StepContext, workload: Workload
    ) -> tuple[AbstractContextManager[Session], AbstractContextManager[Session] | None]:
        """The candidate, and the engine to run beside it if there is one; a server runs alone."""
        from delivery.bench.plan import engine_options
        from delivery.bench.session import server_session, worker_session

        if self.runtime:
            return server_session(self.runtime, self.runtime_name), None
        options = {**engine_options(workload, self.kv_tokens), "seed": ctx.seed}
        beside = ctx.has("baseline_engine")
        roles = ("engine", "baseline_engine") if beside else ("engine",)
        opened = [worker_session(ctx.input(role).path, ctx.device, options) for role in roles]
        return opened[0], opened[1] if beside else None

    def judge(self, ctx: JudgeContext) -> Report:
        from delivery.report.comparison import Judge
        from delivery.report.comparison_parts import Settings

        settings = Settings(
            limit=self.limit,
            memory_limit=self.memory_limit,
            memory_floor_bytes=self.memory_floor_bytes,
            foreign_limit=self.foreign_limit,
            self_test=self.self_test,
            partner_named=self.baseline_engine is not None,
            options={
                "workload": self.workload,
                "rate": self.rate or None,
                "runtime": self.runtime,
                "results": self.results,
            },
        )
        inputs = {r: ctx.input(r).digest for r in ("engine", "baseline_engine") if ctx.has(r)}
        return Judge(
            model=ctx.model,
            measurement=ctx.measurement,
            gate=ctx.gate,
            committed=ctx.baselines,
            local=ctx.local_baselines,
            inputs=inputs,
            settings=settings,
        ).report()

    def as_baseline(self, model: str, report: Artifact, reason: str) -> tuple[Place, Snapshot]:
        """The candidate's runs from a measurement, or from a report about it, as a baseline snapshot.

        Raises Undecided `measurement-invalid` for an invalid measurement, which must not become a baseline.
        """
        from delivery.report.comparison_baseline import as_baseline

        return as_baseline(model, report, reason, self.foreign_limit)

    def _workload(self) -> Workload:
        from delivery.bench import load_workload

        return load_workload(self.workload).with_arrival(rate=self.rate or None)
