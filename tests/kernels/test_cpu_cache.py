from __future__ import annotations

import os
from pathlib import Path

from delivery.kernels.cpu import forget_outdated


def test_machine_code_older_than_any_source_is_compiled_again(tmp_path: Path) -> None:
    cache = tmp_path / "__pycache__"
    cache.mkdir()
    for name, written_s in (
        ("caller.py", 100),
        ("called.py", 200),
        ("__pycache__/caller.old.nbi", 150),
        ("__pycache__/caller.new.nbi", 250),
        ("__pycache__/caller.pyc", 150),
    ):
        path = tmp_path / name
        path.touch()
        os.utime(path, (written_s, written_s))
    forget_outdated(tmp_path)
    assert sorted(path.name for path in cache.iterdir()) == ["caller.new.nbi", "caller.pyc"]
    forget_outdated(tmp_path / "missing")
