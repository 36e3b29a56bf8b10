from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import delivery.cli
from delivery.steps import step_names

FOLDER = Path(delivery.cli.__file__).parent
HEAVY = {"torch", "transformers", "triton", "numba", "numpy", "pydantic", "rich", "fastapi", "matplotlib"}
CODE = """
import sys
from delivery.cli import main
code = main(sys.argv[1:])
print(sorted(set(sys.modules) & {modules!r}), file=sys.stderr)
sys.exit(code)
"""


def loaded(*args, modules=HEAVY, cwd=None):
    """Which of `modules` a command has imported."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(modules=modules), *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()[-1]


def test_help_loads_nothing_heavy_and_lists_everything():
    out, heavy = loaded("--help")
    assert heavy == "[]"
    for name in (*step_names(), "run", "ls", "inspect", "verify", "gc", "tag", "diff", "explain"):
        assert f"\n  {name} " in out


def test_help_of_every_step_loads_neither_torch_nor_transformers():
    for name in step_names():
        out, heavy = loaded(name, "--help", modules={"torch", "transformers"})
        assert heavy == "[]", name
        assert f"Usage: deliver {name}" in out


@pytest.mark.parametrize(
    "command", ["run", "ls", "inspect", "verify", "gc", "tag", "diff", "explain", "completion"]
)
def test_help_of_other_commands(command):
    out, heavy = loaded(command, "--help")
    assert heavy == "[]"
    assert f"Usage: deliver {command}" in out


def test_every_command_file_says_what_it_does():
    for path in FOLDER.glob("[a-z]*.py"):
        first = path.read_text().partition("\n")[0]
        assert first.startswith('"""'), path
        assert first.rstrip('"').endswith("."), f"{path}: the first line is the short help, one sentence"
        assert len(first) < 110


def test_pages_of_groups_cut_no_line():
    for command in ("baseline", "corpus", "ci"):
        out = loaded(command, "--help", modules={"torch"})[0]
        listed = out.partition("Commands:\n")[2]
        assert listed
        assert "..." not in listed
        assert all(line.rstrip().endswith(".") for line in listed.splitlines() if line.strip()), listed


def test_help_is_quick():
    times = []
    for _ in range(5):
        began = os.times()
        subprocess.run(
            [sys.executable, "-c", "from delivery.cli import main; main(['--help'])"], capture_output=True
        )
        ended = os.times()
        # Processor time: it does not depend on what else the machine does.
        times.append(
            ended.children_user + ended.children_system - began.children_user - began.children_system
        )
    assert min(times) < 0.3


def test_plan_of_the_shipped_pipeline_loads_neither_torch_nor_transformers(tmp_path):
    began = time.monotonic()
    out, heavy = loaded("run", "--plan", modules={"torch", "transformers"}, cwd=tmp_path)
    assert heavy == "[]"
    for name in ("convert", "quantize", "package"):
        assert f"\n{name} " in out
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - began < 60
