"""The quantize step: a float checkpoint becomes a quantised one, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from delivery.artifact import Kind
from delivery.errors import UsageError
from delivery.quantization import scheme_names
from delivery.steps.step import Input, Known, Peak, StepContext, fields_of, outline_of, param, step, takes

if TYPE_CHECKING:
    from delivery.checkpoint.outline import Outline
    from delivery.model import ModelConfig
    from delivery.quantization.plan import ModelPlan, Wishes

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def _formats() -> Sequence[str]:
    from delivery.formats import format_names

    return ("auto", *format_names())


@step
@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Quantise the linear layers of a checkpoint.

    Processes one decoder block at a time; each block is fitted to the outputs of the quantised blocks before
    it on the calibration samples. Schemes that use only the weights need no calibration. The result is a
    Hugging Face model directory; layers.json lists every layer's error. A killed run resumes after its last
    finished block.
    """

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 3
    makes: ClassVar[Kind] = Kind.CHECKPOINT
    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    device_matters: ClassVar[bool] = True

    checkpoint: Input = takes(Kind.CHECKPOINT, "The float model.")
    calibration: Input = takes(
        Kind.CALIBRATION, "Token ids and statistics, for schemes that use activations.", optional=True
    )
    scheme: str = param("awq-w4a16", "Quantisation scheme of the linear layers.", choices=scheme_names)
    format: str = param(
        "auto", "Checkpoint format of the result; auto: the scheme's usual one.", choices=_formats
    )
    group_size: str = param(
        "128", "Input features per scale: N, -1 for all, or attention=N,mlp=N[,embedding=N].", metavar="SIZE"
    )
    symmetric: bool = param(False, "Symmetric quantisation, without zero points (-8..7, absmax / 7.5).")
    narrow: bool = param(False, "With --symmetric: restrict the range to -7..7 (absmax / 7).")
    clip: bool = param(False, "Search for narrower clipping ranges per group (4-bit schemes).")
    outliers: float = param(
        0.0, "Share of the weights kept in 6 bits, such as 0.001 (--format deliver).", metavar="SHARE"
    )
    rounding: str = param(
        "nearest",
        "Rounding of 4-bit AWQ and SmoothQuant; gptq compensates rounding errors.",
        choices=("nearest", "gptq"),
    )
    duo: str = param(
        "both",
        "AWQ: also divide scales by the weights' magnitude; both: try with and without.",
        choices=("off", "on", "both"),
    )
    points: int = param(0, "AWQ: number of ratios to try; 0: coarse-to-fine search.", at_least=0)
    act_order: str = param(
        "static",
        "GPTQ: process columns by decreasing activation; group: also form groups in that order.",
        choices=("off", "static", "group"),
    )
    damping: float = param(
        0.1, "GPTQ: damping, the share of its own diagonal added to the Hessian.", metavar="SHARE", at_least=0
    )
    alpha: float = param(
        0.5,
        "SmoothQuant: migration strength, the share of the range moved into the weights, 0 to 1.",
        metavar="SHARE",
    )
    search_scale: bool = param(False, "SmoothQuant: search for the best --alpha of each layer.")
    kv: str = param(
        "none", "Calibrate scales for a KV cache of this type.", choices=("none", "int8", "int4", "fp8")
    )
    recipe: str = param(
        "", "Schemes for individual layers: '*.down_proj=w8a16,*.layers.0.*=skip'.", metavar="RULES"
    )
    skip: str = param("", "Layers to leave in floating point: '*.o_proj,*.layers.0.*'.", metavar="PATTERNS")
    tensor_parallel: int = param(
        1, "Number of tensor-parallel ranks that the group size has to fit.", at_least=1
    )
    propagate: bool = param(True, "Fit each block to the quantisation errors of the blocks before it.")
    qat: int = param(
        0, "Fine-tune the last N blocks on the calibration samples; 2 is usual, 0: none.", at_least=0
    )
    qat_loss: str = param(
        "distill",
        "Loss of --qat: the distance to the float model, or the language-model loss on the text.",
        choices=("distill", "next-token"),
    )
    qat_steps: int = param(60, "Number of gradient steps of --qat.", at_least=1)
    max_layer_error: float = param(
        0.0,
        "Fail if a layer's relative error exceeds this (0.1: 10 %); 0: no limit.",
        metavar="RATIO",
        at_least=0,
    )
    dtype: str = param("auto", "Dtype of the computation; auto: float32 on a CPU.", choices=_DTYPES)
    shard_bytes: int = param(
        5_000_000_000, "Maximum size of a weight file in bytes.", metavar="BYTES", local=True, at_least=1
    )

    def check(self) -> None:
        from delivery.quantization.group_size import parse_group_size
        from delivery.quantization.patterns import parse_recipe

        parse_group_size(self.group_size)
        parse_recipe(self.recipe)
        if not 0 <= self.alpha <= 1:
            raise UsageError(
                "alpha", f"--alpha is {self.alpha}", why="expected a number from 0 to 1", hint="--alpha 0.5"
            )
        compensated = self.scheme == "gptq-w4a16" or self.rounding == "gptq"
        if not 0 <= self.outliers <= 0.1 or (self.outliers and compensated):
            raise UsageError(
                "outliers",
                f"--outliers {self.outliers:g} with --scheme {self.scheme} --rounding {self.rounding}",
                why="expected a share from 0 to 0.1, and a scheme that rounds each weight independently",
                hint="--scheme awq-w4a16 --outliers 0.001 --format deliver",
            )
        if self.qat and not self.propagate:
            raise UsageError(
                "qat-needs-propagation",
                "--qat with --no-propagate",
                why="fine-tuning starts from the outputs of the quantised blocks on the samples",
                hint="drop one of the two options",
            )

    def preflight(self, inputs: Known, device: str = "cpu") -> None:
        from delivery.quantization.patterns import check_patterns, parse_patterns, parse_recipe

        if device == "cuda":
            self._check_hardware()
        outline = outline_of(inputs, "checkpoint")
        if outline is None:
            return
        calibrated = bool(inputs.get("calibration"))
        if outline.quantization is None:
            check_patterns((*parse_recipe(self.recipe), *parse_patterns(self.skip)), outline)
            if calibrated and self._is_usual():
                return
        self._plan(outline, calibrated)

    def outline(self, inputs: Known) -> Outline | None:
        """The float model's outline with the predicted size; tensor names are unchanged."""
        from delivery.checkpoint.outline import PredictedOutline
        from delivery.quantization.memory import quantized_bytes
        from delivery.steps.ahead import config_of

        source = outline_of(inputs, "checkpoint")
        config = config_of(source)
        if source is None or config is None:
            return None
        bits = 4 if self.scheme.endswith("w4a16") else 8
        written = {**source.config, "quantization_config": {"quant_method": self.format, "bits": bits}}
        size_bytes = quantized_bytes(config, source.size_bytes(), bits)
        return PredictedOutline(written, source.names(), source.shape, size_bytes)

    def run(self, ctx: StepContext) -> None:
        from delivery.checkpoint import Checkpoint
        from delivery.quantization.calibration import read_samples
        from delivery.quantization.job import Job
        from delivery.quantization.layers_file import write_layers
        from delivery.quantization.memory import gigabytes
        from delivery.quantization.resume import LayerStore
        from delivery.quantization.walk import running_dtype

        self.check()
        checkpoint = Checkpoint.open(ctx.input("checkpoint").path)
        config, wishes, plan, form = self._plan(checkpoint, ctx.has("calibration"))
        if ctx.device == "cuda":
            self._check_hardware()
        for note in plan.notes():
            ctx.finding("info", note)
        samples: tuple[tuple[int, ...], ...] = ()
        if ctx.has("calibration"):
            samples = read_samples(ctx.input("calibration").path, config.vocab_size)
            of = ctx.input("calibration").manifest.inputs.get("checkpoint")
            if isinstance(of, str) and of != ctx.input("checkpoint").digest:
                ctx.finding("warning", f"the calibration was rendered for another checkpoint, {of[:12]}")
        job = Job(
            source=checkpoint,
            config=config,
            plan=plan,
            options=wishes.options,
            form=form,
            samples=samples,
            device=ctx.device,
            dtype=running_dtype(self.dtype, config.dtype, ctx.device),
            propagate=self.propagate,
            kv=None if self.kv == "none" else self.kv,  # type: ignore[arg-type]
            qat=self.qat,
            qat_loss=self.qat_loss,
            qat_steps=self.qat_steps,
        )
        predicted = gigabytes(job.predicted_bytes())
        ctx.finding("info", f"predicted peak memory: {predicted} on {ctx.device}")
        inputs = {role: [a.digest for a in ctx.inputs(role)] for role in ("checkpoint", "calibration")}
        store = LayerStore(ctx.scratch, {**self._fingerprint(), **inputs, "device": ctx.device})
        with ctx.progress("quantize", config.num_layers, "layers") as task:
            tuned = job.fit(store, task.note, task.advance)
        if tuned is not None:
            what = "relative error" if self.qat_loss == "distill" else "next-token loss"
            text = f"{what} on held-out samples {tuned.before:.4f} before, {tuned.after:.4f} after"
            ctx.finding("info", f"last {self.qat} blocks fine-tuned: {text}")
            ctx.metric("qat_error_before", tuned.before, "ratio", "lower")
            ctx.metric("qat_error_after", tuned.after, "ratio", "lower")
        job.write(store, ctx.out, self.shard_bytes)
        report = write_layers(ctx.out, plan, store, config.num_layers, self.scheme, form)
        for note in report.notes:
            ctx.finding("warning", note)
        ctx.metric("bits_per_weight", report.stored_bits, "bits", "both")
        ctx.metric("worst_layer_relative_error", report.worst()["relative_error"], "ratio", "lower")
        report.check(self.max_layer_error)

    def predict_peak(self, inputs: Known, device: str = "cpu") -> Peak | None:
        from delivery.steps.ahead import config_of
        from delivery.steps.sizes import layer_by_layer, sizes_of

        config = config_of(outline_of(inputs, "checkpoint"))
        if config is None:
            return None
        tokens, longest = sizes_of(inputs.get("calibration", ()))
        return layer_by_layer(config, tokens, longest, gram=tokens > 0, device=device)

    def _check_hardware(self) -> None:
        """Raises EnvironmentLacking `gpu-too-old`."""
        from delivery.quantization.hardware import check_schemes
        from delivery.quantization.patterns import SKIP, parse_recipe

        check_schemes(sorted({self.scheme, *parse_recipe(self.recipe).values()} - {SKIP}))

    def _is_usual(self) -> bool:
        """Whether the scheme's default storage is used, which fits every model.

        If so, the formats, which need torch, do not have to be consulted.
        """
        asked = (self.recipe, self.skip, self.symmetric, self.narrow, self.outliers, self.tensor_parallel > 1)
        stored = self.format == "auto" and self.kv == "none"
        return stored and not any(asked) and self.group_size.isdecimal()

    def _plan(self, checkpoint: Outline, calibrated: bool) -> tuple[ModelConfig, Wishes, ModelPlan, str]:
        """Config, wishes, the plan and its format; raises as `feasible_plan`."""
        from delivery.model import load_config
        from delivery.quantization.feasible import check_float, feasible_plan

        check_float(checkpoint)
        config = load_config(checkpoint.config)
        wishes = self._wishes(config)
        kv, tuned = None if self.kv == "none" else self.kv, self.qat > 0
        plan, name = feasible_plan(checkpoint, wishes, self.format, kv, calibrated=calibrated, tuned=tuned)
        return config, wishes, plan, name

    def _wishes(self, config: ModelConfig) -> Wishes:
        import torch

        from delivery.quantization.group_size import parse_group_size
        from delivery.quantization.options import Options
        from delivery.quantization.patterns import parse_patterns, parse_recipe
        from delivery.quantization.plan import Wishes

        options = Options(
            group_sizes=parse_group_size(self.group_size),
            symmetric=self.symmetric,
            narrow=self.narrow,
            clip=self.clip,
            outliers=self.outliers,
            rounding=self.rounding,  # type: ignore[arg-type]
            duo=self.duo,  # type: ignore[arg-type]
            points=self.points,
            act_order=self.act_order,  # type: ignore[arg-type]
            damping=self.damping,
            alpha=self.alpha,
            search_scale=self.search_scale,
            # bfloat16 scales are float16 numbers too, so every export contains the same weights.
            scale_dtype=torch.bfloat16 if config.dtype == "bfloat16" else torch.float16,
        )
        recipe, skip = parse_recipe(self.recipe), parse_patterns(self.skip)
        return Wishes(self.scheme, options, recipe, skip, self.tensor_parallel)

    def _fingerprint(self) -> dict[str, Any]:
        return {"version": self.version} | {
            f.name: getattr(self, f.name) for f in fields_of(type(self)) if not f.is_input
        }
