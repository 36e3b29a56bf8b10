"""Finding baselines, and making a first one."""

from __future__ import annotations

from pathlib import Path

import pytest

from delivery.errors import BaselineError
from delivery.gate import baseline as baselines
from delivery.gate.lookup import Place, find, find_or_make


def test_what_a_first_baseline_says_of_itself_stays_the_same_when_it_is_judged_again(tmp_path: Path) -> None:
    committed, local = tmp_path / "committed", tmp_path / "local"
    first = baselines.Snapshot(engine="e", reason="first", runs=(), measurement="m" * 64)
    here = Place("demo", "here-1", {"name": "here"}, {}, "w" * 64)
    there = Place("demo", "there-1", {"name": "there"}, {}, "w" * 64)
    other = find_or_make(there, committed, local, first, "bootstrap")
    other.record()

    made = find_or_make(here, committed, local, first, "bootstrap")
    assert made.made_now
    assert (
        made.note == "no baseline of demo on here-1; there is one for there-1, which cannot be compared with"
    )
    made.record()
    again = find_or_make(here, committed, local, first, "fail")
    assert again.made_now
    assert again.note == made.note
    assert again.path is None

    second = baselines.Snapshot(engine="e2", reason="second", runs=(), measurement="n" * 64)
    assert not find_or_make(here, committed, local, second, "fail").made_now


@pytest.mark.parametrize(
    ("moved", "told"),
    [
        (Place("demo", "here-1", {"name": "other"}, {}, "w" * 64), "device {'name': 'here'}"),
        (Place("Demo", "here-1", {"name": "here"}, {}, "w" * 64), "model 'demo', expected 'Demo'"),
        (Place("demo", "here-1", {"name": "here"}, {}, "w" * 16 + "v" * 48), "workload 'wwww"),
    ],
)
def test_a_file_in_the_wrong_folder_is_not_compared_with(tmp_path: Path, moved: Place, told: str) -> None:
    first = baselines.Snapshot(engine="e", reason="first", runs=(), measurement="m" * 64)
    here = Place("demo", "here-1", {"name": "here"}, {}, "w" * 64)
    find_or_make(here, tmp_path / "c", tmp_path / "l", first, "bootstrap").record()
    moved.path(tmp_path / "c").parent.mkdir(parents=True)
    here.path(tmp_path / "l").rename(moved.path(tmp_path / "c"))
    with pytest.raises(BaselineError, match="is the baseline of something else") as caught:
        find_or_make(moved, tmp_path / "c", tmp_path / "l", first, "bootstrap")
    assert told in caught.value.why
    assert caught.value.exit_code == 5


def test_a_name_that_has_the_same_folder_is_the_same_model(tmp_path: Path) -> None:
    first = baselines.Snapshot(engine="e", reason="first", runs=(), measurement="m" * 64)
    named = Place("org/demo", "here-1", {"name": "here"}, {}, "w" * 64)
    find_or_make(named, tmp_path / "c", tmp_path / "l", first, "bootstrap").record()
    cleaned = Place("org-demo", "here-1", {"name": "here"}, {}, "w" * 64)
    assert find(cleaned, tmp_path / "c", tmp_path / "l") is not None
