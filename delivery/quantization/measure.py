"""How far a quantised layer is from its source: relative output error and SQNR.

With the Gram matrix G = Σ x xᵀ of a layer's inputs, the squared error of its outputs over all
tokens is tr(E G Eᵀ) for E = Q(W) − W: no activation has to be kept.
"""

from __future__ import annotations

import math

import torch

from delivery.quantization.statistics import tf32

_ROWS = 4096


def row_losses(error: torch.Tensor, gram: torch.Tensor | None) -> torch.Tensor:
    """eₙ G eₙᵀ of every row of error [N, K] → float32 [N]; the plain squared norm without a Gram matrix."""
    if gram is None:
        return error.square().sum(1)
    pieces = []
    with tf32(error.device):
        for rows in error.split(_ROWS):
            pieces.append(((rows @ gram) * rows).sum(1))
    # A sum of squares; rounding can leave a tiny negative number for a row without error.
    return torch.cat(pieces).clamp_min_(0)


def relative_error(error: torch.Tensor, weight: torch.Tensor, gram: torch.Tensor | None) -> float:
    """‖X Eᵀ‖ / ‖X Wᵀ‖ over all tokens (‖E‖ / ‖W‖ without a Gram matrix); 0 for a layer whose output is 0."""
    lost = float(row_losses(error.float(), gram).sum(dtype=torch.float64))
    total = float(row_losses(weight.float(), gram).sum(dtype=torch.float64))
    if total == 0:
        return 0.0 if lost == 0 else math.inf
    return math.sqrt(lost / total)


def output_error(candidate: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """(‖candidate − reference‖², ‖reference‖²) of outputs [T, N], to be summed over pieces of a stream."""
    difference = (candidate.float() - reference.float()).square().sum(dtype=torch.float64)
    return float(difference), float(reference.float().square().sum(dtype=torch.float64))


def sqnr_db(relative: float) -> float:
    """Signal to quantisation noise in dB for a relative error ‖error‖ / ‖signal‖; inf for none."""
    return math.inf if relative == 0 else -20.0 * math.log10(relative)
