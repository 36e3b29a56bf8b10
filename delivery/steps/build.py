"""The build step: a checkpoint becomes an engine for one kind of device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from delivery.artifact import Kind
from delivery.steps.step import Ahead, Input, Known, StepContext, outline_of, param, step, takes

if TYPE_CHECKING:
    from delivery.checkpoint.outline import Outline

_STEP_TOKENS = 512
RUNTIME_BYTES = 450_000_000
"""Python with torch and numba, before a weight is read (measured)."""


@step
@dataclass(frozen=True, kw_only=True)
class Build:
    """Build an engine: weights in the kernels' layout, a memory plan, kernels compiled and measured.

    Everything about memory is decided here: weights + activation peak + overhead + KV blocks must fit, or
    the build fails with the sum and the nearest setting that would. The engine carries a fingerprint of
    what it was built with; on another machine it is refused, or its choices are made anew.
    """

    name: ClassVar[str] = "build"
    version: ClassVar[int] = 2
    makes: ClassVar[Kind] = Kind.ENGINE
    libraries: ClassVar[tuple[str, ...]] = ("torch", "triton", "numba")
    device_matters: ClassVar[bool] = True

    checkpoint: Input = takes(Kind.CHECKPOINT, "The model, float or quantised.")
    max_session_len: int = param(
        0,
        "Input plus output tokens of a request; 0: what the model allows and fits.",
        metavar="TOKENS",
        at_least=0,
    )
    max_num_seqs: int = param(0, "Requests in one batch at most; 0: 512 on a GPU, 64 on a CPU.", at_least=0)
    max_num_batched_tokens: int = param(
        0, "Tokens in one step at most; 0: 8192 on a GPU, 512 on a CPU.", metavar="TOKENS", at_least=0
    )
    enable_prefill: bool = param(True, "Fill steps with prompts; off (for chat): running decodes first.")
    adaptive: bool = param(False, "Lower the tokens of a step while only short requests come.")
    cache_max_entry_count: float = param(
        0.8, "Number of KV blocks if at least 1, else the share of free memory."
    )
    block_size: int = param(64, "Tokens in a KV block.", metavar="TOKENS", at_least=1)
    kv: str = param(
        "auto",
        "How the KV cache is stored; auto: in the dtype of the activations.",
        choices=("auto", "int8", "int4", "fp8"),
    )
    dtype: str = param(
        "auto",
        "Dtype of activations; auto: float32 on a CPU, the checkpoint's own on a GPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )

    def run(self, ctx: StepContext) -> None:
        from delivery.engine import build

        source = ctx.input("checkpoint")
        with ctx.progress("pack", self._layers(source.path), "layer") as task:
            about = build(
                source.path,
                ctx.out,
                checkpoint_digest=source.digest,
                progress=task.advance,
                note=task.note,
                device=ctx.device,
                seed=ctx.seed,
                **self._options(),
            )
        plan = about["plan"]
        ctx.metric("weights_bytes", plan["weights_bytes"], "bytes", "both")
        ctx.metric("peak_bytes", plan["peak_bytes"], "bytes", "both")
        ctx.metric("kv_tokens", plan["kv_tokens"], "tokens", "both")
        wanted = about["config"]["max_position"]
        if not self.max_session_len and plan["max_model_len"] < wanted:
            ctx.finding(
                "info",
                f"sessions hold {plan['max_model_len']} tokens; the model's {wanted} do not fit",
            )

    def check(self) -> None:
        from delivery.engine.options import EngineOptions

        EngineOptions.of(self._options())

    def preflight(self, inputs: Known) -> None:
        from delivery.errors import UsageError
        from delivery.steps.calibrate import config_of

        config = config_of(outline_of(inputs, "checkpoint"))
        if config is not None and self.max_session_len > config.max_position:
            raise UsageError(
                "session-too-long",
                f"--max-session-len {self.max_session_len} is more than the model was made for",
                why=f"its config states max_position_embeddings {config.max_position}",
                hint=f"--max-session-len {config.max_position}",
            )

    def outline(self, inputs: Known) -> Outline | None:
        """The checkpoint's: an engine holds the same weights, in another layout."""
        return outline_of(inputs, "checkpoint")

    def predict_peak_bytes(self, inputs: Known) -> int | None:
        """The packed weights twice over for one block, and the rest once: blocks are packed one by one."""
        outline = outline_of(inputs, "checkpoint")
        return None if outline is None else RUNTIME_BYTES + 2 * outline.size_bytes()

    def _options(self) -> dict[str, Any]:
        return {
            "max_model_len": self.max_session_len or None,
            "max_num_seqs": self.max_num_seqs or None,
            "max_num_batched_tokens": self.max_num_batched_tokens or None,
            "enable_prefill": self.enable_prefill,
            "adaptive": self.adaptive,
            "cache_max_entry_count": self.cache_max_entry_count,
            "block_size": self.block_size,
            "kv": self.kv,
            "dtype": self.dtype,
        }

    @staticmethod
    def _layers(checkpoint: Path) -> int:
        from delivery.checkpoint import Checkpoint
        from delivery.model import load_config

        return load_config(Checkpoint.open(checkpoint).config).num_layers


def loaded_bytes(inputs: Known, role: str, kv_tokens: int) -> int | None:
    """About what the engine or checkpoint in a role takes on a CPU: weights, KV cache, and logits of a step.

    None where it is not known. Float weights and the cache are in float32 there.
    """
    from delivery.steps.calibrate import config_of

    outline = outline_of(inputs, role)
    config = config_of(outline)
    if outline is None or config is None:
        return None
    wide = role != "engine" and outline.quantization is None and config.dtype != "float32"
    weights = outline.size_bytes() * (2 if wide else 1)
    cache = kv_tokens * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    return weights + cache + 2 * _STEP_TOKENS * config.vocab_size * 4


def longest(inputs: Known) -> tuple[str, int] | None:
    """What bounds the tokens of a request to `engine` and `source`, in words, and the bound.

    None where neither is known.
    """
    from delivery.steps.calibrate import config_of

    source = config_of(outline_of(inputs, "source"))
    built = session_len(inputs["engine"][0]) if inputs.get("engine") else None
    limits = [] if source is None else [("the source was made for", source.max_position)]
    limits += [] if built is None else [("the engine was built for", built)]
    return min(limits, key=lambda limit: limit[1], default=None)


def session_len(engine: Ahead) -> int | None:
    """Input plus output tokens that an engine holds; of one to come, what build is told. None if unknown."""
    if engine.path is None:
        return engine.params.get("max_session_len") or None
    about = engine.path / "engine.json"
    return json.loads(about.read_text("utf-8")).get("max_model_len") if about.is_file() else None
