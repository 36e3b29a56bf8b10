"""compare_memory: both directions, equal KV tokens, invalid numbers."""

import pytest

from delivery.gate import compare_memory

BASE = {"weights_bytes": 4e9, "peak_bytes": 3e8, "kv_tokens": 65536, "kv_bytes": 9e9}


@pytest.mark.parametrize("part", ["weights_bytes", "peak_bytes"])
@pytest.mark.parametrize(
    ("change", "status"),
    [(0.0, "pass"), (0.10, "pass"), (-0.10, "pass"), (0.12, "fail"), (-0.12, "fail")],
)
def test_each_part_is_gated_both_ways(part, change, status):
    verdict = compare_memory(BASE, {**BASE, part: BASE[part] * (1 + change)})
    assert verdict.status == status
    assert verdict[part].status == status
    assert verdict[part].ratio == pytest.approx(1 + change)
    others = {"weights_bytes", "peak_bytes"} - {part}
    assert all(verdict[o].status == "pass" for o in others)


def test_the_reserved_cache_does_not_hide_or_cause_a_change():
    assert compare_memory(BASE, {**BASE, "kv_bytes": 1.0}).status == "pass"


def test_different_kv_tokens_are_invalid():
    verdict = compare_memory(BASE, {**BASE, "kv_tokens": 65535})
    assert verdict.status == "invalid"
    assert "65535" in verdict.reason
    assert compare_memory({**BASE, "kv_tokens": None}, BASE).status == "invalid"


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), None])
def test_numbers_that_mean_nothing_are_invalid(bad):
    assert compare_memory(BASE, {**BASE, "peak_bytes": bad}).status == "invalid"
    assert compare_memory({**BASE, "weights_bytes": bad}, BASE).status == "invalid"


def test_a_difference_under_the_floor_passes():
    grown = {**BASE, "peak_bytes": 3.6e8}
    assert compare_memory(BASE, grown, floor_bytes=1e8).status == "pass"
    assert compare_memory(BASE, grown, floor_bytes=1e7).status == "fail"


@pytest.mark.parametrize("limit", [0.0, 1.0, -0.1])
def test_a_limit_that_is_no_share_is_refused(limit):
    with pytest.raises(ValueError, match="between 0 and 1"):
        compare_memory(BASE, BASE, limit=limit)
