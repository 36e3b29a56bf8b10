"""Files that a step is told of: the same content is the same work, however its path is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import delivery.bench
from delivery.artifact import Artifact, FileRef, Kind, Manifest
from delivery.errors import DataError
from delivery.pipeline.keys import Job, key_of, key_parts
from delivery.resources import resource
from delivery.steps.calibrate import Calibrate
from delivery.steps.compare import Compare
from delivery.steps.evaluate import Evaluate
from delivery.steps.smoke import Smoke

SHIPPED = Path(delivery.bench.__file__).parent / "workloads" / "demo.json"


def key(step: Any) -> str:
    made = Artifact(Path("nowhere"), Manifest(Kind.ENGINE, "build", 1, files=(FileRef("f", "0" * 64, 1),)))
    return key_of(key_parts(Job("x", step, {"engine": (made,)}, "cpu", 0)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sub").mkdir()
    suite = (resource("smoke") / "english.yaml").read_text()
    for place in (tmp_path, tmp_path / "sub"):
        (place / "suite.yaml").write_text(suite)
        (place / "faq.txt").write_text("Paragraphs of text.\n\nAnd more of them.")
        (place / "task.jsonl").write_text('{"prompt": "2 + 2 =", "answer": "4"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


SAME = [
    (Smoke, "suites", ("suite.yaml",), ("./suite.yaml",), ("sub/../suite.yaml",)),
    (Smoke, "suites", ("english", "suite.yaml"), ("english", "sub/suite.yaml")),
    (Smoke, "suites", ("english",), (str(resource("smoke") / "english.yaml"),)),
    (Evaluate, "corpus", "legal,faq.txt", "legal, ./faq.txt", "legal,sub/faq.txt", "legal,faq.txt=1"),
    (Evaluate, "tasks", ("task.jsonl",), ("./task.jsonl",), ("sub/task.jsonl",)),
    (Calibrate, "corpus", "legal=1,faq.txt=3", "legal,./faq.txt=3.0"),
]


@pytest.mark.parametrize(("step", "name", "first", "others"), [(s, n, f, o) for s, n, f, *o in SAME])
def test_the_spelling_of_a_path_is_not_in_the_key(
    step: Any, name: str, first: Any, others: list[Any], folder: Path
) -> None:
    assert len({key(step(**{name: value})) for value in (first, *others)}) == 1


@pytest.mark.parametrize(("step", "name", "first"), [(s, n, f) for s, n, f, *_ in SAME if "english" not in f])
def test_the_content_is(step: Any, name: str, first: Any, folder: Path) -> None:
    before = key(step(**{name: first}))
    for file in folder.glob("*.*"):
        file.write_text(file.read_text() + "\n" + file.read_text())
    assert key(step(**{name: first})) != before


def test_workload_files(folder: Path) -> None:
    (folder / "w.json").write_bytes(SHIPPED.read_bytes())
    assert len({key(Compare(workload=w)) for w in ("w.json", "./w.json", str(folder / "w.json"))}) == 1


def test_a_file_that_is_not_there(folder: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file nothere\.json\n  why:  nothing is there"):
        Compare(results=("nothere.json",)).external()


def test_two_files_of_one_name_are_two(folder: Path) -> None:
    step = Compare(results=("suite.yaml", "sub/suite.yaml"))
    before = key(step)
    assert len(step.external()) == 2
    (folder / "suite.yaml").write_text("other")  # hidden by the second, were they known by name alone
    assert key(step) != before
