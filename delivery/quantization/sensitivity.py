"""How much each output feature of a linear layer matters to the output of its block.

For a random sign vector z at the block's output, the squared gradient of z · block(h) with respect to
a layer's output feature has the expectation of that feature's squared influence on all outputs
(Hutchinson's estimator). One backward pass over a few hundred tokens; with it, errors of q, k, v, gate
and up are weighed by what they do, as a search that runs the block would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from delivery.model import BlockWeights, DenseAttention, ModelConfig, block
from delivery.quantization.stream import Piece, Stream

_TOKENS = 512


@dataclass(frozen=True, slots=True)
class _Kept:
    """A linear layer whose output keeps its gradient."""

    inner: Callable[[torch.Tensor], torch.Tensor]
    outputs: list[torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if y.requires_grad:
            y.retain_grad()
            self.outputs.append(y)
        return y


def sensitivity(
    config: ModelConfig, layer: int, weights: BlockWeights, stream: Stream
) -> dict[str, torch.Tensor]:
    """Canonical name → float32 [N]: mean squared influence of each output feature on the block's output.

    Layers that no token of the sample reached are left out, and those whose gradient is not finite.
    """
    piece = _sample(stream)
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in weights.linears}
    kept = {name: _Kept(linear, outputs[name]) for name, linear in weights.linears.items()}
    signs = torch.Generator(device="cpu").manual_seed(layer)
    with torch.enable_grad():
        hidden = piece.hidden.to(stream.device).detach().requires_grad_()
        out = block(config, layer, weights.with_linears(kept), hidden, piece.positions, piece.mixer)
        z = torch.randint(0, 2, out.shape, generator=signs).to(out.device, torch.float32) * 2 - 1
        (out.float() * z).sum().backward()
    found = {}
    for name, ys in outputs.items():
        grads = [y.grad.float() for y in ys if y.grad is not None and y.shape[0]]
        if grads:
            squares = torch.cat(grads).square().mean(0)
            if bool(torch.isfinite(squares).all()) and bool((squares > 0).any()):
                found[name] = squares
    return found


def _sample(stream: Stream) -> Piece:
    """The first few hundred tokens of the stream's first piece, as a piece of its own."""
    whole = stream.pieces[0]
    lengths: list[int] = []
    for length in whole.lengths:
        if sum(lengths) < _TOKENS:
            lengths.append(min(length, _TOKENS - sum(lengths)))
    starts = torch.tensor([0, *whole.lengths]).cumsum(0).tolist()
    rows = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=False)])
    positions = whole.positions[rows.to(whole.positions.device)]
    return Piece(
        whole.hidden[rows.to(whole.hidden.device)], tuple(lengths), positions, DenseAttention(lengths)
    )
