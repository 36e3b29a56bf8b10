"""The calibrate step: text to token ids, and activation statistics of the float model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from delivery.artifact import Kind
from delivery.corpus import bare as bare_corpora
from delivery.steps.step import Input, Known, Peak, StepContext, outline_of, param, step, takes

if TYPE_CHECKING:
    from delivery.checkpoint import Checkpoint
    from delivery.corpus import Rendered
    from delivery.model import ModelConfig
    from delivery.steps.step import Task

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_SHOWN_SAMPLES = 2
_SHOWN_CHARS = 160


@step
@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Render calibration text and collect activation statistics.

    --corpus takes built-in corpora (legal, technical), files (.txt, .jsonl with text or messages,
    .parquet), folders of these and named public data sets, mixed by weight: legal=1,faq.jsonl=3. Only one
    decoder block is in memory at a time; a killed run resumes after its last block.
    """

    name: ClassVar[str] = "calibrate"
    version: ClassVar[int] = 1
    makes: ClassVar[Kind] = Kind.CALIBRATION
    libraries: ClassVar[tuple[str, ...]] = ("torch", "tokenizers")
    device_matters: ClassVar[bool] = True

    checkpoint: Input = takes(Kind.CHECKPOINT, "The float model.")
    corpus: str = param(
        "legal,technical",
        "Corpora to render: NAME|FILE|FOLDER[=WEIGHT],...",
        metavar="SPEC",
        path=bare_corpora,
    )
    samples: int = param(128, "Number of calibration sequences.")
    sequence_length: int = param(2048, "Maximum number of tokens per sequence.", metavar="TOKENS")
    dtype: str = param("auto", "Dtype of the computation; auto: float32 on a CPU.", choices=_DTYPES)

    def run(self, ctx: StepContext) -> None:
        from delivery.checkpoint import Checkpoint
        from delivery.corpus import recommendation, render
        from delivery.model import load_config
        from delivery.quantization.calibration import REPORT, SAMPLES, write_tokens

        artifact = ctx.input("checkpoint")
        checkpoint = Checkpoint.open(artifact.path)
        config = load_config(checkpoint.config)
        self.check()
        length = min(self.sequence_length, config.max_position)
        if length < self.sequence_length:
            ctx.finding("info", f"samples are limited to {length} tokens, the model's maximum length")
        tokenizer = checkpoint.tokenizer()
        rendered = render(self.corpus, tokenizer, self.samples, length, seed=ctx.seed)
        texts = [tokenizer.decode(s.token_ids, skip_special_tokens=False) for s in rendered.samples]
        self._report_text(ctx, rendered, texts)
        if advice := recommendation(len(rendered.samples)):
            ctx.finding("info", advice)
        write_tokens(ctx.out, [s.token_ids for s in rendered.samples])
        with (ctx.out / SAMPLES).open("w", encoding="utf-8") as stream:
            for sample, text in zip(rendered.samples, texts, strict=True):
                row = {"corpus": sample.corpus, "tokens": len(sample.token_ids), "text": text}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        notes = self._observe(ctx, checkpoint, config, rendered, artifact.digest)
        report = {**rendered.summary(), "statistics_notes": notes}
        (ctx.out / REPORT).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
        ctx.metric("calibration_tokens", rendered.tokens, "tokens", "higher")

    def external(self) -> Mapping[str, str]:
        from delivery.corpus import digest

        return digest(self.corpus)

    def preflight(self, inputs: Known, device: str = "cpu") -> None:
        from delivery.corpus import parse
        from delivery.steps.ahead import config_of

        parse(self.corpus)
        config_of(outline_of(inputs, "checkpoint"))

    def predict_peak(self, inputs: Known, device: str = "cpu") -> Peak | None:
        from delivery.steps.ahead import config_of
        from delivery.steps.sizes import layer_by_layer

        config = config_of(outline_of(inputs, "checkpoint"))
        if config is None:
            return None
        length = min(self.sequence_length, config.max_position)
        return layer_by_layer(config, self.samples * length, length, gram=False, device=device)

    def check(self) -> None:
        from delivery.errors import UsageError

        for name in ("samples", "sequence_length"):
            if getattr(self, name) < 1:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(
                    "calibration-size",
                    f"{option} is {getattr(self, name)}",
                    why="expected at least 1",
                    hint=f"{option} 128",
                )

    def _report_text(self, ctx: StepContext, rendered: Rendered, texts: list[str]) -> None:
        for warning in rendered.warnings:
            ctx.finding("warning", warning)
        for name, report in rendered.corpora.items():
            row = report.row(rendered.tokens)
            ctx.finding(
                "info",
                f"corpus {name}: {row['tokens']:,} tokens ({row['token_share']:.0%}) in {row['samples']} "
                f"samples from {row['documents']} documents, {row['truncated_documents']} truncated",
            )
        scripts = ", ".join(f"{name} {share:.0%}" for name, share in list(rendered.scripts.items())[:4])
        ctx.finding("info", f"scripts by share of letters: {scripts or 'none'}")
        for sample, text in list(zip(rendered.samples, texts, strict=True))[:_SHOWN_SAMPLES]:
            ctx.finding("info", f"sample ({sample.corpus}): {text[:_SHOWN_CHARS]!r}")

    def _observe(
        self,
        ctx: StepContext,
        checkpoint: Checkpoint,
        config: ModelConfig,
        rendered: Rendered,
        digest: str,
    ) -> list[str]:
        """Write every layer's statistics to the artifact; returns notes on layers with skipped tokens."""
        from safetensors.torch import save_file

        from delivery.quantization.calibration import STATISTICS
        from delivery.quantization.memory import gigabytes, peak_bytes, predict_peak_bytes
        from delivery.quantization.resume import LayerStore
        from delivery.quantization.walk import observe_layer, running_dtype, start_stream

        dtype = running_dtype(self.dtype, config.dtype, ctx.device)
        samples = [s.token_ids for s in rendered.samples]
        longest = max(map(len, samples))
        predicted = predict_peak_bytes(config, rendered.tokens, longest, gram=False, device=ctx.device)
        ctx.finding("info", f"predicted peak memory: {gigabytes(predicted)} on {ctx.device}")
        stream = start_stream(checkpoint, config, samples, ctx.device, dtype)
        fingerprint = {"version": self.version, "checkpoint": digest, "dtype": str(dtype), "samples": samples}
        store = LayerStore(ctx.scratch, fingerprint)
        first = store.resume(stream)
        with ctx.progress("calibrate", config.num_layers, "layers") as task:
            _advance(task, first)
            for layer in range(first, config.num_layers):
                found = observe_layer(checkpoint, config, layer, stream, dtype)
                tensors = {
                    f"layers.{layer}.{k}.{n}": t for k, s in found.items() for n, t in s.tensors().items()
                }
                store.put(layer, tensors, {"notes": _notes(layer, found)}, stream)
                task.note(
                    f"layer {layer + 1} of {config.num_layers}, peak {gigabytes(peak_bytes(ctx.device))}"
                )
                task.advance(1)
        everything, notes = {}, []
        for layer in range(config.num_layers):
            everything.update(store.tensors(layer))
            notes += store.report(layer)["notes"]
        save_file(everything, ctx.out / STATISTICS)
        for note in notes:
            ctx.finding("warning", note)
        return notes


def _advance(task: Task, layers: int) -> None:
    if layers:
        task.note(f"resuming after layer {layers}")
        task.advance(layers)


def _notes(layer: int, found: Mapping[str, Any]) -> list[str]:
    return [
        f"layer {layer}, input of {key}: {s.not_finite} tokens with infinite or NaN values were skipped"
        for key, s in found.items()
        if s.not_finite
    ]
