"""CI definitions of a small pipeline: what jobs do, what they hand on, and what linters say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from delivery.artifact import Kind
from delivery.cli._ci import CiOptions, render_ci
from delivery.errors import UsageError
from delivery.pipeline.spec import Pipeline, Stage


class Convert:
    name: ClassVar[str] = "convert"
    makes: ClassVar[Kind] = Kind.CHECKPOINT


class Build:
    name: ClassVar[str] = "build"
    makes: ClassVar[Kind] = Kind.ENGINE


class Smoke:
    name: ClassVar[str] = "smoke"
    makes: ClassVar[Kind] = Kind.REPORT

    def judge(self, ctx: object) -> None: ...


class Package:
    name: ClassVar[str] = "package"
    makes: ClassVar[Kind] = Kind.RELEASE


STEPS = (Convert, Build, Smoke, Package)


def pipeline(*ids: str, device: str = "auto", model: str = "demo") -> Pipeline:
    names = ids or tuple(step.name for step in STEPS)
    stages = tuple(Stage(name, step, {}, {}) for name, step in zip(names, STEPS, strict=False))
    return Pipeline("p.yaml", model, device, 0, stages, {})


def gitlab(of: Pipeline, options: CiOptions | None = None) -> dict[str, Any]:
    text = render_ci("gitlab", of, "pipelines/p.yaml", options or CiOptions())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def github(of: Pipeline, options: CiOptions | None = None) -> dict[str, Any]:
    text = render_ci("github", of, "pipelines/p.yaml", options or CiOptions())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def script_of(job: dict[str, Any]) -> str:
    lines = job["script"] if "script" in job else [step.get("run", "") for step in job["steps"]]
    return "\n".join(lines)


def test_stages_are_the_steps_in_order() -> None:
    assert gitlab(pipeline())["stages"] == ["convert", "build", "smoke", "package", "deploy"]
    jobs = github(pipeline())["jobs"]
    assert list(jobs) == ["convert", "build", "smoke", "package", "deploy"]
    assert [jobs[name].get("needs") for name in jobs] == [
        None,
        ["convert"],
        ["build"],
        ["smoke"],
        ["package"],
    ]


@pytest.mark.parametrize("render", [gitlab, github])
def test_every_job_runs_its_stage_and_lets_no_baseline_pass(render: Any) -> None:
    made = render(pipeline())
    for name in ("convert", "build", "smoke", "package"):
        script = script_of(made.get("jobs", made)[name])
        assert f"--stage {name}" in script
        assert "--set gate.missing_baseline=fail" in script


def test_gitlab_passes_on_artifacts_caches_and_reports() -> None:
    made = gitlab(pipeline())
    handed_on = made[".stage"]["artifacts"]
    assert {".deliver/artifacts/", ".deliver/keys/", ".deliver/latest/"} <= set(handed_on["paths"])
    assert handed_on["when"] == "always"
    assert all(made[name]["extends"] == ".stage" for name in ("convert", "build", "smoke", "package"))
    assert made["smoke"]["needs"] == ["build"]
    reports = made["smoke"]["artifacts"]["reports"]
    assert reports == {
        "junit": ".deliver/reports/smoke/junit.xml",
        "metrics": ".deliver/reports/smoke/metrics.txt",
    }
    assert "artifacts" not in made["build"]
    assert made[".stage"]["cache"][1]["paths"][0] == ".deliver/artifacts/"
    assert made["package"]["artifacts"]["paths"] == ["release/"]


def test_checks_comment_on_the_merge_request_and_only_they_may() -> None:
    made = gitlab(pipeline())
    assert made["smoke"]["after_script"] == ['deliver ci comment "$DELIVER_PIPELINE"']
    assert "after_script" not in made["build"]
    jobs = github(pipeline())["jobs"]
    assert jobs["smoke"]["permissions"] == {"contents": "read", "pull-requests": "write"}
    assert "permissions" not in jobs["build"]
    (step,) = [s for s in jobs["smoke"]["steps"] if "ci comment" in s.get("run", "")]
    assert step["if"] == "always() && github.event_name == 'pull_request'"
    assert step["continue-on-error"] is True
    with_token = [s for s in jobs["smoke"]["steps"] if "github.token" in str(s)]
    assert with_token == [step]


def test_gpu_stages_go_to_the_tagged_runners() -> None:
    made = gitlab(pipeline())
    assert [name for name, job in made.items() if isinstance(job, dict) and "tags" in job] == [
        "build",
        "smoke",
    ]
    assert made["build"]["tags"] == ["$DELIVER_GPU_TAG"]
    assert "DELIVER_GPU_RUNNER" in github(pipeline())["jobs"]["build"]["runs-on"]
    on_cpu = gitlab(pipeline(device="cpu"))
    assert not [name for name, job in on_cpu.items() if isinstance(job, dict) and "tags" in job]
    assert "DELIVER_GPU_TAG" not in on_cpu["variables"]


def test_weight_commits_start_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = gitlab(pipeline())[".on-weights"]["rules"][1]["changes"]
    assert {"**/*.safetensors", "**/config.json", "pipelines/p.yaml", "baselines/**"} <= set(changes)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "ours").mkdir(parents=True)
    options = CiOptions(watch=("serving/**",))
    for model in ("models/ours", "./models/ours/"):
        of = pipeline(model=model)
        wanted = ["models/ours/**", "pipelines/p.yaml", "smoke/**", "baselines/**", "serving/**"]
        assert gitlab(of, options)[".on-weights"]["rules"][1]["changes"] == wanted
        triggers = github(of, options)[True]  # YAML 1.1 reads `on` as a truth value
        assert triggers["push"]["paths"] == triggers["pull_request"]["paths"] == wanted


def test_deploy_is_for_main_and_rolls_back() -> None:
    job = gitlab(pipeline())["deploy"]
    assert all("$CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH" in rule["if"] for rule in job["rules"])
    other = github(pipeline())["jobs"]["deploy"]
    assert "github.ref == 'refs/heads/main'" in other["if"]
    for script in (script_of(job), script_of(other)):
        assert "helm upgrade --install" in script
        assert "--atomic" in script
        assert script.index("helm test") < script.index("helm rollback")
        assert "sha256sum -c SHA256SUMS" in script


def test_a_pipeline_without_a_release_deploys_nothing() -> None:
    of = pipeline("convert", "build", "smoke")
    assert "deploy" not in gitlab(of)["stages"]
    assert "deploy" not in github(of)["jobs"]


def test_the_release_job_uses_ids_not_step_names() -> None:
    script = script_of(gitlab(pipeline("take", "make", "try", "ship"))["ship"])
    assert '--set ship.commit="$CI_COMMIT_SHA"' in script
    assert "latest/ship" in script


def test_a_stage_called_deploy_is_refused() -> None:
    with pytest.raises(UsageError, match="is called 'deploy'"):
        render_ci("gitlab", pipeline("convert", "deploy"), "p.yaml", CiOptions())


def test_texts_of_users_stay_texts() -> None:
    options = CiOptions(install='pip install "a: b" # c', watch=("we: ird/**",))
    assert gitlab(pipeline(), options)[".stage"]["before_script"] == ['pip install "a: b" # c']
    steps = github(pipeline(), options)["jobs"]["convert"]["steps"]
    assert next(step["run"] for step in steps if step.get("name") == "Install") == 'pip install "a: b" # c'


@pytest.mark.parametrize(("system", "schema"), [("gitlab", "gitlab-ci"), ("github", "github-workflows")])
def test_definitions_are_what_the_systems_schemas_say(system: str, schema: str, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.yml", tmp_path / "wrong.yml"
    right.write_text(render_ci(system, pipeline(), "pipelines/p.yaml", CiOptions()), "utf-8")
    wrong.write_text(right.read_text("utf-8").replace("needs:", "nedes:"), "utf-8")
    command = [Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run(
        [*command, "--output-format", "json", right, wrong], capture_output=True, text=True, check=False
    )
    told = json.loads(done.stdout)
    assert told["parse_errors"] == []
    assert {error["filename"] for error in told["errors"]} == {str(wrong)}, done.stdout


def test_zizmor_finds_nothing_in_the_workflow(tmp_path: Path) -> None:
    path = tmp_path / ".github" / "workflows" / "deliver.yml"
    path.parent.mkdir(parents=True)
    path.write_text(render_ci("github", pipeline(), "pipelines/p.yaml", CiOptions()), "utf-8")
    zizmor = Path(sys.executable).with_name("zizmor")
    done = subprocess.run(
        [zizmor, "--offline", "--no-progress", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = Path("Dockerfile").read_text("utf-8").splitlines()
    assert sum(line.startswith("FROM ") for line in lines) == 2
    assert "USER 10001:10001" in lines
