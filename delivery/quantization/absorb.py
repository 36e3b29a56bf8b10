"""Divide the input of linear layers by a scale and multiply their weights by it: an exact rewrite.

The division goes into what feeds the layers: the norm before them, or the linear layer whose outputs
reach them channel by channel (up → down, v → o). The block's function is unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from delivery.model.weights import Norm


@dataclass(frozen=True, slots=True)
class Absorbed:
    """norm: the divided norm. scale: float32 [K], by how much it really was divided."""

    norm: Norm
    scale: torch.Tensor


def into_norm(norm: Norm, scale: torch.Tensor) -> Absorbed:
    """Divide what a norm multiplies by: weight / s, or (1 + weight) / s − 1 where it applies 1 + w.

    The result is rounded to the norm's stored dtype first, and the scale that comes back is what this
    rounding left, so multiplying the linear layers by *that* undoes the division exactly (up to
    float32). A channel whose effective weight is zero is skipped: its scale is 1.
    """
    before = norm.effective().float()
    divided = before / scale
    stored = (divided - 1.0 if norm.plus_one else divided).to(norm.weight.dtype)
    changed = replace(norm, weight=stored)
    after = changed.effective().float()
    real = before / after
    usable = (before != 0) & (after != 0) & torch.isfinite(real) & (real > 0)
    kept = torch.where(usable, stored, norm.weight)
    return Absorbed(replace(norm, weight=kept), torch.where(usable, real, torch.ones_like(real)))


def into_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Divide the output features of a linear layer (weight [N, K], bias [N] or None) by scale [N].

    The bias keeps its dtype, the weight comes back in float32.
    """
    divided = weight.float() / scale[:, None]
    return divided, None if bias is None else (bias.float() / scale).to(bias.dtype)


def into_columns(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply the input features of weight [N, K] by scale [K] → float32."""
    return weight.float() * scale


def shared_by_heads(scale: torch.Tensor, heads: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    """A scale for the inputs of o_proj that the values of grouped-query attention can take.

    scale: float32 [heads · head_dim]. Query heads of one group read the same value channel, so they
    must share its scale: the geometric mean over the group. → the same shape.
    """
    groups = scale.log().reshape(kv_heads, heads // kv_heads, head_dim)
    return groups.mean(1, keepdim=True).expand_as(groups).reshape(-1).exp()


def rows_of_values(scale: torch.Tensor, heads: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    """The part of a head-shared scale that divides v_proj's outputs → [kv_heads · head_dim]."""
    return scale.reshape(kv_heads, heads // kv_heads, head_dim)[:, 0].reshape(-1)
