"""What a release derives from measured numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from delivery.artifact import Artifact, Kind, Manifest
from delivery.errors import DataError
from delivery.gate.report import Metric, Report, Verdict
from delivery.release.facts import EngineFacts
from delivery.release.measured import Measured
from delivery.release.runtimes import RUNTIMES, runtime

GIB = 1 << 30
MIB = 1 << 20


def report(**values: float) -> Report:
    metrics = tuple(Metric(name, value, "", "both") for name, value in values.items())
    return Report("compare", "e" * 64, Verdict.PASS, metrics)


def test_the_last_report_that_has_a_metric_counts() -> None:
    measured = Measured.of([report(load_s=1.0, request_throughput=4.0), report(load_s=12.0)])
    assert measured == Measured(load_s=12.0, requests_per_s=4.0)


def test_another_runtimes_numbers_are_left_out() -> None:
    def compare(runtime: str, rate: float) -> Report:
        metric = Metric("output_throughput", rate, "tok/s", "higher")
        return Report("compare", "e" * 64, Verdict.PASS, (metric,), details={"runtime": runtime})

    both = [compare("vllm", 900.0), compare("deliver", 100.0)]
    assert Measured.of(both, "vllm").output_tokens_per_s == 900.0
    assert Measured.of(both, "deliver").output_tokens_per_s == 100.0


def test_nothing_measured_is_said() -> None:
    measured = Measured.of([])
    assert measured.startup() == (5, 360, "the load time was not measured, so 1800 s.")
    assert "is a guess" in measured.waiting_requests()[1]


def test_memory_on_a_processor_is_what_was_measured_with_the_cache_that_is_served() -> None:
    measured = Measured(process_bytes=1.0 * GIB, kv_bytes=256.0 * MIB)
    # (1024 - 256 + 512 + 512) × 1.25 + 256
    assert measured.memory_mib(100 * MIB, 512 * MIB, 256) == 2560
    assert measured.memory_mib(100 * MIB, 1024 * MIB, 256) > 2560


def test_memory_beside_a_gpu_does_not_come_from_the_cards_memory() -> None:
    on_card = Measured(process_bytes=100.0 * GIB)
    assert on_card.memory_mib(16 * GIB, None, 1024) == Measured().memory_mib(16 * GIB, None, 1024)


def engine(folder: Path, **about: object) -> Artifact:
    (folder / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    (folder / "engine.json").write_text(json.dumps(about), "utf-8")
    return Artifact(folder, Manifest(Kind.ENGINE, "build", 1))


PLAN = {"block_bytes": MIB, "block_size": 64, "max_model_len": 4096, "num_blocks": 100_000}


def test_a_cpu_engine_reserves_a_bounded_cache(tmp_path: Path) -> None:
    cpu = {"kind": "cpu", "name": "a processor", "cores": 2}
    facts = EngineFacts.read(engine(tmp_path, device=cpu, tp=1, max_model_len=4096, plan=PLAN))
    assert (facts.kv_blocks, facts.kv_bytes) == (2048, 2 * GIB)
    assert facts.hardware.gpus == 0
    long = {**PLAN, "max_model_len": 64 * 4000}
    assert EngineFacts.read(engine(tmp_path, device=cpu, plan=long)).kv_blocks == 4000
    few = {**PLAN, "num_blocks": 80}
    assert EngineFacts.read(engine(tmp_path, device=cpu, plan=few)).kv_blocks == 80


def test_a_gpu_engine_takes_its_share_of_the_card(tmp_path: Path) -> None:
    gpu = {"kind": "cuda", "name": "NVIDIA H200", "cores": 0}
    facts = EngineFacts.read(engine(tmp_path, device=gpu, tp=2, max_model_len=4096, plan=PLAN))
    assert (facts.kv_blocks, facts.hardware.gpus) == (None, 2)
    words = runtime("deliver").arguments("m", 4096, None)
    assert "--cache-max-entry-count" not in words


def test_a_damaged_engine_is_named(tmp_path: Path) -> None:
    artifact = engine(tmp_path)
    artifact.file("engine.json").unlink()
    with pytest.raises(DataError, match=r"engine\.json cannot be read"):
        EngineFacts.read(artifact)


def test_arguments_of_other_runtimes() -> None:
    assert runtime("vllm").arguments("a b", 2048, None)[-4:] == [
        "--served-model-name",
        "a b",
        "--max-model-len",
        "2048",
    ]
    assert "--max-model-len" not in runtime("vllm").arguments("m", None, None)


@pytest.mark.parametrize("kind", [kind for kind in RUNTIMES if kind != "deliver"])
def test_series_are_those_of_the_runtime_itself(kind: str) -> None:
    made = runtime(kind)
    assert made.kind == kind
    names = [name for name in asdict(made.series).values() if name]
    assert len(names) >= 9
    assert all(name.startswith(f"{kind}:") for name in names)


def test_the_bundled_server_knows_every_option_that_a_chart_gives_it() -> None:
    from delivery.cli.serve import command

    known = {name for parameter in command.params for name in parameter.opts}
    ours = runtime("deliver")
    words = [*ours.arguments("m", 128, 8), *ours.api_key_args, *ours.insecure_args, ours.drain_arg]
    options = {word for word in words if word.startswith("--")}
    assert len(options) >= 7
    assert options <= known
    assert words[:2] == ["serve", "/model"]
