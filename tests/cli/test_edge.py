from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import fake_steps
import pytest

from delivery import __version__


def test_version(deliver):
    assert deliver("--version") == (0, f"deliver {__version__}\n", "")


def test_no_arguments_show_the_help(deliver):
    code, out, err = deliver()
    assert (code, out) == (2, "")
    assert "Usage: deliver" in err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["shrnk"],
            "error[unknown-command]: there is no command 'shrnk'\n  hint: did you mean 'shrink'?\n",
        ),
        (["ls", "--foo"], "error[usage]: No such option '--foo'\n  hint: deliver ls --help\n"),
        (
            ["run", "--stage"],
            "error[usage]: Option '--stage' requires an argument\n  hint: deliver run --help\n",
        ),
        (["shrink"], "error[usage]: Missing option '--checkpoint'\n  hint: deliver shrink --help\n"),
        (
            ["shrink", "--checkpoint", "x", "--mode", "slw"],
            "error[bad-value]: --mode of shrink\n"
            "  why:  'slw' is not a choice; did you mean 'slow'?\n"
            "  hint: deliver shrink --help\n",
        ),
        (
            ["shrink", "--checkpoint", "x", "--group-size", "many"],
            "error[wrong-type]: --group-size of shrink\n"
            "  why:  expected a whole number, got 'many'\n"
            "  hint: deliver shrink --help\n",
        ),
        (
            ["inspect", "nothing"],
            "error[unknown-ref]: there is no artifact 'nothing'\n"
            "  why:  it is not a folder, and not a tag or the beginning of a digest in .deliver\n"
            "  hint: deliver ls\n",
        ),
    ],
)
def test_usage_errors_have_one_look(deliver, args, expected):
    assert deliver(*args) == (2, "", expected)


@pytest.mark.parametrize(
    ("args", "code", "exit_code"),
    [
        (["run", "p.yaml", "--foo", "--json"], "usage", 2),
        (["runn", "--json"], "unknown-command", 2),
        (["inspect", "nothing", "--json"], "unknown-ref", 2),
        (["shrink", "--checkpoint", "x", "--mode", "slw", "--json"], "bad-value", 2),
        (["run", "p.yaml", "--set", "shrink.fail=bug", "--json"], "bug", 70),
        (["run", "p.yaml", "--stage", "shrnk", "--json"], "unknown-stage", 2),
        (["run", "p.yaml", "--set", "make.words=13", "--set", "shrink.mode=slow", "--json"], "bad-words", 2),
        (["run", "p.yaml", "--set", "shrink.fail=disk", "--json"], "disk-full", 6),
        (["run", "p.yaml", "--plan", "--set", "shrink.group_size=0", "--json"], "bad-group", 2),
    ],
)
def test_with_json_every_error_is_one_object_on_stdout(deliver, args, code, exit_code):
    got, out, err = deliver(*args)
    assert got == exit_code
    answer = json.loads(out)
    assert answer["passed"] is False
    assert answer["error"]["code"] == code
    whole_run = args[0] == "run" and "--plan" not in args
    assert {"steps", "release"} <= set(answer) if whole_run else "steps" not in answer
    assert f"error[{code}]: {answer['error']['what']}" in err


