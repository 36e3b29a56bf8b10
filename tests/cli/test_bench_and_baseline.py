"""`deliver bench` and `deliver baseline`, through the command group as a user calls it."""

import json
import shutil
from dataclasses import asdict

import pytest
from click.testing import CliRunner

from delivery.artifact import Kind, Manifest, hash_tree, write_manifest
from delivery.bench.disturbance import Disturbance
from delivery.bench.measured import Measured, Side
from delivery.bench.workload import load_workload
from delivery.cli._group import commands
from delivery.device import DeviceFingerprint
from delivery.errors import BaselineError, DataError, UsageError
from delivery.gate import RequestRecord
from delivery.gate import baseline as baselines


@pytest.fixture
def deliver(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        result = CliRunner().invoke(commands, [*arguments], catch_exceptions=False, standalone_mode=False)
        return result.stdout

    return call


def report(folder, slower=1.0):
    """A compare report as the runner commits it."""
    runs = tuple(
        tuple(
            RequestRecord(f"r{i}", i * 0.1, i * 0.1, i * 0.1 + 0.3 * slower, i * 0.1 + 0.7 * slower, 16, 8)
            for i in range(130)
        )
        for _ in range(5)
    )
    memory = {"weights_bytes": 1e8, "peak_bytes": 6e7, "kv_tokens": 1024.0}
    made = Measured(Side(runs, (Disturbance(),) * 5, memory, "deliver", 2.0))
    folder.mkdir()
    made.write(folder)
    device = DeviceFingerprint("cpu", "Test CPU", cores=2)
    data = {
        "device": asdict(device),
        "device_slug": device.slug,
        "versions": {},
        "engine": "e" * 64,
        "baseline_engine": None,
        "workload": {"name": "demo", **load_workload("demo").to_json()},
        "kv_tokens": 1024,
        **made.to_json(),
    }
    (folder / "compare.json").write_text(json.dumps(data))
    about = {"engine": "e" * 64}
    write_manifest(folder, Manifest(Kind.REPORT, "compare", 1, inputs=about, files=hash_tree(folder)))
    return folder


def test_a_baseline_is_made_changed_and_shown(deliver, tmp_path):
    first = report(tmp_path / "r1")
    said = deliver("baseline", "update", str(first), "--reason", "first", "--model", "demo")
    assert "commit baselines/demo/test-cpu-" in said
    second = report(tmp_path / "r2", slower=1.1)
    row = json.loads(
        deliver("baseline", "update", str(second), "--reason", "new tokenizer", "--model", "demo", "--json")
    )
    assert row["values"]["e2e_p95_ms"] == pytest.approx(770.0)
    assert [entry["reason"] for entry in row["history"]] == ["first", "new tokenizer"]
    assert row["anchor"] == "e" * 64
    assert "new tokenizer" in deliver("baseline", "show")
    third = json.loads(
        deliver("baseline", "update", str(first), "--reason", "v2", "--model", "demo", "--released", "--json")
    )
    assert third["anchor"] is None
    shown = json.loads(deliver("baseline", "show", "--json"))["baselines"]
    assert len(shown) == 1
    assert baselines.read(tmp_path / shown[0]["path"]).current.reason == "v2"


def test_a_baseline_in_the_wrong_folder_is_not_updated(deliver, tmp_path):
    made = report(tmp_path / "r1")
    update = ("baseline", "update", str(made), "--reason", "x", "--model")
    right = tmp_path / json.loads(deliver(*update, "demo", "--json"))["path"]
    wrong = tmp_path / json.loads(deliver(*update, "other", "--json"))["path"]
    wrong.write_text(right.read_text())
    with pytest.raises(BaselineError, match="is the baseline of something else") as caught:
        deliver(*update, "other")
    assert "model 'demo', expected 'other'" in caught.value.why
    assert wrong.read_text() == right.read_text()
    wrong.unlink()  # as the hint has it
    assert json.loads(deliver(*update, "other", "--json"))["model"] == "other"


def smoke_report(folder, engine="e" * 64):
    data = {
        "device": asdict(DeviceFingerprint("cpu", "Test CPU", cores=2)),
        "device_slug": "test-cpu",
        "versions": {},
        "engine": engine,
        "suites": [{"name": "tiny", "timing_prompt": "hi", "timing_tokens": 4}],
        "answers": [{"suite": "tiny", "prompt": "hi", "prompt_ids": [1, 2, 3]}],
        "timings_ms": [40.0, 41.0, 42.0],
        "memory": {"peak_bytes": 1e7},
    }
    folder.mkdir()
    (folder / "smoke.json").write_text(json.dumps(data))
    write_manifest(
        folder,
        Manifest(
            Kind.REPORT,
            "smoke",
            1,
            params={"runs": 3, "seed": 0},
            inputs={"engine": engine, "measurement": "m" * 64},
            files=hash_tree(folder),
        ),
    )
    return folder


def test_what_smoke_timed_is_accepted_with_it(deliver, tmp_path):
    latest = tmp_path / ".deliver" / "latest"
    latest.mkdir(parents=True)
    (latest / "compare").symlink_to(report(tmp_path / "c"))
    (latest / "smoke").symlink_to(smoke_report(tmp_path / "s"))
    made = json.loads(deliver("baseline", "update", "--reason", "first", "--model", "demo", "--json"))
    (also,) = made["also"]
    assert also.startswith("baselines/demo/test-cpu/")
    again = tmp_path / "other"
    (latest / "smoke").unlink()
    (latest / "smoke").symlink_to(smoke_report(again, engine="f" * 64))
    assert (
        json.loads(deliver("baseline", "update", "--reason", "x", "--model", "demo", "--json"))["also"] == []
    )
    alone = json.loads(deliver("baseline", "update", str(tmp_path / "s"), "--reason", "slower", "--json"))
    found = baselines.read(tmp_path / alone["path"])
    assert list(found.current.samples["timings_ms"]) == [40.0, 41.0, 42.0]
    assert found.current.measurement == "m" * 64


def results_files(folder):
    """Five runs as `vllm bench serve` writes them."""
    names = []
    for run in range(5):
        data = {
            "input_lens": [16] * 130,
            "output_lens": [8] * 130,
            "ttfts": [0.1 + 0.001 * i + 0.0001 * run for i in range(130)],
            "itls": [[0.01] * 7] * 130,
            "start_times": [float(i) for i in range(130)],
        }
        names.append(f"run{run}.json")
        (folder / names[-1]).write_text(json.dumps(data))
    return ",".join(names)


def test_a_comparison_run_on_its_own_can_become_the_baseline(deliver, tmp_path, tiny_checkpoint):
    engine = tmp_path / "My-Model"
    shutil.copytree(tiny_checkpoint, engine)
    (engine / "engine.json").write_text("{}")
    deliver(
        "compare", "--engine", str(engine), "--results", results_files(tmp_path), "--runtime-name", "vllm"
    )
    assert (tmp_path / ".deliver" / "reports" / "compare" / "report.html").is_file()
    made = json.loads(deliver("baseline", "update", "--reason", "first", "--json"))
    # Under the name that the comparison looks for, whatever the default pipeline is about.
    assert made["model"] == "My-Model"
    named = ("--model", "other")
    assert json.loads(deliver("baseline", "update", "--reason", "x", *named, "--json"))["model"] == "other"


def test_without_a_reason_or_a_report_nothing_changes(deliver, tmp_path):
    made = report(tmp_path / "r1")
    with pytest.raises(UsageError, match="only with a reason"):
        deliver("baseline", "update", str(made), "--reason", " ", "--model", "demo")
    with pytest.raises(UsageError, match="no compare report"):
        deliver("baseline", "update", "--reason", "x", "--model", "demo")
    with pytest.raises(UsageError, match=r"no pipeline file none\.yaml"):
        deliver("baseline", "update", str(made), "--reason", "x", "--pipeline", "none.yaml")
    other = tmp_path / "other"
    other.mkdir()
    write_manifest(other, Manifest(Kind.ENGINE, "build", 1))
    with pytest.raises(UsageError, match="not a report of compare"):
        deliver("baseline", "update", str(other), "--reason", "x", "--model", "demo")
    assert not (tmp_path / "baselines").exists()
    assert "no baselines in" in deliver("baseline", "show")


def test_bench_of_a_model_directory(deliver, tiny_checkpoint, tmp_path):
    options = ("--workload", "demo", "--requests", "12", "--warmup", "0", "--concurrency", "4")
    out = deliver("bench", str(tiny_checkpoint), *options, "--goodput", "ttft:60000", "--device", "cpu")
    assert "time per output token" in out
    assert "requests within limits" in out
    summary = json.loads(
        deliver("bench", str(tiny_checkpoint), *options, "--json", "--out", str(tmp_path / "b"))
    )
    assert summary["completed"] == 12
    assert summary["output_lens"] == [8] * 12
    assert (tmp_path / "b" / "records.jsonl").is_file()


def test_bench_says_what_was_wrong(deliver):
    with pytest.raises(UsageError, match="--goodput itl:5"):
        deliver("bench", "http://127.0.0.1:9", "--goodput", "itl:5")
    with pytest.raises(UsageError, match="exclude each other"):
        deliver("bench", "http://127.0.0.1:9", "--rate", "1", "--concurrency", "2")


def test_a_server_that_only_fails_is_an_error(deliver):
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{"data": [{"id": "m", "owned_by": "vllm"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            # Its model is loaded: the one token that bench asks for before it begins is answered.
            self.send_response(503 if asked.get("stream") else 200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"busy")

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with pytest.raises(DataError) as caught:
            deliver("bench", f"http://127.0.0.1:{server.server_port}", "--requests", "3", "--warmup", "0")
        assert caught.value.code == "bench-all-failed"
        assert "status 503: busy" in caught.value.render()
        from delivery.bench.session import server_session

        with server_session(f"http://127.0.0.1:{server.server_port}") as session:
            assert session.runtime == "vllm"
            assert session.memory() is None
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_load_generator_runs_without_the_rest(tiny_checkpoint, capsys):
    from delivery.bench.__main__ import main

    assert (
        main([str(tiny_checkpoint), "--workload", "demo", "--requests", "3", "--warmup", "0", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["completed"] == 3
    assert main(["http://127.0.0.1:9", "--workload", "nope"]) == 2
    assert "error[unknown-workload]" in capsys.readouterr().err


def test_the_load_generator_imports_nothing_but_the_standard_library_and_numpy():
    import subprocess
    import sys

    code = (
        "import sys, delivery.bench.run, delivery.bench.url_target, delivery.bench.__main__;"
        "bad = {'click', 'rich', 'pydantic', 'requests', 'httpx', 'ruamel', 'jinja2', 'torch'};"
        "sys.exit(', '.join(sorted(bad & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
