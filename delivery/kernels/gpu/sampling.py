"""Next-token choice: the (Gumbel) maximum over the tokens that the filters keep.

Reads the logits once, split over the card; the program of a row that arrives last picks among the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.gpu.arrivals import arrival_counters
from delivery.kernels.gpu.token_filter import ordered_key, thresholds
from delivery.kernels.targets import multiprocessors


@triton.jit
def _mix(word):
    """As `_mix` of the reference."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit(do_not_specialize=["span", "splits"])
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
    splits,
    FILTERED: tl.constexpr,
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
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = split * span + column
    for begin in range(split * span, tl.minimum(split * span + span, vocabulary), BLOCK):
        token = begin + column
        inside = token < vocabulary
        x = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
        score = x * scale
        if random:
            if FILTERED:
                score = tl.where(ordered_key(x) >= tl.load(threshold + b), score, float("-inf"))
            word = _mix(_mix(token.to(tl.uint32) * 0x9E3779B9 + first) ^ second)
            uniform = ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
            score -= tl.log(-tl.log(uniform))
        better = inside & (score > best)
        best = tl.where(better, score, best)
        best_at = tl.where(better, token, best_at)
    value = tl.max(best, 0)
    index = tl.min(tl.where(best == value, best_at, 0x7FFFFFFF), 0)  # the first of equal maxima
    if splits == 1:
        tl.store(out + b, index.to(tl.int64))
    else:
        tl.store(best_value + b * splits + split, value)
        tl.store(best_index + b * splits + split, index)
        tl.debug_barrier()
        if tl.atomic_add(arrived + b, 1, sem="acq_rel", scope="gpu") == splits - 1:
            part = tl.arange(0, SPLIT_WIDTH)
            there = part < splits
            at = b * splits + part
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
    """See `delivery.kernels.sampling`. In how many parts a row is read depends on the number of rows; the
    kernel is one and the same, so that no batch size has to be compiled for."""
    rows, vocabulary = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    settings = (temperature, top_k, top_p)
    threshold = thresholds(logits, *settings) if filtered else None
    block = min(2048, triton.next_power_of_2(vocabulary))
    splits = max(1, min(triton.cdiv(vocabulary, block), 8 * multiprocessors(device) // rows))
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
        splits,
        FILTERED=filtered,
        SPLIT_WIDTH=triton.next_power_of_2(triton.cdiv(vocabulary, block)),
        BLOCK=block,
        num_warps=4,
    )
    return out
