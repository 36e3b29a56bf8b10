"""Sharing of prompt prefixes: the hash chain over full blocks, and when they are shared. No torch."""

from __future__ import annotations

from delivery.engine.block_pool import BlockPool, chain_hash
from delivery.engine.request import Request

_LONG_ROPE_SALT = b"long"


def extend_hashes(request: Request, pool: BlockPool) -> None:
    """Bring `request.block_hashes` up to the request's known tokens."""
    size, hashes = pool.block_size, request.block_hashes
    full = request.num_tokens // size
    if not pool.prefix_cache or len(hashes) >= full:
        return
    tokens = request.tokens()
    parent = hashes[-1] if hashes else (_LONG_ROPE_SALT if request.long_rope else b"")
    for at in range(len(hashes) * size, full * size, size):
        parent = chain_hash(parent, tokens[at : at + size])
        hashes.append(parent)


def publish(request: Request, pool: BlockPool) -> None:
    """Share the blocks that the step being scheduled fills.

    Steps run in order and write a layer's keys before reading them, so no reader comes too early.
    """
    full = min(request.num_computed_tokens, request.num_tokens) // pool.block_size
    if full <= request.num_published:
        return
    if pool.prefix_cache:
        extend_hashes(request, pool)
        for index in range(request.num_published, full):
            pool.publish(request.block_ids[index], request.block_hashes[index])
    request.num_published = full
