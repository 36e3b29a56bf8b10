"""Causal attention over whole prompts, keys and values still dense: where vendor kernels are at their best.

The mark for `paged_attention`, which the engine takes: it serves chunks, cached prefixes and decodes too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.paged_attention import visible
from delivery.kernels.targets import why_not_cpu


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """q [T, heads, head_dim], k and v [T, kv_heads, head_dim], lengths (sum T) → [T, heads, head_dim].

    Each of the sequences, one after another, attends causally within itself; see `paged_attention`
    for `sliding_window` and `softcap`.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    parts = []
    for queries, keys, values in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
        wide = keys.to(work).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries.to(work), wide) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = visible(len(queries), len(keys), sliding_window, q.device)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, values.to(work).repeat_interleave(group, 1)))
    return torch.cat(parts).to(q.dtype)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    if softcap is not None:
        return reference(q, k, v, lengths, scale, sliding_window, softcap)
    parts, taken = [], 0
    for length, run in groupby(lengths):
        count = len(list(run))
        rows = slice(taken, taken + count * length)
        taken += count * length
        # [count, heads, length, head_dim] views: neighbouring prompts of one length are one batch.
        queries, keys, values = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        narrow = sliding_window is not None and sliding_window < length
        mask = visible(length, length, sliding_window, q.device) if narrow else None
        grouped = k.shape[1] != q.shape[1]
        out = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=not narrow, scale=scale, enable_gqa=grouped
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cudnn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(q, k, v, lengths, scale)


def _why_not_cudnn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> str | None:
    if q.device.type != "cuda":
        return f"the tensor is on {q.device}"
    if not torch.backends.cudnn.is_available():
        return "torch was built without cuDNN"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"cuDNN attends in float16 or bfloat16, not {q.dtype}"
    if q.shape[-1] > 128 or q.shape[-1] % 8:
        return f"head_dim {q.shape[-1]} is not a multiple of 8 up to 128"
    if min(lengths) < 2:
        return "cuDNN takes no prompt of a single token"
    if softcap is not None:
        return "the scores are soft-capped"
    if sliding_window is not None and sliding_window < max(lengths):
        return f"the window of {sliding_window} is shorter than the prompt of {max(lengths)} tokens"
    return None


_SHAPES = (
    # heads, kv_heads, head_dim, lengths, sliding_window, softcap
    ("llama", 8, 2, 128, (33, 33, 70), None, None),
    ("one", 3, 1, 64, (1,), None, None),
    ("window", 4, 4, 96, (50, 20), 16, None),
    ("softcap", 4, 2, 80, (17, 40), None, 20.0),
)


def _cases() -> Iterator[Case]:
    for name, heads, kv_heads, head_dim, lengths, window, softcap in _SHAPES:

        def make(
            device: torch.device,
            dtype: torch.dtype,
            seed: int,
            shape: tuple[int, int, int] = (heads, kv_heads, head_dim),
            tokens: tuple[int, ...] = lengths,
            w: int | None = window,
            cap: float | None = softcap,
        ) -> tuple[object, ...]:
            generator = torch.Generator("cpu").manual_seed(seed)
            qkv = torch.randn(sum(tokens), shape[0] + 2 * shape[1], shape[2], generator=generator)
            q, k, v = qkv.to(device, dtype).split((shape[0], shape[1], shape[1]), dim=1)
            return q, k, v, tokens, shape[2] ** -0.5, w, cap

        tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
        yield Case(name, make, tolerance)


OP = Op(
    name="prompt_attention",
    reference=reference,
    backends={"cpu": Backend(_sdpa, why_not_cpu), "cudnn": Backend(_cudnn, _why_not_cudnn)},
    cases=_cases,
)
