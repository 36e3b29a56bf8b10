"""MemoryPlan: what goes where in memory, decided before anything is allocated. No torch.

weights + activation peak + overhead (graphs, libraries, rotary tables) + KV blocks ≤ the memory given.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from delivery.errors import EnvironmentLacking

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Need:
    """What an engine needs, in bytes. state_bytes: recurrent state of all slots (hybrid models)."""

    weights_bytes: int
    peak_bytes: int
    overhead_bytes: int
    block_bytes: int
    block_size: int
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. kv_tokens = num_blocks · block_size; available_bytes is what the plan was given."""

    weights_bytes: int
    peak_bytes: int
    overhead_bytes: int
    state_bytes: int
    kv_bytes: int
    kv_tokens: int
    num_blocks: int
    block_size: int
    block_bytes: int
    available_bytes: int
    max_model_len: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.peak_bytes + self.overhead_bytes + self.state_bytes + self.kv_bytes

    def to_json(self) -> dict[str, Any]:
        """The stored form; without the free memory at that moment, which would make equal builds differ."""
        numbers = asdict(self)
        del numbers["available_bytes"]
        return {**numbers, "total_bytes": self.total_bytes}


def plan(
    need: Need,
    available_bytes: int,
    cache_max_entry_count: float,
    max_model_len: int | None,
    model_limit: int,
    useful_tokens: int,
) -> MemoryPlan:
    """Divide `available_bytes`.

    cache_max_entry_count: number of KV blocks if ≥ 1, else the share of what the rest leaves.
    max_model_len: as requested; None takes the model's limit, or less if the blocks hold less.
    useful_tokens: KV tokens beyond which more would never be used (all slots at full length).
    Raises EnvironmentLacking `plan-does-not-fit` with the arithmetic and the nearest setting that fits.
    """
    fixed = need.weights_bytes + need.peak_bytes + need.overhead_bytes + need.state_bytes
    left = available_bytes - fixed
    fitting = max(0, left // need.block_bytes)
    if cache_max_entry_count >= 1:
        blocks = int(cache_max_entry_count)
    else:
        blocks = int(max(0, left) * cache_max_entry_count) // need.block_bytes
        blocks = min(blocks, -(-useful_tokens // need.block_size))
    length = model_limit if max_model_len is None else max_model_len
    if max_model_len is None:
        length = min(length, blocks * need.block_size)
    wanted = -(-max(1, length) // need.block_size)
    if blocks < max(1, wanted) or blocks > fitting:
        raise _too_small(need, available_bytes, max(blocks, wanted, 1), fitting, cache_max_entry_count)
    return MemoryPlan(
        weights_bytes=need.weights_bytes,
        peak_bytes=need.peak_bytes,
        overhead_bytes=need.overhead_bytes,
        state_bytes=need.state_bytes,
        kv_bytes=blocks * need.block_bytes,
        kv_tokens=blocks * need.block_size,
        num_blocks=blocks,
        block_size=need.block_size,
        block_bytes=need.block_bytes,
        available_bytes=available_bytes,
        max_model_len=length,
    )


def _too_small(need: Need, available: int, blocks: int, fitting: int, share: float) -> EnvironmentLacking:
    parts = (
        ("weights", need.weights_bytes),
        ("activation peak", need.peak_bytes),
        ("overhead", need.overhead_bytes),
        ("recurrent state", need.state_bytes),
        (f"{blocks} KV blocks of {need.block_size} tokens", blocks * need.block_bytes),
    )
    total = sum(size for _, size in parts)
    sums = " + ".join(f"{size / _GIB:.3f} ({name})" for name, size in parts if size)
    usable = fitting if share >= 1 else int(fitting * share)
    if usable >= 1:
        hint = f"max_model_len {usable * need.block_size} would fit"
        hint += f", or cache_max_entry_count {fitting}" if fitting != usable or share >= 1 else ""
    elif fitting >= 1:
        hint = f"cache_max_entry_count {fitting} would fit"
    else:
        missing = (total - available) / _GIB
        hint = f"{missing:.3f} GiB more memory, fewer batched tokens, or 4-bit weights"
    return EnvironmentLacking(
        "plan-does-not-fit",
        "the engine does not fit into memory",
        why=f"GiB: {sums} = {total / _GIB:.3f}, available {available / _GIB:.3f}"
        + (f", of which {share:.3g} of the rest may hold KV blocks" if share < 1 else ""),
        hint=hint,
    )
