"""`deliver init`: everything or nothing, and what it writes is sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from delivery.cli import main
from delivery.pipeline.spec import load_pipeline


def test_it_writes_a_pipeline_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path), "--model", "org/a model"]) == 0
    pipeline = load_pipeline(tmp_path / "pipelines" / "default.yaml")
    assert pipeline.model == "org/a model"
    assert pipeline.stages[1].params["samples"] == 128
    assert (tmp_path / "pipelines" / "pipeline.schema.json").is_file()
    assert "thorough" not in (tmp_path / "pipelines" / "default.yaml").read_text("utf-8")
    # An absolute perplexity is one model's own.
    assert "smoke_perplexity" not in pipeline.gate["limits"]
    assert "smoke_perplexity" in load_pipeline(Path("pipelines/default.yaml")).gate["limits"]
    for name in (".gitlab-ci.yml", ".github/workflows/deliver.yml"):
        first = (tmp_path / name).read_text("utf-8").splitlines()[0]
        assert first.startswith("# Made by: deliver ci ")
        assert "pipelines/default.yaml" in first
    assert list((tmp_path / "smoke").iterdir())
    assert "deliver run --plan" in capsys.readouterr().out


def test_one_ci_system_when_one_is_named(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path), "--ci", "gitlab"]) == 0
    assert (tmp_path / ".gitlab-ci.yml").exists()
    assert not (tmp_path / ".github").exists()


def test_nothing_is_overwritten_and_nothing_else_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".gitlab-ci.yml").write_text("mine\n", "utf-8")
    assert main(["init", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "error[init-exists]" in told
    assert ".gitlab-ci.yml" in told
    assert [path.name for path in tmp_path.iterdir()] == [".gitlab-ci.yml"]
    assert (tmp_path / ".gitlab-ci.yml").read_text("utf-8") == "mine\n"


def test_a_folder_below_a_file_is_no_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine", "utf-8")
    for name in ("file", "file/below"):
        assert main(["init", str(tmp_path / name)]) == 2
        assert "error[out-unusable]" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
