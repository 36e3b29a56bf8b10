"""Rewriting a config for another class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_REMOTE = ("auto_map", "architectures", "model_type", "_name_or_path", "transformers_version")


def renamed(
    hf: Mapping[str, Any],
    architecture: str,
    model_type: str,
    *,
    drop: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A config of another class: pointers to remote code dropped, keys renamed, the rest as it was."""
    new_names = rename or {}
    kept = {new_names.get(k, k): v for k, v in hf.items() if k not in (*_REMOTE, *drop)}
    return {"architectures": [architecture], "model_type": model_type, **kept}