def test_with_json_an_interrupted_run_is_one_object_too(deliver, monkeypatch):
    def stop(self, ctx):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake_steps.Shrink, "run", stop)
    code, out, err = deliver("run", "p.yaml", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (130, "interrupted")
    assert err.endswith("interrupted\n")


def test_a_bug_is_70_with_its_traceback_in_a_file(deliver, tmp_path):
    code, out, err = deliver("run", "p.yaml", "--set", "shrink.fail=bug")
    assert (code, out) == (70, "")
    assert "error[bug]: deliver itself failed: TypeError: a bug of this step\n" in err
    assert "Traceback" not in err
    log = tmp_path / re.search(r"traceback in (\S+)", err)[1]
    assert "in _pause" in log.read_text()
    code, _, err = deliver(
        "--debug", "run", "p.yaml", "--set", "shrink.fail=bug", "--set", "shrink.group_size=32"
    )
    assert code == 70
    assert "in _pause" in err


def test_a_crash_outside_a_workdir_leaves_the_folder_alone(deliver, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("delivery.pipeline.store.Store.tags", lambda self: 1 / 0)
    code, _, err = deliver("tag")
    assert code == 70
    assert not (tmp_path / ".deliver").exists()
    log = re.search(r"traceback in (\S+)", err)[1]
    assert log.startswith(str(tmp_path / "state/deliver/logs/crash-"))
    assert "ZeroDivisionError" in Path(log).read_text()


def test_nothing_but_the_object_reaches_stdout(tmp_path):
    (tmp_path / "p.yaml").write_text(fake_steps.PIPELINE)
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import fake_steps; from delivery.cli import main;"
        "sys.exit(main(sys.argv[1:], steps=fake_steps.STEPS))"
    )
    folder = str(Path(fake_steps.__file__).parent)
    step = ["shrink", "--checkpoint", ".deliver/latest/make", "--fail", "noise", "--force", "--json"]
    for args in (["run", "p.yaml", "--set", "shrink.fail=noise", "--json"], step):
        command = [sys.executable, "-c", code, folder, *args]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["passed"] is True
        assert "noise of a library" in done.stderr
        assert "noise of a child" in done.stderr


def test_a_secret_does_not_reach_the_crash_log(deliver, tmp_path):
    deliver("run", "p.yaml", "--set", "shrink.fail=bug", "--set", "shrink.token=hunter2")
    everything = [p for p in (tmp_path / ".deliver").rglob("*") if p.is_file()]
    assert any("logs" in str(p) for p in everything)
    assert not [p for p in everything if b"hunter2" in p.read_bytes()]


@pytest.mark.parametrize(
    ("how", "code"), [("disk", "disk-full"), ("serialize", "disk-full"), ("memory", "out-of-memory")]
)
def test_a_lacking_machine_is_6(deliver, how, code):
    exit_code, _, err = deliver("run", "p.yaml", "--set", f"shrink.fail={how}")
    assert exit_code == 6
    assert f"error[{code}]" in err


def test_a_workdir_that_is_a_file(deliver):
    for workdir in ("p.yaml", "p.yaml/below"):
        code, _, err = deliver("run", "p.yaml", "--workdir", workdir)
        assert code == 2
        assert err.startswith(f"error[workdir-unusable]: {workdir} cannot be a workdir\n")


def test_a_workdir_where_nothing_can_be_made(deliver, monkeypatch):
    def refuse(path: Path, *args: object, **options: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, err = deliver("run", "p.yaml", "--workdir", "there")
    assert code == 2
    assert "error[workdir-unusable]: there cannot be a workdir\n  why:  it cannot be created: No such" in err


def test_an_error_is_the_one_json_object_too(deliver):
    for args in (["run", "p.yaml", "--stage", "x"], ["shrink", "--checkpoint", "nowhere"]):
        code, out, err = deliver(*args, "--json")
        shown = json.loads(out)
        assert code == 2
        assert shown["passed"] is False
        assert f"error[{shown['error']['code']}]" in err


def test_interrupted_is_130(deliver, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake_steps.Make, "run", interrupt)
    code, _, err = deliver("run", "p.yaml")
    assert code == 130
    assert err.endswith("interrupted\n")


def test_a_reader_that_goes_away_is_no_error():
    script = 'from delivery.cli import main; import sys; sys.exit(main(["explain"]))'
    command = f"{sys.executable} -c '{script}' | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


def test_a_full_disk(tmp_path, deliver):
    """No file may grow over 200 kB here: the weights of a step do."""
    script = (
        "import resource, signal, sys; sys.path.insert(0, sys.argv[1]);"
        "import fake_steps; from delivery.cli import main;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        "sys.exit(main(['run', 'p.yaml'], steps=fake_steps.STEPS))"
    )
    folder = str(Path(fake_steps.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", script, folder], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 6
    assert "error[disk-full]: no space left" in done.stderr
    assert "File too large" in done.stderr
    assert not list((tmp_path / ".deliver/tmp").iterdir())
    assert deliver("run", "p.yaml", "--until", "shrink")[0] == 0  # goes on where there is room
