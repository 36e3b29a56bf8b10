"""The memory plan is arithmetic: what fits, what does not, and what would."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.engine.memory_plan import Need, plan
from delivery.errors import EnvironmentLacking

MIB = 1 << 20
NEED = Need(
    weights_bytes=100 * MIB, peak_bytes=20 * MIB, overhead_bytes=5 * MIB, block_bytes=MIB, block_size=64
)


def test_share_of_what_is_left() -> None:
    made = plan(NEED, 225 * MIB, 0.8, 1024, 4096, useful_tokens=10**9)
    assert made.num_blocks == 80
    assert made.kv_tokens == 80 * 64
    assert made.total_bytes == 205 * MIB
    assert made.to_json()["total_bytes"] == 205 * MIB


def test_a_count_of_blocks() -> None:
    assert plan(NEED, 225 * MIB, 30, 1024, 4096, useful_tokens=64).num_blocks == 30


def test_no_more_than_can_be_used() -> None:
    assert plan(NEED, 225 * MIB, 0.8, 64, 4096, useful_tokens=100).num_blocks == 2


def test_session_length_shrinks_only_when_nobody_asked() -> None:
    assert plan(NEED, 135 * MIB, 0.8, None, 4096, useful_tokens=10**9).max_model_len == 8 * 64
    with pytest.raises(EnvironmentLacking, match=r"64 KV blocks of 64 tokens.*available 0\.132"):
        plan(NEED, 135 * MIB, 0.8, 4096, 4096, useful_tokens=10**9)


def test_weights_alone_too_large() -> None:
    with pytest.raises(EnvironmentLacking, match="4-bit weights"):
        plan(NEED, 110 * MIB, 0.8, None, 4096, useful_tokens=10**9)


def test_a_share_that_holds_no_block_is_answered_with_a_count() -> None:
    with pytest.raises(EnvironmentLacking, match=r"of which 1e-05 of the rest") as caught:
        plan(NEED, 225 * MIB, 0.00001, None, 4096, useful_tokens=10**9)
    fits = re.fullmatch(r"cache_max_entry_count (\d+) would fit", caught.value.hint)
    assert fits
    plan(NEED, 225 * MIB, int(fits[1]), None, 4096, useful_tokens=10**9)


@given(
    available=st.integers(100, 400), length=st.integers(1, 20000), share=st.sampled_from([0.5, 0.8, 100.0])
)
def test_the_hint_fits(available: int, length: int, share: float) -> None:
    try:
        made = plan(NEED, available * MIB, share, length, 32768, useful_tokens=10**9)
    except EnvironmentLacking as error:
        fits = re.search(r"max_model_len (\d+)", error.hint)
        if fits is None:
            assert available <= 127
            return
        blocks = re.search(r"cache_max_entry_count (\d+)", error.hint)
        asked = float(blocks[1]) if blocks and share >= 1 else share
        plan(NEED, available * MIB, asked, int(fits[1]), 32768, useful_tokens=10**9)
    else:
        assert made.total_bytes <= available * MIB
        assert made.kv_tokens >= length
