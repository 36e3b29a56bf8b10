"""The layer-by-layer driver: one decoder block on the device, samples streamed through it.

For every block: the float block gets the samples as the quantised blocks before it output them, its
inputs are observed, it is quantised, and the quantised block computes the next block's samples, so that
later layers are fitted to the errors of earlier ones (`propagate`; off, they see the float model).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from delivery.errors import DataError
from delivery.model import BlockWeights, ModelConfig, block
from delivery.model.load import WeightSource, load_block
from delivery.quantization.kv import KVDtype, kv_scale
from delivery.quantization.layer_error import LayerError, layer_error
from delivery.quantization.measure import output_error
from delivery.quantization.observe import WatchedAttention, watch_inputs
from delivery.quantization.options import Options
from delivery.quantization.running import in_dtype, quantized_block
from delivery.quantization.scheme import Scheme
from delivery.quantization.sensitivity import sensitivity
from delivery.quantization.stream import Piece, Stream
from delivery.quantization.work import BlockWork, coverage

_COMPARED_TOKENS = 4096


@dataclass(slots=True)
class BlockResult:
    """The result of quantising one block.

    work: its layers with results, biases, norms. errors: one per quantised layer. block_relative: error
    of the block's output on the first few thousand tokens; None without data. kv: k_scale and v_scale.
    """

    layer: int
    work: BlockWork
    errors: list[LayerError]
    block_relative: float | None = None
    kv: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Fallbacks and warnings, each naming its tensor."""
        return self.work.notes


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan for one linear layer: its scheme and, for grouped schemes, its group size."""

    scheme: Scheme
    group_size: int = -1


Plan = Callable[[int], Mapping[str, Planned]]
"""Layer index → canonical name → what is planned; layers that are not named stay as they are."""


@dataclass(frozen=True, slots=True)
class _Compared:
    piece: Piece
    hidden: torch.Tensor
    out: torch.Tensor


class Driver:
    """Quantises blocks one after the other.

    source: where weights are read. stream: the samples after the embedding, or None for data-free
    schemes. dtype: in which blocks compute. kv: measure scales for a cache of that type.
    """

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        plan: Plan,
        options: Options,
        stream: Stream | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        propagate: bool = True,
        kv: KVDtype | None = None,
    ) -> None:
        self.source = source
        self.config = config
        self.plan = plan
        self.options = options
        self.stream = stream
        self.device = torch.device(device)
        self.dtype = dtype
        self.propagate = propagate
        self.kv = kv

    @torch.no_grad()
    def quantize_block(self, layer: int) -> BlockResult:
        """Quantise block `layer` and move the stream behind it.

        Raises DataError `calibration-needed` when a planned scheme needs data and there is no stream,
        `weight-not-finite` with the tensor's name, `already-quantised`.
        """
        planned = self.plan(layer)
        needs = self._needs(planned)
        weights = load_block(self.source, self.config, layer, self.device)
        widths = {name: p.group_size for name, p in planned.items()}
        work = BlockWork(self.config, layer, weights, widths, self.options)
        attention = WatchedAttention(self.config.num_kv_heads, self.device)
        compared: list[_Compared] = []
        if self.stream is not None:
            running = in_dtype(weights, self.dtype)
            if "sensitivity" in needs:
                work.sensitivity = sensitivity(self.config, layer, running, self.stream)
            compared = self._observe(running, work, attention, self.stream, "gram" in needs)
        for scheme in {p.scheme.name: p.scheme for p in planned.values()}.values():
            work.restrict(n for n, p in planned.items() if p.scheme is scheme)
            scheme.quantize(work)
        result = BlockResult(layer, work, [layer_error(work, n, p.scheme.name) for n, p in planned.items()])
        work.statistics.clear()
        work.samples.clear()
        work.sensitivity.clear()
        if self.stream is not None:
            quantized = quantized_block(weights, work, self.dtype)
            result.block_relative = self._advance(layer, quantized, compared, self.stream)
            if self.kv is not None and self.config.layer_types[layer] != "linear_attention":
                result.kv["k_scale"] = kv_scale(attention.key_absmax, self.kv)
                result.kv["v_scale"] = kv_scale(attention.value_absmax, self.kv)
        return result

    def _needs(self, planned: Mapping[str, Planned]) -> set[str]:
        needs: set[str] = set()
        for p in planned.values():
            wanted = p.scheme.needs(self.options)
            if wanted and self.stream is None:
                raise DataError(
                    "calibration-needed",
                    f"scheme {p.scheme.name!r} needs calibration data",
                    why=f"it looks at activations ({', '.join(sorted(wanted))})",
                    hint="deliver calibrate --checkpoint DIR --out CAL, then --calibration CAL; or rtn-w4a16",
                )
            needs |= wanted
        return needs

    def _observe(
        self,
        running: BlockWeights,
        work: BlockWork,
        attention: WatchedAttention,
        stream: Stream,
        with_gram: bool,
    ) -> list[_Compared]:
        """Run the float block over the stream: fill in the statistics, keep some outputs to compare."""
        watched, watches = watch_inputs(
            running, work.groups, self.device, with_gram=with_gram, keep_samples=True
        )
        compared: list[_Compared] = []
        tokens = 0
        for piece, hidden in stream.run():
            mixer = attention.around(piece.mixer) if self.kv is not None else piece.mixer
            out = block(self.config, work.layer, watched, hidden, piece.positions, mixer)
            if tokens < _COMPARED_TOKENS:
                compared.append(_Compared(piece, hidden, out))
                tokens += out.shape[0]
            if not self.propagate:
                stream.put(piece, out)
        work.statistics = {key: watch.statistics for key, watch in watches.items()}
        work.samples = {key: w.sample for key, w in watches.items() if w.sample is not None}
        work.notes += [
            f"{work.layers[key].source.name}: {s.not_finite} tokens with infinite or NaN inputs were left out"
            for key, s in work.statistics.items()
            if s.not_finite
        ]
        work.notes += coverage(work)
        return compared

    def _advance(
        self, layer: int, quantized: BlockWeights, compared: list[_Compared], stream: Stream
    ) -> float:
        """Run the quantised block over all samples, or the compared ones; its relative output error."""
        references = {id(c.piece): c for c in compared}
        lost = total = 0.0
        pieces = stream.run() if self.propagate else ((c.piece, c.hidden) for c in compared)
        for piece, hidden in pieces:
            out = block(self.config, layer, quantized, hidden, piece.positions, piece.mixer)
            if (reference := references.get(id(piece))) is not None:
                finite = torch.isfinite(reference.out).all(1)
                error, size = output_error(out[finite], reference.out[finite])
                lost, total = lost + error, total + size
            if self.propagate:
                stream.put(piece, out)
        return (lost / total) ** 0.5 if total else 0.0
