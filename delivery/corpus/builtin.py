"""Built-in corpora: licence texts (legal) and standard-library docstrings (technical).

They need no network. Their text depends on the installed packages and on the Python
version; `files` says what is read, so that a digest can name it.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from delivery.corpus.document import Document
from delivery.corpus.passages import passages

if TYPE_CHECKING:
    from collections.abc import Iterator

_LICENCE = re.compile(r"licen[sc]e|copying|notice", re.IGNORECASE)
_SYSTEM_LICENCES = Path("/usr/share/common-licenses")
_LICENCE_LIMIT_BYTES = 1 << 20

# Modules with long prose docstrings that every supported Python version has.
_MODULES = [
    "_pydecimal",
    "argparse",
    "ast",
    "asyncio/events",
    "bdb",
    "bisect",
    "calendar",
    "codecs",
    "collections/__init__",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "datetime",
    "difflib",
    "dis",
    "doctest",
    "email/message",
    "enum",
    "fractions",
    "ftplib",
    "functools",
    "gettext",
    "hashlib",
    "heapq",
    "http/client",
    "http/cookiejar",
    "http/server",
    "imaplib",
    "importlib/metadata/__init__",
    "inspect",
    "ipaddress",
    "json/__init__",
    "logging/__init__",
    "logging/handlers",
    "mailbox",
    "multiprocessing/managers",
    "os",
    "pdb",
    "pickletools",
    "platform",
    "poplib",
    "pprint",
    "random",
    "re/__init__",
    "sched",
    "selectors",
    "shlex",
    "shutil",
    "smtplib",
    "socket",
    "socketserver",
    "sqlite3/dbapi2",
    "ssl",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "tkinter/__init__",
    "tokenize",
    "traceback",
    "turtle",
    "typing",
    "unittest/case",
    "unittest/mock",
    "urllib/parse",
    "urllib/request",
    "uuid",
    "warnings",
    "weakref",
    "xml/etree/ElementTree",
    "xml/sax/handler",
    "xmlrpc/server",
    "zipfile",
]


def builtin_names() -> tuple[str, ...]:
    """Names of the built-in corpora."""
    return ("legal", "technical")


@cache
def builtin_files(name: str) -> tuple[Path, ...]:
    """The files that a built-in corpus is read from, in the order in which they are read."""
    return _licences() if name == "legal" else _sources()


def builtin_documents(name: str) -> Iterator[Document]:
    """The documents of a built-in corpus: passages of one to a few paragraphs, none of them twice."""
    return iter(_documents(name))


@cache
def _documents(name: str) -> tuple[Document, ...]:
    return tuple(_read(name))


def _read(name: str) -> Iterator[Document]:
    seen: set[str] = set()
    for path in builtin_files(name):
        text = path.read_text("utf-8", "replace")
        if name == "technical":
            text = _docstrings(text)
        for passage in passages(text, seen):
            yield Document(name, passage)


def _licences() -> tuple[Path, ...]:
    folders = [Path(p) for p in dict.fromkeys((*sys.path, sysconfig.get_paths()["purelib"]))]
    found = [
        p
        for folder in folders
        if folder.name in ("site-packages", "dist-packages")
        for p in folder.glob("*.dist-info/**/*")
        if _LICENCE.search(p.name) and p.suffix.lower() in ("", ".txt", ".md", ".rst")
    ]
    if _SYSTEM_LICENCES.is_dir():
        found += _SYSTEM_LICENCES.iterdir()
    files = {p.resolve() for p in found if p.is_file() and 0 < p.stat().st_size < _LICENCE_LIMIT_BYTES}
    # By name, not by place: two machines with the same packages read the same text in the same order.
    return tuple(sorted(files, key=lambda p: (p.parts[-3:], p.as_posix())))


def _sources() -> tuple[Path, ...]:
    library = Path(sysconfig.get_paths()["stdlib"])
    return tuple(p for m in _MODULES if (p := library / f"{m}.py").is_file())


def _docstrings(source: str) -> str:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    return "\n\n".join(text for text in _walk(tree) if text)


def _walk(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str | None]:
    # Only bodies of modules, classes and functions: ast.walk would visit every expression.
    yield ast.get_docstring(node)
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child)
