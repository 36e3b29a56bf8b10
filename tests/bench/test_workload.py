"""Workloads and plans: the schema, lengths, arrivals and what decides a digest."""

import json
from dataclasses import replace

import numpy as np
import pytest

from delivery.bench import load_workload, workload_names
from delivery.bench.plan import arrivals, offered_rate, plan, probe_levels, probe_plan, warmup_plan
from delivery.bench.words import WORDS
from delivery.bench.workload import Arrival, parse_workload, read_trace
from delivery.errors import DataError, UsageError

FIXED = {"requests": 40, "shape": {"prompt_tokens": 16, "output_tokens": 8}, "arrival": {"concurrency": 4}}


def made(**changes):
    return parse_workload({**FIXED, **changes})


@pytest.mark.parametrize("name", workload_names())
def test_every_shipped_workload_is_valid_and_can_be_planned(name):
    workload = load_workload(name)
    assert workload.name == name
    load = plan(workload)
    assert len(load.requests) == workload.requests >= 130
    assert len({r.id for r in load.requests}) == workload.requests


def test_a_plan_is_the_same_everywhere_but_tokens_change_with_the_run():
    workload = made()
    assert plan(workload, 1) == plan(workload, 1)
    first, second = plan(workload, 0), plan(workload, 1)
    assert [r.output_tokens for r in first.requests] == [r.output_tokens for r in second.requests]
    assert all(a.numbers != b.numbers for a, b in zip(first.requests, second.requests, strict=True))
    assert {r.numbers for r in warmup_plan(workload).requests}.isdisjoint(r.numbers for r in first.requests)


def test_token_ids_stay_clear_of_special_tokens_and_words_of_new_lines():
    request = plan(made()).requests[0]
    ids = request.token_ids(49152)
    assert len(ids) == 16
    assert min(ids) >= 49152 // 20
    assert max(ids) < 49152 - 49152 // 20
    assert len(request.text().split(" ")) == 16
    assert all(w.isalpha() for w in WORDS)
    assert len(set(WORDS)) == len(WORDS)


def test_mixed_shares_are_exact():
    workload = load_workload("mixed")
    lengths = [r.prompt_tokens for r in plan(workload).requests]
    assert sum(n <= 31 for n in lengths) == 180
    assert sum(32 <= n <= 256 for n in lengths) == 90
    assert sum(n > 256 for n in lengths) == 30
    assert lengths != sorted(lengths)


def test_prompts_with_a_shared_prefix_share_it_within_their_group_only():
    workload = made(
        shape={
            "kind": "shared_prefix",
            "prefixes": 2,
            "prefix_tokens": 5,
            "prompt_tokens": 3,
            "output_tokens": 1,
        }
    )
    numbers = [r.numbers for r in plan(workload).requests]
    assert numbers[0][:5] == numbers[2][:5] != numbers[1][:5]
    assert numbers[0][5:] != numbers[2][5:]
    assert {len(n) for n in numbers} == {8}


def test_arrivals_of_every_kind():
    assert arrivals(made()) is None
    even = arrivals(made(arrival={"kind": "constant", "rate": 4.0}))
    assert np.allclose(np.diff(even), 0.25)
    poisson = arrivals(made(requests=4000, arrival={"kind": "poisson", "rate": 10.0}))
    assert poisson[0] == 0.0
    assert np.mean(np.diff(poisson)) == pytest.approx(0.1, rel=0.05)
    assert np.std(np.diff(poisson)) == pytest.approx(0.1, rel=0.1)
    ramp = arrivals(made(requests=600, arrival={"kind": "ramp", "rate": 2.0, "rate_end": 10.0}))
    assert 1 / np.diff(ramp)[0] == pytest.approx(2.0, rel=0.05)
    assert 1 / np.diff(ramp)[-1] == pytest.approx(10.0, rel=0.05)
    assert ramp[-1] == pytest.approx(100.0, rel=0.01)
    flat = arrivals(made(arrival={"kind": "ramp", "rate": 2.0, "rate_end": 2.0}))
    assert np.allclose(np.diff(flat), 0.5)


