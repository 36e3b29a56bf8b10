"""Next-token choice: a threshold for each filtered row, then the (Gumbel) maximum of what lies above it.

The maximum reads the logits once, split over the card. The threshold reads them once for every two bits
of the answer (8 times for bf16 logits), from the L2 cache: it needs no sort and no room for one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.gpu.arrivals import arrival_counters
from delivery.kernels.gpu.pages import LOG2E
from delivery.kernels.targets import multiprocessors

_KEY_BITS = {torch.float32: 32, torch.float16: 20, torch.bfloat16: 16}
"""Leading bits of a float32 in which numbers of a dtype differ (rounded up to an even count)."""


@triton.jit
def _key(x):
    """uint32 in the order of the float32 x."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _mix(word):
    """As `_mix` of the reference."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _share(x, highest, temperature, by_mass):
    """What a token adds to a search: its unnormalised probability, or 1."""
    return tl.where(by_mass, tl.exp2((x - highest) * (LOG2E / temperature)), 1.0)


@triton.jit
def _search(
    row, floor, wanted, by_mass, highest, temperature, vocabulary, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key whose tokens, itself and above, of those at `floor` or above, add up to `wanted`."""
    column = tl.arange(0, BLOCK)
    found = tl.full((), 0, tl.uint32)
    for step in range(BITS // 2):
        shift = 30 - 2 * step
        one = tl.full((), 1, tl.uint32) << shift
        high = tl.zeros((BLOCK,), tl.float32)
        middle = tl.zeros((BLOCK,), tl.float32)
        low = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, vocabulary, BLOCK):
            inside = begin + column < vocabulary
            x = tl.load(row + begin + column, mask=inside, other=float("-inf")).to(tl.float32)
            key = _key(x)
            share = tl.where(inside & (key >= floor), _share(x, highest, temperature, by_mass), 0.0)
            high += tl.where(key >= found + 3 * one, share, 0.0)
            middle += tl.where(key >= found + 2 * one, share, 0.0)
            low += tl.where(key >= found + one, share, 0.0)
        enough = (tl.sum(low) >= wanted).to(tl.uint32)
        enough += (tl.sum(middle) >= wanted).to(tl.uint32)
        enough += (tl.sum(high) >= wanted).to(tl.uint32)
        found += enough * one
    return found


@triton.jit
def _thresholds(
    logits,
    temperature,
    top_k,
    top_p,
    threshold,
    stride,
    vocabulary,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    row = logits + b * stride
    warmth = tl.load(temperature + b)
    k = tl.load(top_k + b)
    p = tl.load(top_p + b)
    floor = tl.full((), 0, tl.uint32)
    if warmth > 0:
        if (k > 0) & (k < vocabulary):
            floor = _search(row, floor, k.to(tl.float32), False, 0.0, warmth, vocabulary, BITS, BLOCK)
        if p < 1:
            column = tl.arange(0, BLOCK)
            highest = tl.full((BLOCK,), float("-inf"), tl.float32)
            for begin in range(0, vocabulary, BLOCK):
                inside = begin + column < vocabulary
                x = tl.load(row + begin + column, mask=inside, other=float("-inf")).to(tl.float32)
                highest = tl.maximum(highest, x)
            most = tl.max(highest)
            mass = tl.zeros((BLOCK,), tl.float32)
            for begin in range(0, vocabulary, BLOCK):
                inside = begin + column < vocabulary
                x = tl.load(row + begin + column, mask=inside, other=float("-inf")).to(tl.float32)
                kept = inside & (_key(x) >= floor)
                mass += tl.where(kept, _share(x, most, warmth, True), 0.0)
            wanted = tl.maximum(tl.sum(mass) * p, 1e-30)
            nucleus = _search(row, floor, wanted, True, most, warmth, vocabulary, BITS, BLOCK)
            floor = tl.maximum(floor, nucleus)
    tl.store(threshold + b, floor)


@triton.jit(do_not_specialize=["span"])
def _choose(
    logits,
    temperature,
    threshold,
    seed,
    position,
    out,
    best_value,
    best_index,
    arrived,
    stride,
    vocabulary,
    span,
    FILTERED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = logits + b * stride
    warmth = tl.load(temperature + b)
    random = warmth > 0
    scale = 1.0 / tl.where(random, warmth, 1.0)
    key = tl.load(seed + b)
    first = _mix(key.to(tl.uint32) ^ _mix((key >> 32).to(tl.uint32)))
    second = _mix(first ^ tl.load(position + b).to(tl.uint32))
    column = tl.arange(0, BLOCK)
    value = tl.full((), float("-inf"), tl.float32)
    index = tl.full((), 0, tl.int32)
    for begin in range(split * span, tl.minimum(split * span + span, vocabulary), BLOCK):
        token = begin + column
        inside = token < vocabulary
        x = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
        score = x * scale
        if random:
            if FILTERED:
                score = tl.where(_key(x) >= tl.load(threshold + b), score, float("-inf"))
            word = _mix(_mix(token.to(tl.uint32) * 0x9E3779B9 + first) ^ second)
            uniform = ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
            score -= tl.log(-tl.log(uniform))
        score = tl.where(inside, score, float("-inf"))
        largest = tl.max(score, 0)
        if largest > value:
            value = largest
            index = begin + tl.argmax(score, 0).to(tl.int32)
    if SPLITS == 1:
        tl.store(out + b, index.to(tl.int64))
    else:
        tl.store(best_value + b * SPLITS + split, value)
        tl.store(best_index + b * SPLITS + split, index)
        tl.debug_barrier()
        if tl.atomic_add(arrived + b, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            part = tl.arange(0, SPLIT_WIDTH)
            there = part < SPLITS
            at = b * SPLITS + part
            values = tl.load(best_value + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            winner = tl.argmax(values, 0)
            indexes = tl.load(best_index + at, mask=there, other=0, cache_modifier=".cg")
            tl.store(out + b, tl.sum(tl.where(part == winner, indexes, 0)).to(tl.int64))
            tl.store(arrived + b, 0)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    filtered: bool,
) -> torch.Tensor:
    """See `delivery.kernels.sampling`."""
    rows, vocabulary = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    threshold = None
    if filtered:
        threshold = torch.empty(rows, dtype=torch.uint32, device=device)
        _thresholds[(rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            threshold,
            logits.stride(0),
            vocabulary,
            BITS=_KEY_BITS[logits.dtype],
            BLOCK=min(8192, triton.next_power_of_2(vocabulary)),
            num_warps=16,
        )
    block = min(2048, triton.next_power_of_2(vocabulary))
    splits = max(1, min(triton.cdiv(vocabulary, block), multiprocessors(device) // rows))
    span = triton.cdiv(triton.cdiv(vocabulary, splits), block) * block
    splits = triton.cdiv(vocabulary, span)
    best_value = torch.empty(rows, splits, dtype=torch.float32, device=device)
    best_index = torch.empty(rows, splits, dtype=torch.int32, device=device)
    _choose[(rows, splits)](
        logits,
        temperature,
        threshold,
        seed,
        position,
        out,
        best_value,
        best_index,
        arrival_counters(device, rows),
        logits.stride(0),
        vocabulary,
        span,
        FILTERED=filtered,
        SPLITS=splits,
        SPLIT_WIDTH=triton.next_power_of_2(splits),
        BLOCK=block,
        num_warps=4,
    )
    return out
