"""The smoke check: real conversations with the engine, judged by the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from delivery.artifact import Artifact, Kind, hash_files
from delivery.bench.code import code_in_key
from delivery.errors import UsageError, did_you_mean
from delivery.resources import resource
from delivery.steps.step import Input, JudgeContext, Known, Peak, StepContext, param, path_of, step, takes

if TYPE_CHECKING:
    from delivery.gate.baseline import Snapshot
    from delivery.gate.lookup import Found, Place
    from delivery.gate.outputs.suite import Suite
    from delivery.gate.report import Report

_MEASUREMENT = "smoke.json"
_KV_BLOCKS = 128
_BLOCK = 64


def _shipped() -> dict[str, Path]:
    """Built-in suites by name."""
    return {path.stem: path for path in sorted(resource("smoke").glob("*.yaml"))}


@step
@dataclass(frozen=True, kw_only=True)
class Smoke:
    """Prompt the engine and check its answers: content, language, endings, loops, speed.

    Suites are data (smoke/*.yaml): single turns, conversations, summaries of long text. Answers must not
    be garbled, must not repeat themselves, must end, and must contain what the suite expects. Ten timed runs
    give a coarse latency alarm against the baseline; the perplexity of the suite's reference text has an
    absolute limit, because a comparison with the source cannot show a fault of the source itself.
    """

    name: ClassVar[str] = "smoke"
    version: ClassVar[int] = 1
    makes: ClassVar[Kind] = Kind.REPORT
    libraries: ClassVar[tuple[str, ...]] = ("torch", "triton", "tokenizers")
    device_matters: ClassVar[bool] = True

    engine: Input = takes(Kind.ENGINE, "The engine to test.")
    source: Input = takes(
        Kind.CHECKPOINT,
        "The unquantised checkpoint, to compare greedy tokens with; default: no comparison.",
        optional=True,
    )
    suites: tuple[str, ...] = param(
        ("english",),
        "Prompt suites, by name or as files.",
        metavar="NAME|FILE",
        path=lambda s: Path(s).stem,
    )
    runs: int = param(10, "Number of timed runs.", at_least=1)
    limit: float = param(
        1.15, "Maximum ratio of P50 and P95 to the baseline's.", metavar="RATIO", judges=True, at_least=1
    )
    memory_limit: float = param(
        0.10,
        "Maximum relative deviation of the process' GPU memory from the plan (0.1: 10 %).",
        metavar="SHARE",
        judges=True,
        at_least=0,
    )

    def external(self) -> Mapping[str, str]:
        return hash_files(self._paths()) | code_in_key()

    def preflight(self, inputs: Known, device: str = "cpu") -> None:
        """Check that the suites are readable and that most prompts fit the models."""
        from delivery.bench.fitting import fitting
        from delivery.checkpoint import Checkpoint
        from delivery.steps.sizes import longest

        suites = self._read()
        path = path_of(inputs, "source") or path_of(inputs, "engine")
        limit = longest(inputs)
        if path is None or limit is None:
            return
        tokenizer = Checkpoint.open(path).tokenizer()
        # Without the template's own tokens: a prompt that is too long here cannot fit.
        fitting(
            suites,
            lambda messages: sum(len(tokenizer.encode(m["content"], False)) for m in messages),
            *limit,
        )

    def predict_peak(self, inputs: Known, device: str = "cpu") -> Peak | None:
        """The larger of the two models, which are loaded one after the other."""
        from delivery.steps.sizes import loaded, with_runtime

        engine, source = (loaded(inputs, r, _KV_BLOCKS * _BLOCK, device) for r in ("engine", "source"))
        return None if engine is None else with_runtime(engine.or_else(source or engine), device)

    def run(self, ctx: StepContext) -> None:
        from delivery.bench.facts import facts
        from delivery.engine import LLM

        measured: dict[str, Any] = {
            **facts(ctx.device),
            "engine": ctx.input("engine").digest,
        }
        options: dict[str, Any] = {
            "device": ctx.device,
            "cache_max_entry_count": _KV_BLOCKS,
            "seed": ctx.seed,
        }
        started = time.perf_counter()
        with LLM(ctx.input("engine").path, **options) as llm:
            measured["load_s"] = time.perf_counter() - started
            suites, measured["skipped"] = self._fitting(ctx, llm, self._read())
            measured["suites"] = [asdict(suite) for suite in suites]
            answers = self._talk(ctx, llm, suites, measured)
        measured["agreement"] = None
        if ctx.has("source"):
            from delivery.bench.ask import greedy_agreement

            with (
                LLM(ctx.input("source").path, **options) as llm,
                ctx.progress("greedy tokens of the source", len(answers), "answer") as task,
            ):
                measured["agreement"] = greedy_agreement(llm, answers, task.advance)
        text = json.dumps(measured, indent=1, ensure_ascii=False)
        (ctx.out / _MEASUREMENT).write_text(text + "\n", "utf-8")

    def _fitting(self, ctx: StepContext, llm: Any, suites: list[Suite]) -> tuple[list[Suite], list[str]]:
        """The suites without the prompts that the models cannot hold, and a sentence about each of those."""
        from delivery.bench.fitting import fitting
        from delivery.checkpoint import Checkpoint
        from delivery.steps.ahead import config_of

        most, holder = llm.core.max_model_len, "the engine holds"
        if ctx.has("source") and (model := config_of(Checkpoint.open(ctx.input("source").path))) is not None:
            most, holder = min((most, holder), (model.max_position, "the source was made for"))
        kept, skipped = fitting(
            suites, lambda messages: len(llm.core.tokenizer.encode_chat(messages)), holder, most
        )
        return kept, [f"prompt {s.prompt!r} of {s.suite} was skipped: {s}; {holder} {most}" for s in skipped]

    def _talk(self, ctx: StepContext, llm: Any, suites: list[Suite], measured: dict[str, Any]) -> list[Any]:
        """Run all prompts on the engine; fills `measured` and returns the answers."""
        from delivery.bench.ask import ask, open_turns, time_runs
        from delivery.bench.memory import MemoryWatch
        from delivery.bench.quality import perplexity_nll

        time_runs(llm, [llm.core.config.vocab_size // 2], 2, 0, lambda: None)
        watch = MemoryWatch(llm.core.device)
        prompts = [(suite, prompt) for suite in suites for prompt in suite.prompts]
        with ctx.progress("prompts", len(prompts), "prompt") as task:
            answers = ask(llm, [p.messages for _, p in prompts], [p.max_tokens for _, p in prompts])
            task.advance(len(prompts))
        timed = next(
            answer
            for answer, (suite, prompt) in zip(answers, prompts, strict=True)
            if suite is suites[0] and prompt.id == suite.timing_prompt
        )
        with ctx.progress("timed runs", self.runs, "run") as task:
            measured["timings_ms"] = time_runs(
                llm, timed.prompt_ids, suites[0].timing_tokens, self.runs, task.advance
            )
        memory = watch.breakdown(llm.stats())
        # Scoring keeps every position's logits, which serving never does.
        texts = [text for suite in suites for text in suite.reference]
        with ctx.progress("reference text", len(texts), "text") as task:
            nll, tokens = perplexity_nll(llm, texts, task.advance)
        measured |= {
            "special_tokens": list(llm.core.tokenizer.special_tokens),
            "open_turns": open_turns(llm.core.tokenizer),
            "answers": [
                {"suite": suite.name, "prompt": prompt.id, **asdict(answer)}
                for (suite, prompt), answer in zip(prompts, answers, strict=True)
            ],
            "reference": {"nll": nll, "tokens": tokens},
            "memory": memory,
        }
        return answers

    def judge(self, ctx: JudgeContext) -> Report:
        from delivery.gate.outputs.suite import suite_from_json
        from delivery.gate.report import Finding, Report, Verdict, worst
        from delivery.report import answers, charts, compose, smoke

        measured = json.loads(ctx.measurement.file(_MEASUREMENT).read_text("utf-8"))
        judged = answers.judge_answers(
            [suite_from_json(s) for s in measured["suites"]], measured["answers"], measured["special_tokens"]
        )
        limits = {**smoke.LIMITS, **ctx.gate.get("limits", {})}
        found = self._baseline(ctx)
        timing, notes, baseline = smoke.timing(found, measured, limits, self.limit)
        metrics = [
            *answers.counts(judged, limits),
            *smoke.numbers(measured, limits, self.memory_limit),
            *timing,
        ]
        notes += [Finding("warning", text) for text in measured["skipped"]]
        if measured["open_turns"]:
            text = "the chat template ends assistant turns with no token that ends generation"
            notes.append(Finding("error", text))
        if measured["agreement"] is None:
            notes.append(Finding("info", "no source was given: greedy tokens were not compared"))
        inputs = {role: ctx.input(role).digest for role in ("engine", "source") if ctx.has(role)}
        runs = [str(i + 1) for i in range(len(measured["timings_ms"]))]
        verdict = worst([Verdict(m.status) for m in metrics if m.status != "shown"])
        if found is not None and verdict.releases:
            found.record()
        return Report(
            check=self.name,
            subject=ctx.input("engine").digest,
            verdict=verdict,
            metrics=tuple(metrics),
            findings=(*answers.findings(judged), *notes),
            evidence=(_MEASUREMENT,),
            details={
                "commit": compose.current_commit(),
                "baseline": baseline,
                "reproduce": compose.command(self.name, inputs, suites=self.suites),
                "facts": compose.fact_rows(measured, suites=", ".join(self.suites)),
                "cases": answers.cases(judged),
                "charts": [charts.bars("Timed runs", "ms", runs, {"end to end": measured["timings_ms"]})],
                "tables": [answers.table(judged)],
            },
        )

    def as_baseline(self, model: str, report: Artifact, reason: str) -> tuple[Place, Snapshot]:
        """The timed runs from a measurement, or from a report about it, as a baseline snapshot."""
        from delivery.gate.baseline import Snapshot
        from delivery.report import compose, smoke

        measured = json.loads(report.file(_MEASUREMENT).read_text("utf-8"))
        snapshot = Snapshot(
            engine=measured["engine"],
            reason=reason,
            runs=(),
            memory=measured["memory"],
            samples={"timings_ms": measured["timings_ms"]},
            versions=measured["versions"],
            measurement=compose.measurement_of(report),
            commit=compose.commit_of(report),
            recorded=compose.today(),
        )
        return compose.place(model, measured, smoke.timed_workload(measured, self.runs)), snapshot

    def _baseline(self, ctx: JudgeContext) -> Found | None:
        """The baseline of the timed runs; without one there is no alarm, and compare decides what follows."""
        from delivery.report import compose

        place, snapshot = self.as_baseline(ctx.model, ctx.measurement, "first measurement here")
        recording = ctx.gate.get("missing_baseline") == "bootstrap"
        return compose.optional_baseline(
            place, ctx.baselines, ctx.local_baselines, snapshot if recording else None
        )

    def _paths(self) -> list[Path]:
        """The suites' files. Raises UsageError `unknown-suite`."""
        known = _shipped()
        out = []
        for name in self.suites:
            path = known.get(name, Path(name))
            if not path.is_file():
                raise UsageError(
                    "unknown-suite", f"there is no smoke suite {name!r}", hint=did_you_mean(name, known)
                )
            out.append(path)
        if not out:
            raise UsageError("unknown-suite", "no smoke suite was given", hint=did_you_mean("", known))
        return out

    def _read(self) -> list[Suite]:
        from delivery.gate.outputs.suite_file import read_suite

        suites = [read_suite(path) for path in self._paths()]
        named = [suite.name for suite in suites]
        twice = next((name for name in named if named.count(name) > 1), None)
        if twice is not None:
            raise UsageError(
                "bad-suite",
                f"two suites are named {twice!r}",
                why="an answer is found by the names of its suite and prompt",
                hint="change `name` in one of the files",
            )
        return suites
