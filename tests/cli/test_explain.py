from __future__ import annotations

import ast
from pathlib import Path

import pytest

import delivery
from delivery.cli.explain import codes
from delivery.errors import DeliverError

ROOT = Path(delivery.__file__).parent
KINDS = {cls.__name__ for cls in DeliverError.__subclasses__()} | {"DeliverError"}


def raised_codes():
    """Every literal error code in the package → where; an f-string's fixed part counts as a prefix."""
    found: dict[str, str] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and node.args and name_of(node.func) in KINDS:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found[first.value] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


def name_of(function):
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_every_code_is_explained():
    missing = {code: where for code, where in raised_codes().items() if code not in codes()}
    assert missing == {}


def test_the_search_finds_codes():
    found = raised_codes()
    assert "unknown-stage" in found
    assert len(found) > 30


def test_every_page_says_something():
    for page in (ROOT / "explanations").glob("*.md"):
        assert len(page.read_text("utf-8").removeprefix(f"# {page.stem}")) > 60, page


def test_explain(deliver):
    for asked in ("gate-failed", "error[gate-failed]"):
        code, out, _ = deliver("explain", asked)
        assert code == 0
        assert out.startswith("gate-failed\n\nA check judged")
    assert "gate-failed" in deliver("explain")[1].split()
    code, _, err = deliver("explain", "gate-faild")
    assert (code, "did you mean 'gate-failed'" in err) == (2, True)


@pytest.mark.parametrize(
    ("shell", "words"), [("bash", "complete -o"), ("zsh", "#compdef deliver"), ("fish", "complete")]
)
def test_completion_scripts(deliver, shell, words):
    code, out, _ = deliver("completion", shell)
    assert code == 0
    assert words in out
    assert "_DELIVER_COMPLETE" in out


def test_completion_itself(monkeypatch, capsys):
    from delivery.cli import main

    monkeypatch.setenv("_DELIVER_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "deliver explain gate-f")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit, match="0"):
        main([])
    assert capsys.readouterr().out == "plain,gate-failed\n"
