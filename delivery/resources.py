"""Files that ship with the package: pipelines, smoke suites, example baselines.

In a clone they stand at its top, in an installed wheel under `delivery/data/`.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_ROOTS = (_PACKAGE / "data", _PACKAGE.parent)


def resource(name: str) -> Path:
    """The path of a shipped file or folder such as `pipelines/default.yaml`. Raises FileNotFoundError."""
    for root in _ROOTS:
        if (root / name).exists():
            return root / name
    raise FileNotFoundError(f"{name} is not installed with deliver")
