"""Next-token choice on the device: greedy, temperature, top-k, top-p; one setting per row, no host sync.

Random rows take the Gumbel maximum, argmax(logits / temperature + gumbel), over the tokens that the
filters keep. The noise is a hash of (seed, position, token), so a request draws the same tokens in any
batch and on any backend.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from delivery.kernels.op import Backend, Case, Op
from delivery.kernels.targets import why_not_cpu, why_not_triton

GOLDEN = 0x9E3779B9
_WORD = 0xFFFFFFFF


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    filtered: bool = True,
) -> torch.Tensor:
    """logits [B, V] → token ids int64 [B].

    temperature float32 [B], 0 for greedy (the first of equal logits); top_k int32 [B], 0 for all;
    top_p float32 [B], 1 for all; seed int64 [B]; position int64 [B], the index of the token drawn.
    top_k applies first; top_p then keeps the fewest of the rest, likeliest first, whose share reaches
    it. Tokens equal to the last one kept are kept.
    filtered=False promises that no row has top_k or top_p.
    """
    work = torch.promote_types(logits.dtype, torch.float32)
    wide = logits.to(work)
    warm = torch.where(temperature > 0, temperature, 1).to(work)[:, None]
    scaled = wide / warm
    if filtered:
        scaled = scaled.masked_fill(scaled < _threshold(scaled, top_k, top_p), float("-inf"))
    noise = gumbel(seed, position, logits.shape[1]).to(work)
    return torch.where((temperature > 0)[:, None], scaled + noise, wide).argmax(-1)


def _threshold(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[B, 1]: the smallest kept value of each row."""
    size = scaled.shape[1]
    ordered = scaled.sort(-1, descending=True).values
    count = torch.where(top_k > 0, top_k, size).clamp(max=size).to(torch.int64)[:, None]
    kth = ordered.gather(1, count - 1)
    share = ordered.masked_fill(ordered < kth, float("-inf")).softmax(-1)
    before = share.cumsum(-1) - share
    wanted = before < top_p.to(share.dtype)[:, None]
    wanted[:, 0] = True
    nucleus = ordered.gather(1, wanted.sum(-1, keepdim=True) - 1)
    return torch.where((top_p < 1)[:, None], torch.maximum(kth, nucleus), kth)


def gumbel(seed: torch.Tensor, position: torch.Tensor, size: int) -> torch.Tensor:
    """float64 [B, size]: −log(−log(u)), u a hash of (seed, position, index) with 23 bits, never 0 or 1."""
    index = torch.arange(size, device=seed.device) * GOLDEN & _WORD
    first = _mix((seed & _WORD) ^ _mix((seed >> 32) & _WORD))
    second = _mix(first ^ (position & _WORD))
    bits = _mix(_mix((index[None] + first[:, None]) & _WORD) ^ second[:, None])
    uniform = ((bits >> 9).to(torch.float64) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(word: torch.Tensor) -> torch.Tensor:
    """A bijective hash of 32-bit words (held in int64)."""
    word = (word ^ (word >> 16)) * 0x7FEB352D & _WORD
    word = (word ^ (word >> 15)) * 0x846CA68B & _WORD
    return word ^ (word >> 16)


def _cpu(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    filtered: bool = True,
) -> torch.Tensor:
    warm = temperature > 0
    out = logits.argmax(-1)
    if bool(warm.any()):
        rows = warm.nonzero()[:, 0]
        settings = temperature[rows], top_k[rows], top_p[rows], seed[rows], position[rows]
        out[rows] = reference(logits[rows], *settings, filtered)
    return out


def _triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    filtered: bool = True,
) -> torch.Tensor:
    from delivery.kernels.gpu.sampling import sample

    return sample(logits, temperature, top_k, top_p, seed, position, filtered)


def _cases() -> Iterator[Case]:
    for size, filtered in ((97, False), (97, True), (20000, True), (49152, False)):

        def make(
            device: torch.device, dtype: torch.dtype, seed: int, v: int = size, on: bool = filtered
        ) -> tuple[object, ...]:
            generator = torch.Generator("cpu").manual_seed(seed)
            logits = torch.randn(8, v, generator=generator) * 4
            temperature = torch.tensor([0.0, 1.0, 0.7, 2.0, 0.5, 1.0, 9.0, 1.0])
            top_k = torch.tensor([0, 0, 5, 40, 1, 0, 0, 500], dtype=torch.int32) * on
            top_p = torch.tensor([1.0, 0.9, 0.5, 1.0, 0.9, 0.01, 0.99, 0.9]) if on else torch.ones(8)
            seeds = torch.randint(0, 2**62, (8,), generator=generator)
            position = torch.randint(0, 4096, (8,), generator=generator)
            rows = (temperature, top_k, top_p, seeds, position)
            return logits.to(device, dtype), *(row.to(device) for row in rows), on

        exact = {torch.float32: 0.0, torch.bfloat16: 0.0} | ({} if filtered else {torch.float16: 0.0})
        yield Case(f"v{size}{'-filtered' if filtered else ''}", make, exact)


OP = Op(
    name="sample",
    reference=reference,
    backends={"cpu": Backend(_cpu, why_not_cpu), "triton": Backend(_triton, why_not_triton)},
    cases=_cases,
)
