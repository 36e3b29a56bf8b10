"""A corpus from a knowledge base: sections, questions, repetitions, the split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from delivery import corpus
from delivery.cli._session import Session
from delivery.cli.corpus import command
from delivery.corpus.build import build
from delivery.corpus.knowledge import knowledge_documents
from delivery.corpus.near_duplicates import NearDuplicates
from delivery.errors import DataError, UsageError

MARKDOWN = """---
title: front matter
---
Words before any heading, long enough to keep.

# Returns
You may return goods within thirty days.

## How do I reset my password?
Open the settings and choose *reset*.

```sh
# not a heading
reset --all
```
"""
HTML = """<html><head><style>p {}</style><script>var x = "no";</script></head>
<body><nav>Home</nav><p>An introduction &amp; welcome.</p>
<h2>Where is my <b>parcel</b>?</h2><p>In the van,</p>
<ul><li>probably</li></ul>
<h2>Hours</h2><table><tr><td>Mon</td><td>9 to 5</td></tr></table><footer>legal</footer></body></html>"""


def written(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_markdown_is_cut_at_headings(tmp_path: Path) -> None:
    found = list(knowledge_documents(written(tmp_path / "a.md", MARKDOWN)))
    assert [d.text for d in found[:2]] == [
        "Words before any heading, long enough to keep.",
        "Returns\n\nYou may return goods within thirty days.",
    ]
    question, answer = found[2].messages
    assert question == {"role": "user", "content": "How do I reset my password?"}
    assert "# not a heading" in str(answer["content"])
    assert len(found) == 3


def test_html_gives_text_without_furniture(tmp_path: Path) -> None:
    found = list(knowledge_documents(written(tmp_path / "a.html", HTML)))
    assert found[0].text == "An introduction & welcome."
    assert found[1].messages[0]["content"] == "Where is my parcel?"
    assert found[1].messages[1]["content"] == "In the van,\n\nprobably"
    assert found[2].text.split() == ["Hours", "Mon9", "to", "5"]
    assert not any(word in d.plain for d in found for word in ("var x", "Home", "legal", "p {}"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Question,Answer\nWhy?,Because.\n", [("Why?", "Because.")]),
        ("id,text\n1,some words\n", ["some words"]),
        ("name,price\nnut,3\n", ["name: nut\nprice: 3"]),
        ('\ufeffprompt;x,response\n"a,b",c\n', ["prompt;x: a,b\nresponse: c"]),
    ],
)
def test_csv_by_its_columns(tmp_path: Path, text: str, expected: list[object]) -> None:
    found = list(knowledge_documents(written(tmp_path / "a.csv", text)))
    shown = [tuple(m["content"] for m in d.messages) if d.messages else d.text for d in found]
    assert shown == expected


def test_near_repetitions_are_found_and_others_are_not() -> None:
    base = " ".join(f"word{i * i % 97} {chr(97 + i % 26)}{i}" for i in range(60))
    known = NearDuplicates(0.7)
    assert not known.seen(base)
    assert known.seen(base.replace("word4 ", "verb4 ", 1).upper())
    assert not known.seen("an altogether different sentence about invoices, payment terms and late fees")
    assert not known.seen("床前明月光疑是地上霜举头望明月低头思故乡")
    assert known.seen("床前明月光，疑是地上霜。举头望明月，低头思故乡")


def test_a_folder_becomes_a_corpus(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    written(base / "faq.md", MARKDOWN)
    written(base / "copy.md", MARKDOWN.replace("front matter", "other"))
    written(base / "x.html", HTML)
    rows = [{"text": f"document number {i} speaks of {chr(97 + i % 26) * 9} and {i * i}"} for i in range(200)]
    written(base / "more.jsonl", "\n".join(json.dumps(r) for r in rows))
    built = build([base], tmp_path / "out")
    assert (built.files, built.read) == (4, 209)
    assert built.duplicates == 3
    assert built.conversations == 2
    assert built.calibration + built.held_out + built.near_duplicates + built.too_short + 3 == 209
    assert 8 <= built.held_out <= 35
    calibration = {d.content_hash for d in corpus.load(str(tmp_path / "out"))}
    held_out = {d.content_hash for d in corpus.heldout(str(tmp_path / "out"))}
    assert len(held_out) == built.held_out
    assert len(calibration) == built.calibration
    again = build([base], tmp_path / "again")
    assert again == built
    for name in ("calibration.jsonl", "heldout.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_the_command(tmp_path: Path) -> None:
    source = written(tmp_path / "faq.md", MARKDOWN)
    arguments = ["build", str(source), "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(command, arguments, obj=Session(), catch_exceptions=False)
    assert json.loads(done.stdout)["conversations"] == 1
    arguments = ["build", str(source), "--out", str(tmp_path / "b")]
    done = CliRunner().invoke(command, arguments, obj=Session(), catch_exceptions=False)
    assert "1 files, 3 documents" in done.stdout


def test_what_cannot_be_built(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no"):
        build([tmp_path / "nowhere"], tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds nothing that can be read[\s\S]*\.md"):
        build([tmp_path / "empty"], tmp_path / "a")
    short = written(tmp_path / "short.md", "# A\nword")
    with pytest.raises(DataError, match="the sources contain no usable documents"):
        build([short], tmp_path / "a")
    with pytest.raises(UsageError, match="is not empty"):
        build([short], tmp_path)
    with pytest.raises(UsageError, match="--similarity is 2"):
        build([short], tmp_path / "a", 2.0)
    (tmp_path / "latin.csv").write_bytes(b"text\n\xe9t\xe9\n")
    with pytest.raises(DataError, match="cannot be read as CSV"):
        build([tmp_path / "latin.csv"], tmp_path / "a")
