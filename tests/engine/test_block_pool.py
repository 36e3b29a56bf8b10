"""The block pool: states, neighbours, prefix cache; and any sequence of operations keeps it whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from delivery.engine.block_pool import BlockPool, chain_hash


def test_growth_takes_the_neighbour() -> None:
    pool = BlockPool(16, 4)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    second = pool.allocate(2)
    assert second is not None
    grown = pool.allocate(2, after=second[-1])
    assert grown == [second[-1] + 1, second[-1] + 2]
    assert (pool.grown, pool.grown_adjacent) == (2, 2)


def test_freed_neighbours_join_in_any_order() -> None:
    pool = BlockPool(6, 4)
    blocks = pool.allocate(6)
    assert blocks == list(range(6))
    for block in (4, 1, 3, 0, 5, 2):
        pool.free([block])
        pool.check_integrity()
    assert pool.free_runs() == {0: 6}


def test_no_room_is_none_and_changes_nothing() -> None:
    pool = BlockPool(4, 4)
    assert pool.allocate(3) is not None
    before = pool.free_runs()
    assert pool.allocate(2) is None
    assert pool.free_runs() == before


def test_misuse_raises() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.free(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.publish(2, b"x")
    with pytest.raises(ValueError, match="holds nothing"):
        BlockPool(0, 4)


def test_published_prefix_outlives_its_request_and_is_shared() -> None:
    pool = BlockPool(8, 2)
    one = chain_hash(b"", [5, 6])
    two = chain_hash(one, [7, 8])
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.publish(blocks[0], one)
    pool.publish(blocks[1], two)
    pool.free(blocks)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 2, 8)
    assert pool.match([one, two]) == blocks[:2]
    assert pool.match([two]) == [blocks[1]]
    assert pool.match([chain_hash(b"", [7, 8])]) == []
    again = pool.allocate(1, share=pool.match([one, two]))
    assert again is not None
    assert again[:2] == blocks[:2]
    pool.check_integrity()


def test_cached_tail_is_evicted_before_its_head() -> None:
    pool = BlockPool(3, 1)
    hashes = [b"a", b"b", b"c"]
    blocks = pool.allocate(3)
    assert blocks is not None
    for block, value in zip(blocks, hashes, strict=True):
        pool.publish(block, value)
    pool.free(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match(hashes) == blocks[:2]


def test_shared_blocks_are_not_evicted_to_make_room_for_their_sharer() -> None:
    pool = BlockPool(2, 1)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], b"a")
    pool.publish(blocks[1], b"b")
    pool.free(blocks)
    assert pool.allocate(1, share=pool.match([b"a", b"b"])) is None
    assert pool.allocate(1, share=pool.match([b"a"])) == [blocks[0], blocks[1]]
    pool.check_integrity()


def test_hash_depends_on_every_token_before() -> None:
    assert chain_hash(chain_hash(b"", [1]), [2]) != chain_hash(chain_hash(b"", [3]), [2])


class PoolMachine(RuleBasedStateMachine):
    """Sequences that come, grow, share and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 2)
        self.owned: list[tuple[list[int], list[bytes]]] = []

    @rule(chain=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=4), extra=st.integers(0, 5))
    def start(self, chain: list[bytes], extra: int) -> None:
        hashes = [b"/".join(chain[: i + 1]) for i in range(len(chain))]
        shared = self.pool.match(hashes)
        room = self.pool.num_free
        wanted = len(hashes) - len(shared) + extra
        cached = sum(
            self.pool.num_used == 0 or b not in {x for o, _ in self.owned for x in o} for b in shared
        )
        blocks = self.pool.allocate(wanted, share=shared)
        assert (blocks is None) == (wanted > room - cached)
        if blocks is None:
            return
        assert len(set(blocks)) == len(blocks) == len(shared) + wanted
        for block, value in zip(blocks, hashes, strict=False):
            self.pool.publish(block, value)
        self.owned.append((blocks, hashes))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        blocks, _ = data.draw(st.sampled_from(self.owned))
        more = self.pool.allocate(1, after=blocks[-1] if blocks else None)
        assert (more is None) == (self.pool.num_free == 0 and more is None)
        blocks += more or []

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owned) - 1))
        self.pool.free(self.owned.pop(index)[0])

    @rule()
    def forget(self) -> None:
        self.pool.reset_cache()
        assert self.pool.num_cached == 0

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity()
        used = {block for blocks, _ in self.owned for block in blocks}
        assert self.pool.num_used == len(used)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


@given(order=st.permutations(range(9)))
@settings(max_examples=50, deadline=None)
def test_all_freed_is_one_run(order: list[int]) -> None:
    pool = BlockPool(9, 1)
    pool.allocate(9)
    for block in order:
        pool.free([block])
    assert pool.free_runs() == {0: 9}
