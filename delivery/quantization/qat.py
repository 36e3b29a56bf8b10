"""Fine-tune integers and scales of the last quantised blocks by gradient descent on their output.

Rounding passes gradients straight through (Bengio et al., arXiv:1308.3432); scales learn as in LSQ
(Esser et al., arXiv:1902.08153). What is minimised is the distance to the float model's own hidden
states (distillation), or the next-token loss on the samples themselves (labelled text).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from delivery.errors import DataError
from delivery.model import BlockWeights, Ends, ModelConfig, block, final_logits
from delivery.model.weights import fake_quantize
from delivery.qtensor import FLOAT8, QTensor
from delivery.quantization.eight_bit import limit
from delivery.quantization.grid import storable
from delivery.quantization.running import quantized_block

if TYPE_CHECKING:
    from delivery.quantization.driver import BlockResult
    from delivery.quantization.stream import Piece, Stream

Loss = Callable[[torch.Tensor, torch.Tensor, "Piece"], torch.Tensor]
"""(hidden of the quantised blocks, of the float model, the piece) → scalar."""

_Output = tuple[torch.Tensor, torch.Tensor, "Piece"]
"""The arguments of a `Loss`, for one piece."""

_KEPT_OUT = 5


@dataclass(frozen=True, slots=True)
class Tuning:
    """steps: gradient steps, a piece of the stream each. rates: of integers (in steps), of log-scales."""

    steps: int = 60
    rate: float = 0.02
    scale_rate: float = 0.002


@dataclass(frozen=True, slots=True)
class Tuned:
    """Error on samples that were not tuned on, before and after.

    Relative, of the last hidden states; with another loss, the mean of that loss.
    """

    before: float
    after: float


class Trainable:
    """A quantised linear layer whose integers and scales learn.

    place: float32 [N, K], each weight's position on its grid in steps; it starts at the rounded value,
    but inside the cell of the integer that the scheme chose. grow: log-change of each scale.
    """

    def __init__(self, qtensor: QTensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.qtensor = qtensor
        self.bias = bias
        self.steps = _expand(qtensor.scale.float(), qtensor)
        zero_point = qtensor.zero_point
        self.shift = None if zero_point is None else _expand(zero_point.float(), qtensor)
        values = qtensor.qdata.float()
        centre = values if self.shift is None else values - self.shift
        if qtensor.qdata.dtype in FLOAT8:
            self.place = centre.clone().requires_grad_()
        else:
            offset = (weight.float() / self.steps - centre).clamp(-0.45, 0.45)
            self.place = (centre + offset).requires_grad_()
        self.apart: torch.Tensor | None = None
        if qtensor.outliers is not None:
            self.apart = torch.full(qtensor.shape, float("nan"), device=self.place.device)
            qtensor.outliers.put_into(self.apart)
        self.grow = torch.zeros_like(qtensor.scale, dtype=torch.float32).requires_grad_()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        q = self.qtensor
        if q.act_dtype is not None:
            x = x + (fake_quantize(x, q.act_dtype, q.input_scale) - x).detach()
        growth = _expand(self.grow, q).exp()
        weight = self._rounded(self.place / growth) * self.steps * growth
        if self.apart is not None:
            weight = torch.where(self.apart.isnan(), weight, self.apart)
        return functional.linear(x, weight.to(x.dtype), self.bias)

    @torch.no_grad()
    def result(self) -> QTensor:
        """The layer as a QTensor again, scales in their stored dtype."""
        q = self.qtensor
        scale = storable(q.scale.float() * self.grow.exp(), q.scale.dtype)
        values = self._rounded(self.place / _expand(self.grow, q).exp())
        if self.shift is not None:
            values = values + self.shift
        return replace(q, qdata=values.to(q.qdata.dtype), scale=scale)

    def _rounded(self, place: torch.Tensor) -> torch.Tensor:
        dtype, bits = self.qtensor.qdata.dtype, self.qtensor.bits
        if dtype in FLOAT8:
            place = place.clamp(-limit(dtype), limit(dtype))
            return place + (place.to(dtype).float() - place).detach()
        low, high = (0, 2**bits - 1) if dtype == torch.uint8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        rounded = place + (place.round() - place).detach()
        if self.shift is None:
            return rounded.clamp(low, high)
        return torch.maximum(torch.minimum(rounded, high - self.shift), low - self.shift)


def check_enough(pieces: int) -> None:
    """Raises DataError `too-few-samples` where no piece would be left beside the one that judges."""
    if pieces < 2:
        raise DataError(
            "too-few-samples",
            "fine-tuning has too few samples",
            why=f"expected at least two pieces of about a thousand tokens, got {pieces}",
            hint="deliver calibrate --samples 64",
        )


def refine(
    config: ModelConfig,
    results: Sequence[BlockResult],
    weights: Sequence[BlockWeights],
    stream: Stream,
    target: Stream,
    dtype: torch.dtype,
    tuning: Tuning,
    loss: Loss | None = None,
) -> Tuned:
    """Tune the quantised layers of consecutive blocks, in place in `results`.

    weights: the float blocks. stream: samples before the first of them as the quantised model makes
    them; target: behind the last one, of the float model. Every fifth piece is kept out and judges;
    if tuning did not help there, nothing is changed.
    Raises DataError `too-few-samples` when there are fewer than two pieces.
    """
    pairs = list(zip(stream.pieces, target.pieces, strict=True))
    kept_out = pairs[_KEPT_OUT - 1 :: _KEPT_OUT] or pairs[-1:]
    used = [p for p in pairs if all(p[0] is not k[0] for k in kept_out)]
    check_enough(len(pairs))
    layers: list[Trainable] = []
    blocks = [_trainable(w, r, dtype, layers) for w, r in zip(weights, results, strict=True)]

    def run(piece: Piece) -> torch.Tensor:
        hidden = piece.hidden.to(stream.device)
        for result, running in zip(results, blocks, strict=True):
            hidden = block(config, result.layer, running, hidden, piece.positions, piece.mixer)
        return hidden

    def error() -> float:
        with torch.no_grad():
            outputs = ((run(p), goal.hidden.to(stream.device), p) for p, goal in kept_out)
            return _relative_distance(outputs) if loss is None else _mean(loss, outputs)

    before = error()
    with torch.enable_grad():
        _descend(used, run, layers, tuning, loss or _distance)
    after = error()
    if after < before:
        tuned = iter(layers)
        for result in results:
            for layer in result.work.layers.values():
                if layer.result is not None:
                    layer.result = next(tuned).result()
    return Tuned(before, min(before, after))


def _relative_distance(outputs: Iterable[_Output]) -> float:
    """‖output − goal‖ / ‖goal‖ over all pieces."""
    lost = total = 0.0
    for out, goal, _ in outputs:
        wanted = goal.float()
        lost += float((out.float() - wanted).square().sum(dtype=torch.float64))
        total += float(wanted.square().sum(dtype=torch.float64))
    return math.sqrt(lost / total) if total else 0.0


def _mean(loss: Loss, outputs: Iterable[_Output]) -> float:
    return statistics.fmean(float(loss(*output)) for output in outputs)


def next_token_loss(config: ModelConfig, ends: Ends) -> Loss:
    """Cross-entropy of the next token over every sequence of a piece: tuning on labelled text.

    ends: final norm and head on the device; the tuned blocks have to be the model's last.
    """

    def loss(out: torch.Tensor, _goal: torch.Tensor, piece: Piece) -> torch.Tensor:
        assert piece.token_ids is not None
        logits = final_logits(config, ends.norm, ends.head, out).float()
        last = torch.tensor(piece.lengths, device=out.device).cumsum(0) - 1
        keep = torch.ones(out.shape[0], dtype=torch.bool, device=out.device)
        keep[last] = False
        return functional.cross_entropy(logits[keep], piece.token_ids.roll(-1)[keep])

    return loss


def _descend(
    pairs: Sequence[tuple[Piece, Piece]],
    run: Callable[[Piece], torch.Tensor],
    layers: Sequence[Trainable],
    tuning: Tuning,
    loss: Loss,
) -> None:
    optimizer = torch.optim.Adam(
        [
            {"params": [a.place for a in layers], "lr": tuning.rate},
            {"params": [a.grow for a in layers], "lr": tuning.scale_rate},
        ]
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, tuning.steps)
    for step in range(tuning.steps):
        piece, goal = pairs[step % len(pairs)]
        optimizer.zero_grad()
        value = loss(run(piece), goal.hidden.to(piece.positions.device), piece)
        value.backward()
        optimizer.step()
        schedule.step()


def _distance(out: torch.Tensor, goal: torch.Tensor, _piece: Piece) -> torch.Tensor:
    goal = goal.float()
    # Per token, so that the few tokens with huge hidden states do not drown all others.
    size = goal.square().mean(-1).clamp_min(1e-6)
    return ((out.float() - goal).square().mean(-1) / size).mean()


def _trainable(
    weights: BlockWeights, result: BlockResult, dtype: torch.dtype, layers: list[Trainable]
) -> BlockWeights:
    found = {}
    for name, layer in result.work.layers.items():
        if layer.result is not None:
            bias = None if layer.bias is None else layer.bias.to(dtype)
            found[name] = Trainable(layer.result, layer.weight, bias)
    layers += found.values()
    return quantized_block(weights, result.work, dtype).with_linears(found)


def _expand(per_group: torch.Tensor, q: QTensor) -> torch.Tensor:
    """Values of the shape of the scales → [N, K], or something that broadcasts to it."""
    if q.block_size is not None:
        rows, columns = q.shape
        wide = per_group.repeat_interleave(q.block_size, 0)[:rows]
        return wide.repeat_interleave(q.block_size, 1)[:, :columns]
    return per_group if per_group.shape[1] == 1 else per_group[:, q.group_index()]
