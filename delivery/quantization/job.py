"""One checkpoint from float to quantised, once it is planned: its layers fitted, its files written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.formats import load_format
from delivery.model import load_ends
from delivery.quantization.driver import Driver
from delivery.quantization.embedding import WithEmbedding, quantize_embedding
from delivery.quantization.memory import gigabytes, peak_bytes, predict_peak_bytes
from delivery.quantization.qat import Tuning, check_enough, next_token_loss
from delivery.quantization.session import Tail, quantize_layers
from delivery.quantization.walk import start_stream
from delivery.quantization.write import write_checkpoint

if TYPE_CHECKING:
    import torch

    from delivery.checkpoint import Checkpoint
    from delivery.model import ModelConfig
    from delivery.model.load import WeightSource
    from delivery.qtensor import QTensor
    from delivery.quantization.driver import BlockResult
    from delivery.quantization.kv import KVDtype
    from delivery.quantization.options import Options
    from delivery.quantization.plan import ModelPlan
    from delivery.quantization.qat import Tuned
    from delivery.quantization.resume import LayerStore


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is done to a checkpoint, and how.

    form: name of the format. samples: token ids of the calibration, () for schemes that need none. dtype:
    in which blocks compute. qat: how many last blocks are fine-tuned, by `qat_loss` in `qat_steps` steps.
    """

    source: Checkpoint
    config: ModelConfig
    plan: ModelPlan
    options: Options
    form: str
    samples: tuple[tuple[int, ...], ...]
    device: str
    dtype: torch.dtype
    propagate: bool = True
    kv: KVDtype | None = None
    qat: int = 0
    qat_loss: str = "distill"
    qat_steps: int = 60

    def predicted_bytes(self) -> int:
        """Peak memory on the device that computes."""
        tokens, longest = sum(map(len, self.samples)), max(map(len, self.samples), default=0)
        return predict_peak_bytes(self.config, tokens, longest, gram=bool(self.samples), device=self.device)

    def fit(
        self, store: LayerStore, note: Callable[[str], None], advance: Callable[[float], None]
    ) -> Tuned | None:
        """Quantise every layer that the store does not hold; what fine-tuning achieved.

        advance is told how many layers were done. Raises as `Driver.quantize_block`.
        """
        source, config, device = self._seen(), self.config, self.device
        stream = start_stream(source, config, self.samples, device, self.dtype) if self.samples else None
        if self.qat:  # told now, not behind the last layer
            check_enough(len(stream.pieces) if stream is not None else 0)
        driver = Driver(
            source,
            config,
            self.plan.layer,
            self.options,
            stream,
            device=device,
            dtype=self.dtype,
            propagate=self.propagate,
            kv=self.kv,
        )

        def after(done: int, result: BlockResult | None) -> None:
            if result is None:
                if done:
                    note(f"resuming after layer {done}")
                    advance(done)
                return
            worst = max(result.errors, key=lambda e: e.relative_error, default=None)
            text = "" if worst is None else f", worst {worst.canonical} at {worst.sqnr_db:.1f} dB"
            note(f"layer {done} of {config.num_layers}{text}, peak {gigabytes(peak_bytes(device))}")
            advance(1)

        return quantize_layers(driver, self.plan, store, load_format(self.form), after, self._tail(source))

    def write(self, store: LayerStore, out: Path, shard_bytes: int) -> None:
        """The quantised checkpoint, from a store that holds every layer."""
        form = load_format(self.form)
        extra: dict[str, Any] = {}
        if self.plan.embedding is not None:
            extra = form.pack(self.plan.embedding.prefix, self._table)
        config = form.quantization_config(self.plan.prototypes(self.options), self.kv)
        layers = self.config.num_layers
        write_checkpoint(self.source, self.plan, store, layers, config, out, shard_bytes, extra)

    @cached_property
    def _table(self) -> QTensor | None:
        """The embedding, where it is quantised."""
        planned = self.plan.embedding
        return None if planned is None else quantize_embedding(self.source, planned, self.options)

    def _seen(self) -> WeightSource:
        """The checkpoint as the quantised model will see it."""
        planned, table = self.plan.embedding, self._table
        if planned is None or table is None:
            return self.source
        return WithEmbedding(self.source, planned.prefix, table)

    def _tail(self, source: WeightSource) -> Tail | None:
        if not self.qat:
            return None
        loss = None
        if self.qat_loss == "next-token":
            ends = load_ends(source, self.config, self.device, self.dtype)
            loss = next_token_loss(self.config, ends)
        return Tail(min(self.qat, self.config.num_layers), Tuning(steps=self.qat_steps), loss)
