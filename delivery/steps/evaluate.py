"""The evaluate check: quality of the engine relative to its source, on held-out text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from delivery.artifact import Artifact, Kind, hash_files
from delivery.bench.code import code_in_key
from delivery.corpus import bare as bare_corpora
from delivery.steps.step import Input, JudgeContext, Known, Peak, StepContext, param, step, takes

if TYPE_CHECKING:
    from delivery.engine import LLM
    from delivery.gate.baseline import Snapshot
    from delivery.gate.lookup import Found, Place
    from delivery.gate.report import Report

_MEASUREMENT = "evaluate.json"
_BLOCK = 64
_STEP_TOKENS = 512
_DRIFT = 1.08


@step
@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Compare the engine with the unquantised source on held-out text of each corpus.

    Measures perplexity, KL divergence and top-1 agreement, overall and separately before and after token
    128, where quantisation errors begin to accumulate; optionally BLEU-4 of long greedy outputs and the share
    of garbled ones. A broken source agrees with its engine: absolute limits and the perplexity of the last
    release detect that.
    """

    name: ClassVar[str] = "evaluate"
    version: ClassVar[int] = 3
    makes: ClassVar[Kind] = Kind.REPORT
    libraries: ClassVar[tuple[str, ...]] = ("torch", "triton", "tokenizers")

    engine: Input = takes(Kind.ENGINE, "The engine to judge.")
    source: Input = takes(Kind.CHECKPOINT, "The unquantised checkpoint.")
    checkpoint: Input = takes(
        Kind.CHECKPOINT,
        "The quantised checkpoint, whose layer errors are shown in the report.",
        optional=True,
    )
    corpus: str = param(
        "legal,technical",
        "Corpora whose held-out text is evaluated: NAME|FILE|FOLDER,...",
        metavar="SPEC",
        path=bare_corpora,
    )
    windows: int = param(6, "Number of windows of held-out text per corpus.", at_least=1)
    window_tokens: int = param(256, "Tokens per window.", metavar="TOKENS", at_least=2)
    bleu_prompts: int = param(
        0, "Number of windows that both models continue greedily, for BLEU; 0: none.", at_least=0
    )
    bleu_tokens: int = param(128, "Tokens per continuation.", metavar="TOKENS", at_least=1)
    tasks: tuple[str, ...] = param(
        (), "Labelled tasks: JSONL files with prompt and answer.", metavar="FILE", path=True
    )
    harness: tuple[str, ...] = param(
        (),
        "Tasks of lm-evaluation-harness, by name or YAML file; needs `pip install lm-eval`.",
        metavar="TASK",
        path=True,
    )
    harness_limit: int = param(0, "Number of questions of each --harness task; 0: all.", at_least=0)
    drift: float = param(
        _DRIFT,
        "Maximum ratio of a perplexity to that of the last release.",
        metavar="RATIO",
        judges=True,
        at_least=0,
    )

    def external(self) -> Mapping[str, str]:
        return {**self._asked(), **code_in_key()}

    def _asked(self) -> dict[str, str]:
        """Digests of the texts and tasks, which must be equal for two measurements to be comparable."""
        from delivery.corpus import digest

        files = [Path(t) for t in (*self.tasks, *self.harness) if t in self.tasks or Path(t).is_file()]
        found = {**digest(self.corpus), **hash_files(files)}
        if self.harness:
            from delivery.bench.harness import installed_version

            found["lm-eval"] = installed_version()
        return found

    def check(self) -> None:
        if self.harness:
            from delivery.bench.harness import check_installed

            check_installed()

    def preflight(self, inputs: Known, device: str = "cpu") -> None:
        """Check that tasks and corpora are readable, held-out text exists, and windows fit the models."""
        from delivery.bench.tasks import check_names, read_task
        from delivery.corpus import check_heldout

        check_heldout(self.corpus)
        check_names([*self.tasks, *self.harness])
        for task in self.tasks:
            read_task(Path(task))
        self._check_lengths(inputs)

    def _check_lengths(self, inputs: Known) -> None:
        from delivery.errors import UsageError
        from delivery.steps.sizes import longest

        limit = longest(inputs)
        if limit is None:
            return
        what, most = limit
        asked = [("--window-tokens", self.window_tokens, 0)]
        if self.bleu_prompts:
            asked += [("--bleu-tokens", self.bleu_tokens, self.window_tokens // 2)]
        for option, tokens, before in asked:
            if before + tokens > most:
                raise UsageError(
                    "window-too-long",
                    f"{option} is {tokens}" + (f", after {before} tokens of a window" if before else ""),
                    why=f"{what} {most} tokens",
                    hint=f"{option} {most - before} or less",
                )

    def predict_peak(self, inputs: Known, device: str = "cpu") -> Peak | None:
        """Both models are loaded at the same time."""
        from delivery.steps.sizes import loaded, with_runtime

        engine, source = (
            loaded(inputs, role, self._kv_blocks() * _BLOCK, device, max_num_batched_tokens=_STEP_TOKENS)
            for role in ("engine", "source")
        )
        return None if engine is None or source is None else with_runtime(engine.beside(source), device)

    def _kv_blocks(self) -> int:
        return -(-(self.window_tokens + self.bleu_tokens) // _BLOCK) * 9

    def run(self, ctx: StepContext) -> None:
        from delivery.bench.facts import facts
        from delivery.bench.quality import compare_quality, continuations, in_turn, tokenizer_digest
        from delivery.checkpoint import Tokenizer
        from delivery.corpus import heldout_windows
        from delivery.engine import LLM
        from delivery.quantization.layers_file import read_layers

        options: dict[str, Any] = {
            "device": ctx.device,
            "seed": ctx.seed,
            "cache_max_entry_count": self._kv_blocks(),
            "block_size": _BLOCK,
            "max_num_batched_tokens": _STEP_TOKENS,
        }
        corpora: dict[str, Any] = {}
        with (
            LLM(ctx.input("engine").path, **options) as engine,
            LLM(ctx.input("source").path, **options) as source,
        ):
            tokenizer, wanted = Tokenizer.open(ctx.input("source").path), (self.windows, self.window_tokens)
            windows = dict(heldout_windows(self.corpus, tokenizer, *wanted, ctx.seed))
            total = sum(len(ids) for each in windows.values() for ids in each)
            with ctx.progress("score both models", total, "token") as task:
                for name, each in windows.items():
                    found = compare_quality(engine, source, each, task.advance)
                    corpora[name] = {"early": asdict(found.early), "late": asdict(found.late)}
                    corpora[name]["windows"] = found.windows
            first = in_turn(windows, self.bleu_prompts)
            prompts = [ids for _, ids in first]
            outputs = continuations(engine, source, prompts, self.window_tokens // 2, self.bleu_tokens)
            tasks = self._tasks(ctx, engine, source)
        measured = {
            **facts(ctx.device),
            "engine": ctx.input("engine").digest,
            "corpora": corpora,
            "corpus_digests": self._asked(),
            "read_as": {"tokenizer": tokenizer_digest(ctx.input("source").path), "seed": ctx.seed},
            "continuations": {
                **outputs,
                "corpora": [name for name, _ in first],
                "texts": {side: list(map(tokenizer.decode, ids)) for side, ids in outputs.items()},
            },
            "tasks": tasks,
            "layers": read_layers(ctx.input("checkpoint").path) if ctx.has("checkpoint") else [],
        }
        text = json.dumps(measured, indent=1, ensure_ascii=False)
        (ctx.out / _MEASUREMENT).write_text(text + "\n", "utf-8")

    def _tasks(self, ctx: StepContext, engine: LLM, source: LLM) -> dict[str, Any]:
        """Number of correct answers of both models per task."""
        from delivery.bench.harness import run_tasks
        from delivery.bench.tasks import accuracy, read_task

        out: dict[str, Any] = {}
        if self.harness:
            with ctx.progress("lm-evaluation-harness", 2 * len(self.harness), "task") as task:
                ours, theirs = (
                    run_tasks(llm, self.harness, self.harness_limit, lambda _: task.advance())
                    for llm in (engine, source)
                )
            out = {name: {**ours[name], "source_right": theirs[name]["right"]} for name in ours}
        for name in self.tasks:
            questions = read_task(Path(name))
            with ctx.progress(f"task {Path(name).stem}", 2 * len(questions), "question") as task:
                right, source_right = (accuracy(llm, questions, task.advance) for llm in (engine, source))
            out[Path(name).stem] = {
                "questions": len(questions),
                "right": right,
                "source_right": source_right,
            }
        return out

    def judge(self, ctx: JudgeContext) -> Report:
        from delivery.gate.report import Report, Verdict, worst
        from delivery.report import compose, quality

        measured = json.loads(ctx.measurement.file(_MEASUREMENT).read_text("utf-8"))
        limits = {**quality.LIMITS, **ctx.gate.get("limits", {})}
        metrics = quality.metrics(measured, limits)
        findings = quality.findings(measured, metrics)
        found = self._release(ctx)
        metrics, drifted, baseline = quality.against_release(
            found, metrics, self.drift, measured.get("read_as", {})
        )
        findings += [*drifted, *quality.not_continued(ctx.gate.get("limits", {}), metrics)]
        findings += quality.unmatched(ctx.gate.get("limits", {}), metrics)
        verdict = worst([Verdict(m.status) for m in metrics if m.status != "shown"])
        if found is not None and verdict.releases:
            found.record()
        inputs = {role: ctx.input(role).digest for role in ("engine", "source")}
        return Report(
            check=self.name,
            subject=ctx.input("engine").digest,
            verdict=verdict,
            metrics=tuple(metrics),
            findings=tuple(findings),
            evidence=(_MEASUREMENT,),
            details={
                "commit": compose.current_commit(),
                "baseline": baseline,
                "sureness": quality.sureness(measured),
                "reproduce": compose.command(
                    self.name,
                    inputs,
                    corpus=self.corpus,
                    windows=self.windows,
                    window_tokens=self.window_tokens,
                ),
                "facts": compose.fact_rows(measured, corpora=self.corpus),
                "charts": quality.charts_of(measured, limits),
                "tables": [quality.table(measured)],
            },
        )

    def as_baseline(self, model: str, report: Artifact, reason: str) -> tuple[Place, Snapshot]:
        """The metrics of a measurement, or of a report about it; they do not depend on the device."""
        from delivery.gate.baseline import Snapshot
        from delivery.report import compose, quality

        measured = json.loads(report.file(_MEASUREMENT).read_text("utf-8"))
        workload = {
            "check": self.name,
            "corpora": measured["corpus_digests"],
            "windows": self.windows,
            "window_tokens": self.window_tokens,
        }
        snapshot = Snapshot(
            engine=measured["engine"],
            reason=reason,
            runs=(),
            values={m.name: m.value for m in quality.metrics(measured, {})},
            versions=measured["versions"],
            settings=measured.get("read_as", {}),
            commit=compose.commit_of(report),
            recorded=compose.today(),
            measurement=compose.measurement_of(report),
        )
        return compose.place(model, {**measured, "device_slug": "any", "device": {}}, workload), snapshot

    def _release(self, ctx: JudgeContext) -> Found | None:
        """The metrics of the last release, if they are recorded."""
        from delivery.report import compose

        place, snapshot = self.as_baseline(ctx.model, ctx.measurement, "first measurement here")
        recording = ctx.gate.get("missing_baseline") == "bootstrap"
        return compose.optional_baseline(
            place, ctx.baselines, ctx.local_baselines, snapshot if recording else None
        )
