"""No two files of the room import each other, not even for types."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import delivery.quantization

ROOM = "delivery.quantization."
FOLDER = Path(delivery.quantization.__file__).parent


def imported(path: Path) -> set[str]:
    """The files of the room that a file imports, wherever in it."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    return {n.module.removeprefix(ROOM) for n in nodes if n.module and n.module.startswith(ROOM)}


def test_files_can_be_read_one_after_the_other():
    files = {p.stem: imported(p) for p in FOLDER.glob("*.py") if p.stem != "__init__"}
    assert "options" in files["scheme"] | files["work"]
    TopologicalSorter(files).prepare()  # raises CycleError, naming the circle
