"""The gated delta rule (Yang et al., arXiv 2412.06464): attention whose memory is one matrix per head.

S_t = exp(g_t) · S_{t−1} + β_t · k_t ⊗ (v_t − exp(g_t) · S_{t−1}ᵀ k_t);   o_t = S_tᵀ q_t / √d_k

with normalised keys and queries, behind a causal convolution over a few tokens. A sequence's state is the
matrix S and the last inputs of the convolution.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from delivery.model.config import DeltaSpec

_CHUNK = 64
_EPS = 1e-6


def channels(spec: DeltaSpec) -> int:
    """Features that pass the convolution: queries, keys and values of all heads."""
    return 2 * spec.num_key_heads * spec.key_head_dim + spec.num_value_heads * spec.value_head_dim


def convolve(
    x: torch.Tensor, kernel: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal convolution of each channel, then SiLU.

    x [..., T, C], kernel [C, K], before [..., K − 1, C]: the inputs that came before x.
    → (out [..., T, C], the last K − 1 inputs, for the tokens that come after).
    """
    size = kernel.shape[1]
    inputs = torch.cat((before.to(x.dtype), x), dim=-2)
    windows = inputs.unfold(-2, size, 1)
    out = (windows * kernel.to(x.dtype)).sum(-1)
    return functional.silu(out), inputs[..., inputs.shape[-2] - size + 1 :, :]


def heads_of(spec: DeltaSpec, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixed [..., C] → q, k [..., value_heads, d_k] and v [..., value_heads, d_v], in float32 or wider.

    Queries and keys are of length one, queries divided by √d_k; a key head serves neighbouring value heads.
    """
    mixed = mixed.to(torch.promote_types(mixed.dtype, torch.float32))
    size = spec.num_key_heads * spec.key_head_dim
    q, k, v = mixed.split((size, size, spec.num_value_heads * spec.value_head_dim), dim=-1)
    each = spec.num_value_heads // spec.num_key_heads
    q, k = (_unit(x.unflatten(-1, (spec.num_key_heads, -1))).repeat_interleave(each, -2) for x in (q, k))
    return q * spec.key_head_dim**-0.5, k, v.unflatten(-1, (spec.num_value_heads, -1))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, a chunk at a time: within a chunk the updates are one triangular system.

    q, k [T, heads, d_k], v [T, heads, d_v], decay (g, in log space, ≤ 0) and beta [T, heads],
    state [heads, d_k, d_v] → (o [T, heads, d_v], state).
    """
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    # Decays add up to hundreds within a chunk, of which small differences matter: in float64.
    decay, beta = decay.double().T, beta.to(q.dtype).T[..., None]
    state = state.to(q.dtype)
    outputs = []
    for start in range(0, q.shape[1], _CHUNK):
        at = slice(start, start + _CHUNK)
        qs, ks, vs, bs = q[:, at], k[:, at], v[:, at], beta[:, at]
        total = decay[:, at].cumsum(-1)
        between = (total[:, :, None] - total[:, None, :]).to(q.dtype).tril().exp().tril()
        grown = total.to(q.dtype).exp()[..., None]
        system = (bs * ks) @ ks.mT * between
        wanted = torch.cat((bs * vs, bs * ks * grown), dim=-1)
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        new, read = solved.split((vs.shape[-1], ks.shape[-1]), dim=-1)
        new = new - read @ state
        outputs.append(qs * grown @ state + (qs @ ks.mT * between) @ new)
        left = (total[:, -1:] - total).to(q.dtype).exp()[..., None]
        state = state * grown[:, -1:] + (ks * left).mT @ new
    return torch.cat(outputs, dim=1).transpose(0, 1), state


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of B sequences: as `scan`, with B in place of T and state [B, heads, d_k, d_v]."""
    state = state.to(q.dtype) * decay.to(q.dtype).exp()[..., None, None]
    change = (v - (k[..., None, :] @ state)[..., 0, :]) * beta.to(q.dtype)[..., None]
    state = state + k[..., None] * change[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def gated_norm(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, times SiLU of the gate; in the gate's dtype."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)
    return (x * functional.silu(gate.to(x.dtype))).to(gate.dtype)
