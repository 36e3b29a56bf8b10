"""BlockPool: who owns which block of the paged KV cache (arXiv 2309.06180). No torch.

Every block is in one of three states: *free* (contents meaningless), *used* (at least one request
refers to it), or *cached* (nobody refers to it, but its contents are a known prefix that a later
request may share; given away last, oldest first). Free blocks are kept as runs of neighbours: a
growing sequence takes the block next to its last one where that is free, and freed neighbours join.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The identity of a full block: its tokens and, through `parent`, all tokens before it (16 bytes)."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class FreeRuns:
    """Free blocks as disjoint runs [start, start + length) without touching neighbours."""

    def __init__(self, num_blocks: int) -> None:
        self._length: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._longest: list[tuple[int, int]] = []
        self.count = 0
        self._insert(0, num_blocks)

    def _insert(self, start: int, length: int) -> None:
        if length:
            self._length[start] = length
            self._start_of_end[start + length] = start
            heapq.heappush(self._longest, (-length, start))
            self.count += length

    def _remove(self, start: int) -> int:
        length = self._length.pop(start)
        del self._start_of_end[start + length]
        self.count -= length
        return length

    def add(self, block: int) -> None:
        """Give a block back; it joins the runs that end before it and begin behind it."""
        start, length = block, 1
        if block in self._start_of_end:
            start = self._start_of_end[block]
            length += self._remove(start)
        if block + 1 in self._length:
            length += self._remove(block + 1)
        self._insert(start, length)

    def take_at(self, block: int, wanted: int) -> list[int]:
        """Up to `wanted` blocks from `block` on, if a run begins there."""
        if block not in self._length:
            return []
        length = self._remove(block)
        taken = min(wanted, length)
        self._insert(block + taken, length - taken)
        return list(range(block, block + taken))

    def take_longest(self, wanted: int) -> list[int]:
        """Up to `wanted` blocks from the longest run: what is left behind is where it can grow."""
        while self._longest:
            negative, start = self._longest[0]
            if self._length.get(start) == -negative:
                return self.take_at(start, wanted)
            heapq.heappop(self._longest)  # an entry of a run that has changed since
        return []

    def runs(self) -> dict[int, int]:
        """start → length of every run."""
        return dict(self._length)


class BlockPool:
    """Owners of `num_blocks` blocks of `block_size` tokens each.

    prefix_cache: whether full blocks can be shared and outlive their request.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._runs = FreeRuns(num_blocks)
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.grown = 0
        """Blocks given to a sequence that had one already, and of these those next to its last one."""
        self.grown_adjacent = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones."""
        return self._runs.count + len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._references)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def free_runs(self) -> dict[int, int]:
        """start → length of every run of free blocks."""
        return self._runs.runs()

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a hash chain. Takes no reference."""
        found: list[int] = []
        if self.prefix_cache:
            for value in hashes:
                if value not in self._block_of:
                    break
                found.append(self._block_of[value])
        return found

    def allocate(
        self, wanted: int, *, share: Sequence[int] = (), after: int | None = None
    ) -> list[int] | None:
        """`share` (from `match`) with a reference more, and `wanted` blocks of one's own behind them.

        after: the sequence's last block, whose neighbour is taken first when it is free.
        None, and nothing changed, when there is no room.
        """
        reserved = sum(block in self._cached for block in share)
        if wanted > self.num_free - reserved:
            return None
        for block in share:
            self._cached.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1
        last = share[-1] if share and after is None else after
        taken = self._take(wanted, last)
        if after is not None:
            self.grown += wanted
            self.grown_adjacent += sum(b == after + 1 + i for i, b in enumerate(taken))
        for block in taken:
            self._references[block] = 1
        return [*share, *taken]

    def _take(self, wanted: int, last: int | None) -> list[int]:
        taken: list[int] = []
        if last is not None:
            taken = self._runs.take_at(last + 1, wanted)
        while len(taken) < wanted:
            if not self._runs.count:
                self._evict(wanted - len(taken))
            taken += self._runs.take_longest(wanted - len(taken))
        return taken

    def _evict(self, count: int) -> None:
        for _ in range(count):
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self._runs.add(block)

    def _forget(self, block: int) -> None:
        value = self._hash_of.pop(block, None)
        if value is not None and self._block_of.get(value) == block:
            del self._block_of[value]

    def publish(self, block: int, value: bytes) -> None:
        """Make a full, used block shareable under its chain hash. The first block with a hash stays."""
        if block not in self._references:
            raise ValueError(f"block {block} is not in use")
        if self.prefix_cache and value not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = value
            self._block_of[value] = block

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block. Published ones without references stay cached.

        Raises ValueError for a block that is not in use.
        """
        # Back to front, so that a chain's tail is evicted before what it hangs on.
        for block in reversed(blocks):
            references = self._references.get(block, 0)
            if references == 0:
                raise ValueError(f"block {block} is not in use")
            if references > 1:
                self._references[block] = references - 1
                continue
            del self._references[block]
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._runs.add(block)

    def reset_cache(self) -> None:
        """Forget every cached prefix; used blocks stay with their owners but get no new sharers."""
        self._evict(len(self._cached))
        for block in list(self._hash_of):
            self._forget(block)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free, used or cached, exactly once."""
        free = [b for start, length in self._runs.runs().items() for b in range(start, start + length)]
        seen = sorted([*free, *self._references, *self._cached])
        assert seen == list(range(self.num_blocks)), f"{len(seen)} of {self.num_blocks} blocks accounted for"
        assert len(free) == self._runs.count
        runs = self._runs.runs()
        assert all(start + length not in runs for start, length in runs.items()), "neighbours did not join"
        assert all(count > 0 for count in self._references.values())
        assert set(self._cached) <= set(self._hash_of), "a cached block has no hash"
        assert {self._block_of[v] for v in self._block_of} == set(self._hash_of), "hashes do not pair up"
