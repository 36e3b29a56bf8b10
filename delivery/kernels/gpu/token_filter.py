"""Top-k and top-p as a threshold for each row, without a sort.

The k-th largest of the maxima of groups of 128 logits bounds the k-th largest logit from below, so the
groups that reach it hold everything that matters; they fit into registers, where two bits of the answer
are decided at a time. Rows for which that is not enough (a large k, a flat nucleus) search all of their
logits, in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from delivery.kernels.gpu.pages import LOG2E

_KEY_BITS = {torch.float32: 32, torch.float16: 20, torch.bfloat16: 16}
"""Leading bits of a float32 in which numbers of a dtype differ (rounded up to an even count)."""


_GROUP = 128
_GROUPS_A_PROGRAM = 32
_CANDIDATES = 128
"""Groups that the fast search takes: 16384 logits, 32 a thread."""


@triton.jit
def ordered_key(x):
    """uint32 in the order of the float32 x."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _share(x, highest, temperature, by_mass):
    """What a token adds to a search: its unnormalised probability, or 1."""
    return tl.where(by_mass, tl.exp2((x - highest) * (LOG2E / temperature)), 1.0)


@triton.jit
def _search(key, share, wanted, BITS: tl.constexpr):
    """The largest key whose tokens, itself and above, have shares that add up to `wanted`."""
    found = tl.full((), 0, tl.uint32)
    for step in range(BITS // 2):
        one = tl.full((), 1, tl.uint32) << (30 - 2 * step)
        enough = (tl.sum(tl.where(key >= found + one, share, 0.0)) >= wanted).to(tl.uint32)
        enough += (tl.sum(tl.where(key >= found + 2 * one, share, 0.0)) >= wanted).to(tl.uint32)
        enough += (tl.sum(tl.where(key >= found + 3 * one, share, 0.0)) >= wanted).to(tl.uint32)
        found += enough * one
    return found


@triton.jit
def _search_row(
    row, floor, wanted, by_mass, highest, temperature, vocabulary, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """As `_search` over the tokens of a whole row that are at `floor` or above."""
    column = tl.arange(0, BLOCK)
    found = tl.full((), 0, tl.uint32)
    for step in range(BITS // 2):
        one = tl.full((), 1, tl.uint32) << (30 - 2 * step)
        high = tl.zeros((BLOCK,), tl.float32)
        middle = tl.zeros((BLOCK,), tl.float32)
        low = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, vocabulary, BLOCK):
            inside = begin + column < vocabulary
            x = tl.load(row + begin + column, mask=inside, other=float("-inf")).to(tl.float32)
            key = ordered_key(x)
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
def _mass_of_row(row, floor, highest, temperature, vocabulary, BLOCK: tl.constexpr):
    """Unnormalised probability of the tokens at `floor` or above."""
    column = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        inside = begin + column < vocabulary
        x = tl.load(row + begin + column, mask=inside, other=float("-inf")).to(tl.float32)
        mass += tl.where(inside & (ordered_key(x) >= floor), _share(x, highest, temperature, True), 0.0)
    return tl.sum(mass)


@triton.jit
def _survey(
    logits,
    temperature,
    group_max,
    part_max,
    part_mass,
    stride,
    vocabulary,
    groups,
    GROUP: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Maximum of each group, and each program's share of the row's mass (relative to its own maximum)."""
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    warmth = tl.load(temperature + b)
    if warmth > 0:
        group = part * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits + b * stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        maxima = tl.max(x, 1)
        tl.store(group_max + b * groups + group, maxima, mask=group < groups)
        most = tl.max(maxima)
        tl.store(part_max + b * PARTS + part, most)
        tl.store(part_mass + b * PARTS + part, tl.sum(tl.exp2((x - most) * (LOG2E / warmth))))


@triton.jit
def _thresholds(
    logits,
    temperature,
    top_k,
    top_p,
    threshold,
    group_max,
    part_max,
    part_mass,
    chosen_groups,
    stride,
    vocabulary,
    groups,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_WIDTH: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    row = logits + b * stride
    warmth = tl.load(temperature + b)
    k = tl.load(top_k + b)
    p = tl.load(top_p + b)
    by_count = (k > 0) & (k < vocabulary)
    floor = tl.full((), 0, tl.uint32)
    if (warmth > 0) & (by_count | (p < 1)):
        group = tl.arange(0, GROUPS)
        maxima = tl.load(group_max + b * groups + group, mask=group < groups, other=float("-inf"))
        keys = tl.where(group < groups, ordered_key(maxima), 0)
        highest = tl.max(maxima)
        reached = tl.minimum(tl.where(by_count, k, CANDIDATES), groups).to(tl.float32)
        least = _search(keys, tl.where(group < groups, 1.0, 0.0), reached, BITS)
        kept = (keys >= least) & (group < groups)
        count = tl.sum(kept.to(tl.int32))
        solved = count <= CANDIDATES
        if solved:
            place = tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(chosen_groups + b * CANDIDATES + place, group, mask=kept)
            tl.debug_barrier()
            slot = tl.arange(0, CANDIDATES)
            member = tl.load(chosen_groups + b * CANDIDATES + slot, mask=slot < count, other=0)
            token = member[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            there = (slot < count)[:, None] & (token < vocabulary)
            x = tl.load(row + token, mask=there, other=float("-inf")).to(tl.float32)
            key = ordered_key(x)
            there = there & (key >= least)
            mass = tl.where(there, _share(x, highest, warmth, True), 0.0)
            part = tl.arange(0, PARTS_WIDTH)
            tops = tl.load(part_max + b * PARTS + part, mask=part < PARTS, other=float("-inf"))
            masses = tl.load(part_mass + b * PARTS + part, mask=part < PARTS, other=0.0)
            total = tl.sum(masses * tl.exp2((tops - highest) * (LOG2E / warmth)))
            if by_count:
                floor = _search(key, tl.where(there, 1.0, 0.0), k.to(tl.float32), BITS)
                mass = tl.where(key >= floor, mass, 0.0)
                total = tl.sum(mass)
            if p < 1:
                wanted = tl.maximum(total * p, 1e-30)
                solved = tl.sum(mass) >= wanted
                floor = tl.maximum(floor, _search(key, mass, wanted, BITS))
        if not solved:
            floor = tl.full((), 0, tl.uint32)
            if by_count:
                wanted = k.to(tl.float32)
                floor = _search_row(row, floor, wanted, False, highest, warmth, vocabulary, BITS, BLOCK)
            if p < 1:
                total = _mass_of_row(row, floor, highest, warmth, vocabulary, BLOCK)
                wanted = tl.maximum(total * p, 1e-30)
                nucleus = _search_row(row, floor, wanted, True, highest, warmth, vocabulary, BITS, BLOCK)
                floor = tl.maximum(floor, nucleus)
    tl.store(threshold + b, floor)


def thresholds(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """uint32 [B]: the key of the smallest logit that each row's filters keep."""
    rows, vocabulary = logits.shape
    device = logits.device
    groups = triton.cdiv(vocabulary, _GROUP)
    parts = triton.cdiv(groups, _GROUPS_A_PROGRAM)
    group_max = torch.empty(rows, groups, dtype=torch.float32, device=device)
    part_max = torch.empty(rows, parts, dtype=torch.float32, device=device)
    part_mass = torch.empty(rows, parts, dtype=torch.float32, device=device)
    chosen = torch.empty(rows, _CANDIDATES, dtype=torch.int32, device=device)
    threshold = torch.empty(rows, dtype=torch.uint32, device=device)
    _survey[(rows, parts)](
        logits,
        temperature,
        group_max,
        part_max,
        part_mass,
        logits.stride(0),
        vocabulary,
        groups,
        GROUP=_GROUP,
        PER_PROGRAM=_GROUPS_A_PROGRAM,
        PARTS=parts,
        num_warps=4,
    )
    _thresholds[(rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        threshold,
        group_max,
        part_max,
        part_mass,
        chosen,
        logits.stride(0),
        vocabulary,
        groups,
        BITS=_KEY_BITS[logits.dtype],
        BLOCK=min(8192, triton.next_power_of_2(vocabulary)),
        GROUP=_GROUP,
        GROUPS=max(128, triton.next_power_of_2(groups)),
        CANDIDATES=_CANDIDATES,
        PARTS=parts,
        PARTS_WIDTH=triton.next_power_of_2(parts),
        num_warps=16,
    )
    return threshold