def test_a_trace_gives_lengths_and_times_and_is_repeated_when_it_is_short(tmp_path):
    rows = [(10.0, 5, 2), (11.0, 7, 3), (13.0, 9, 4)]
    keys = ("timestamp_s", "prompt_tokens", "output_tokens")
    text = "\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows)
    (tmp_path / "t.jsonl").write_text(text)
    data = {
        "requests": 5,
        "shape": {"kind": "trace", "file": "t.jsonl"},
        "arrival": {"kind": "trace", "speed": 2},
    }
    workload = parse_workload(data, folder=str(tmp_path))
    load = plan(workload)
    assert [r.prompt_tokens for r in load.requests] == [5, 7, 9, 5, 7]
    assert [r.due_s for r in load.requests] == [0.0, 0.5, 1.5, 2.25, 2.75]
    (tmp_path / "t.jsonl").write_text(text.replace("11.0", "11.5"))
    assert parse_workload(data, folder=str(tmp_path)).digest != workload.digest
    (tmp_path / "t.jsonl").write_text("{}")
    with pytest.raises(DataError, match="not a line of a trace"):
        parse_workload({**data, "requests": 0}, folder=str(tmp_path))


def test_the_digest_covers_what_is_asked_and_nothing_else():
    base = made()
    assert replace(base, name="other", warmup=9, folder="/x").digest == base.digest
    changed = [
        made(requests=41),
        made(seed=1),
        made(arrival={"concurrency": 5}),
        made(shape={"prompt_tokens": 17, "output_tokens": 8}),
        made(shape={"prompt_tokens": 16, "output_tokens": 9}),
    ]
    assert len({w.digest for w in [base, *changed]}) == 6


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"request": 3}, "did you mean 'requests'"),
        ({"shape": {"kind": "fixd", "prompt_tokens": 1, "output_tokens": 1}}, "one of fixed"),
        ({"arrival": {"kind": "poisson"}}, "rate is over 0"),
        ({"arrival": {"kind": "closed", "concurrency": 0}}, "at least 1"),
        ({"requests": 0}, "at least 1"),
        ({"shape": {"prompt_tokens": 4}}, "tokens in and out"),
        ({"shape": {"kind": "mixed"}}, "add up to 1"),
        ({"arrival": {"kind": "trace"}}, "need a trace"),
        ({"shape": "long"}, "not a mapping"),
    ],
)
def test_a_workload_that_says_nothing_is_refused(changes, match):
    with pytest.raises(UsageError) as caught:
        made(**changes)
    assert match in caught.value.render()


def test_an_unknown_workload_gets_a_suggestion():
    with pytest.raises(UsageError, match="did you mean 'mixed'"):
        load_workload("mixd")


def test_the_arrival_can_be_replaced():
    workload = made()
    assert workload.with_arrival(rate=3.0).arrival == Arrival(kind="poisson", rate=3.0)
    assert load_workload("ramp").with_arrival(rate=3.0).arrival == Arrival(kind="poisson", rate=3.0)
    assert workload.with_arrival(concurrency=7).arrival.concurrency == 7
    assert workload.with_arrival() is workload
    with pytest.raises(UsageError, match="exclude each other"):
        workload.with_arrival(rate=1.0, concurrency=1)
    with pytest.raises(UsageError, match="is not valid"):
        workload.with_arrival(rate=float("inf"))


def test_a_probe_is_a_closed_loop_with_every_kind_in_its_share_and_tokens_of_its_own():
    workload = load_workload("mixed")
    load = probe_plan(workload, 64)
    assert load.concurrency == 64
    assert all(r.due_s is None for r in load.requests)
    lengths = [r.prompt_tokens for r in load.requests]
    assert len(lengths) == 128
    assert [sum(low <= n <= high for n in lengths) for low, high in ((8, 31), (32, 256), (257, 1024))] == [
        77,
        38,
        13,
    ]
    whole = [r.output_tokens for r in plan(workload).requests]
    assert np.mean([r.output_tokens for r in load.requests]) == pytest.approx(np.mean(whole), rel=0.02)
    assert lengths != sorted(lengths)
    assert {r.numbers for r in load.requests}.isdisjoint(r.numbers for r in plan(workload).requests)


