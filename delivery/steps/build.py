"""The build step: a checkpoint becomes an engine for one kind of device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from delivery.artifact import Kind
from delivery.steps.step import Input, Known, Peak, StepContext, outline_of, param, step, takes

if TYPE_CHECKING:
    from delivery.checkpoint.outline import Outline


@step
@dataclass(frozen=True, kw_only=True)
class Build:
    """Build an engine: packed weights, a memory plan, and kernels tuned on the device.

    Memory is planned here: weights + peak activations + overhead + KV blocks must fit, or the build fails
    with the sum and the nearest setting that fits. The engine carries a fingerprint of the hardware and
    software it was built with; on a different machine it is refused, or its kernels are tuned again.
    """

    name: ClassVar[str] = "build"
    version: ClassVar[int] = 2
    makes: ClassVar[Kind] = Kind.ENGINE
    libraries: ClassVar[tuple[str, ...]] = ("torch", "triton", "numba")
    device_matters: ClassVar[bool] = True

    checkpoint: Input = takes(Kind.CHECKPOINT, "The checkpoint to build from, float or quantised.")
    max_session_len: int = param(
        0,
        "Maximum input plus output tokens of a request; 0: as many as the model allows and memory fits.",
        metavar="TOKENS",
        at_least=0,
    )
    max_num_seqs: int = param(
        0, "Maximum number of requests in a batch; 0: 512 on a GPU, 64 on a CPU.", at_least=0
    )
    max_num_batched_tokens: int = param(
        0, "Maximum number of tokens in a step; 0: 8192 on a GPU, 512 on a CPU.", metavar="TOKENS", at_least=0
    )
    enable_prefill: bool = param(True, "Fill steps with prefill tokens; off (for chat): decode first.")
    adaptive: bool = param(False, "Reduce the tokens per step while all requests are short.")
    cache_max_entry_count: float = param(
        0.8, "KV cache size: a number of blocks if at least 1, else a share of free memory."
    )
    block_size: int = param(64, "Tokens per KV block.", metavar="TOKENS", at_least=1)
    kv: str = param(
        "auto",
        "Data type of the KV cache; auto: the dtype of the activations.",
        choices=("auto", "int8", "int4", "fp8"),
    )
    dtype: str = param(
        "auto",
        "Dtype of the activations; auto: float32 on a CPU, the checkpoint's own on a GPU.",
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
                f"sessions are limited to {plan['max_model_len']} tokens; the model's {wanted} do not fit",
            )

    def check(self) -> None:
        from delivery.engine.options import EngineOptions

        EngineOptions.of(self._options())

    def preflight(self, inputs: Known, device: str = "cpu") -> None:
        from delivery.errors import UsageError
        from delivery.steps.ahead import config_of

        config = config_of(outline_of(inputs, "checkpoint"))
        if config is not None and self.max_session_len > config.max_position:
            raise UsageError(
                "session-too-long",
                f"--max-session-len {self.max_session_len} exceeds the model's maximum length",
                why=f"its config states max_position_embeddings {config.max_position}",
                hint=f"--max-session-len {config.max_position}",
            )

    def outline(self, inputs: Known) -> Outline | None:
        """The checkpoint's: an engine holds the same weights, in another layout."""
        return outline_of(inputs, "checkpoint")

    def predict_peak(self, inputs: Known, device: str = "cpu") -> Peak | None:
        """On a CPU the weights twice, stored and packed. On a GPU the engine's memory: with the full share of
        KV blocks if this machine has the GPU, else with KV blocks for the tokens of one step."""
        from delivery.steps.sizes import card_bytes, loaded, packing, with_runtime

        outline = outline_of(inputs, "checkpoint")
        if outline is None:
            return None
        if device == "cpu":
            return packing(outline.size_bytes())
        step = self.max_num_batched_tokens or 8192
        wanted, share = max(step, self.max_session_len), self.cache_max_entry_count
        if share >= 1:
            wanted = int(share) * self.block_size
        needed = loaded(inputs, "checkpoint", wanted, device, **self._options())
        if needed is None:
            return None
        made = with_runtime(needed, device)
        if share < 1 and (card := card_bytes()) is not None:
            made = Peak(
                made.host_bytes, max(made.gpu_bytes, int(made.gpu_bytes + share * (card - made.gpu_bytes)))
            )
        return made

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
