"""Standard streams that are closed, full, or speak another encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = "import sys; from delivery.cli import main; sys.exit(main())"


def shell(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of sh in which `deliver` is the command."""
    words = f"deliver() {{ {sys.executable} -c '{RUN}' \"$@\"; }}; {command}"
    return subprocess.run(
        ["sh", "-c", words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_goes_nowhere(closed: str, tmp_path: Path) -> None:
    assert shell(f"deliver ls {closed}", tmp_path).returncode == 0
    refused = shell(f"deliver nosuch {closed}", tmp_path)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


def test_nothing_is_written_into_files_that_got_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import os, subprocess, sys
from delivery.cli._streams import open_streams
open_streams()
with open("f", "w") as stream:
    print("shown", flush=True)
    os.write(1, b"shown")
    subprocess.run([sys.executable, "-c", "print('shown')"], check=True)
    stream.write("kept")
sys.exit(open("f").read() != "kept")
""")
    done = shell(f"{sys.executable} program.py >&-", tmp_path, PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_is_no_bug(tmp_path: Path) -> None:
    done = shell("deliver explain | head -n 1; deliver --help | true", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alpha\n", "")


def test_a_full_disk_behind_stdout_is_told(tmp_path: Path) -> None:
    done = shell("deliver explain >/dev/full", tmp_path)
    assert done.returncode == 6
    assert done.stderr.startswith("error[disk-full]")


def test_an_encoding_without_a_character_still_gets_an_answer(tmp_path: Path) -> None:
    folder = tmp_path / "m\u00f6del \u6a21"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    shown = shell("deliver inspect m*", tmp_path, PYTHONIOENCODING="ascii")
    assert "error[" in shown.stderr
    assert "m\\xf6del \\u6a21" in shown.stderr
    told = shell("deliver inspect m* --json", tmp_path, PYTHONIOENCODING="ascii")
    assert "m\u00f6del \u6a21" in json.dumps(json.loads(told.stdout), ensure_ascii=False)


def test_what_is_no_text_is_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
from delivery.cli._streams import open_streams
open_streams()
print(input().encode("utf-8"))
""")
    done = shell(
        f"printf '\\377 hi\\n' | {sys.executable} program.py",
        tmp_path,
        PYTHONPATH=str(Path(__file__).parents[2]),
    )
    assert done.stdout == "b'\\xef\\xbf\\xbd hi'\n", done.stderr
