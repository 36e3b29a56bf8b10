"""Rotary embedding of queries and keys (Su et al., arXiv 2104.09864) and the write of keys and values into
the paged KV cache, quantising them where its layout asks for it. Optionally the per-head RMSNorm of
queries and keys before it (Qwen3, Gemma 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from delivery.kernels import rms_norm
from delivery.kernels.kv_layout import LAYOUTS, kv_layout, layout_of, scatter
from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.targets import why_not_cpu, why_not_triton


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """x [T, heads, head_dim] rotated by cos, sin [T, rotary_dim / 2]; features past rotary_dim stay.

    A pair is feature j with j + rotary_dim / 2 (NeoX), or 2j with 2j + 1 where interleaved (GLM).
    """
    work = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half].to(work), x[..., 2 * half :]
    pairs = turning.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turning.chunk(2, dim=-1)
    a, b = pairs
    c, s = cos.to(work)[:, None], sin.to(work)[:, None]
    turned = (a * c - b * s, b * c + a * s)
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    interleaved: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q and k in place, and writes k and v of token t at slot_mapping[t] of the caches.

    q [T, heads, head_dim], k and v [T, kv_heads, head_dim] (views of a fused projection will do);
    cos, sin float32 [T, rotary_dim / 2]; slot_mapping int64 [T], block · block_size + offset, −1 for a
    token that is not stored (padding). Caches and scales as in `kv_layout`.
    q_norm, k_norm [head_dim]: weights of the per-head RMSNorm (`eps`, `plus_one`) before the rotation.
    Returns (q, k); q, k, the caches and their scales are changed.
    """
    if q_norm is not None:
        q.copy_(rms_norm.reference(q, q_norm, eps, plus_one))
    if k_norm is not None:
        k.copy_(rms_norm.reference(k, k_norm, eps, plus_one))
    q.copy_(rotate(q, cos, sin, interleaved))
    k.copy_(rotate(k, cos, sin, interleaved))
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    layout = layout_of(k_cache)
    scatter(k_cache, k_scale, slots, *layout.quantize(k[kept]))
    scatter(v_cache, v_scale, slots, *layout.quantize(v[kept]))
    return q, k


def _triton(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from delivery.kernels.gpu.rope import rope_cache_write

    return rope_cache_write(*args, **kwargs)


_SHAPES = (
    # name, heads, kv_heads, head_dim, rotary_dim, block_size, interleaved, per-head norm
    ("llama", 8, 2, 128, 128, 64, False, False),
    ("one-kv-head", 4, 1, 64, 64, 16, False, False),
    ("partial", 4, 4, 80, 32, 16, False, False),
    ("phi3", 6, 2, 96, 96, 32, False, False),
    ("glm", 8, 2, 128, 64, 64, True, False),
    ("qwen3", 7, 1, 128, 128, 16, False, True),
    ("gemma", 4, 2, 256, 256, 32, False, True),
)


def _cases() -> Iterator[Case]:
    for kv_dtype in LAYOUTS:
        for shape in _SHAPES:

            def make(
                device: torch.device, dtype: torch.dtype, seed: int, s: Any = shape, kv: str = kv_dtype
            ) -> tuple[object, ...]:
                return _inputs(device, dtype, seed, kv, *s[1:])

            loose = {"auto": 1.0, "int8": 4.0, "fp8": 16.0, "int4": 32.0}[kv_dtype]
            tolerance = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 6e-3}
            yield Case(f"{shape[0]}-{kv_dtype}", make, {d: t * loose for d, t in tolerance.items()})


def _inputs(
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    kv_dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    interleaved: bool,
    norms: bool,
) -> tuple[object, ...]:
    """Arguments for five tokens, one of them padding, at shuffled slots."""
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens, blocks = 5, 3
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(device, dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    angle = torch.rand(tokens, rotary_dim // 2, generator=generator) * 6.28
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[2] = -1
    layout = kv_layout(kv_dtype)
    k_cache, k_scale = layout.allocate(blocks, block_size, kv_heads, head_dim, dtype, device)
    v_cache, v_scale = layout.allocate(blocks, block_size, kv_heads, head_dim, dtype, device)
    weights = torch.rand(2, head_dim, generator=generator).to(device, dtype) + 0.5
    q_norm, k_norm = (weights[0], weights[1]) if norms else (None, None)
    cos, sin = angle.cos().to(device), angle.sin().to(device)
    caches = (k_cache, v_cache, k_scale, v_scale)
    return q, k, v, cos, sin, slots.to(device), *caches, interleaved, q_norm, k_norm


OP = Op(
    name="rope_cache_write",
    reference=reference,
    backends={"cpu": Backend(reference, why_not_cpu), "triton": Backend(_triton, why_not_triton)},
    cases=_cases,
)