@pytest.mark.parametrize(
    ("requests", "levels"), [(1, (1,)), (40, (20,)), (130, (64,)), (256, (64, 128)), (600, (64, 128, 256))]
)
def test_as_many_are_in_flight_in_a_probe_as_half_of_the_requests(requests, levels):
    assert probe_levels(made(requests=requests)) == levels


def test_what_an_open_loop_asks_where_it_asks_most(tmp_path):
    assert offered_rate(made()) is None
    assert offered_rate(load_workload("mixed")) == 8.0
    assert offered_rate(load_workload("ramp")) == 16.0
    assert offered_rate(made(arrival={"kind": "ramp", "rate": 9, "rate_end": 2})) == 9.0
    path = tmp_path / "trace.jsonl"
    due = [float(i) for i in range(20)] + [20 + i / 4 for i in range(20)]
    rows = [{"timestamp_s": t, "prompt_tokens": 2, "output_tokens": 2} for t in due]
    path.write_text("\n".join(map(json.dumps, rows)))
    shape = {"kind": "trace", "file": str(path)}
    traced = made(requests=0, shape=shape, arrival={"kind": "trace", "speed": 2.0})
    assert offered_rate(traced) == pytest.approx(8.0)


@pytest.mark.parametrize(
    "broken",
    [
        {"arrival": {"kind": "poisson", "rate": "8"}},
        {"arrival": {"kind": "poisson", "rate": float("inf")}},
        {"arrival": {"kind": "poisson", "rate": float("nan")}},
        {"arrival": {"kind": "ramp", "rate": 1.0, "rate_end": float("inf")}},
        {"arrival": {"concurrency": 2.5}},
        {"arrival": {"concurrency": True}},
        {"shape": {"prompt_tokens": 4.5, "output_tokens": 4}},
        {"shape": {"kind": "shared_prefix", "prompt_tokens": 4, "output_tokens": 4, "prefixes": 1.5}},
        {"shape": {"kind": "trace", "file": 5}},
        {"shape": {"kind": "mixed", "classes": "all"}},
        {
            "shape": {
                "kind": "mixed",
                "classes": [
                    {"share": 2.0, "prompt_tokens": 4, "output_tokens": 3},
                    {"share": -1.0, "prompt_tokens": 4, "output_tokens": 3},
                ],
            }
        },
        *(
            {"shape": {"kind": "mixed", "classes": [{"share": 1.0, "prompt_tokens": n, "output_tokens": 3}]}}
            for n in ([1, float("inf")], [1.5, 2.5], True, [3], [4, 3], "ab")
        ),
        {"requests": 1.5},
        {"requests": "130"},
        {"requests": 10**12},
        {"seed": -1},
        {"warmup": 1.5},
    ],
)
def test_a_value_of_another_kind_is_refused_before_anything_is_measured(broken):
    with pytest.raises(UsageError) as caught:
        made(**broken)
    assert caught.value.code == "bad-workload"


def test_a_trace_knows_when_its_requests_came(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"trace\.jsonl cannot be read"):
        read_trace(path)
    path.write_text('{"timestamp_s": 0, "prompt_tokens": 1e999, "output_tokens": 2}')
    with pytest.raises(DataError, match="is not a line of a trace"):
        read_trace(path)
    path.write_text('{"timestamp_s": NaN, "prompt_tokens": 2, "output_tokens": 2}')
    with pytest.raises(DataError, match="is not a line of a trace"):
        made(requests=0, shape={"kind": "trace", "file": str(path)}, arrival={"kind": "trace"})


def test_eight_a_second_is_one_workload_however_it_is_written():
    assert made(arrival={"kind": "poisson", "rate": 8}) == made(arrival={"kind": "poisson", "rate": 8.0})
    whole, point = (made(arrival={"kind": "poisson", "rate": rate}) for rate in (8, 8.0))
    assert whole.digest == point.digest
