"""Facts about a measurement that are recorded and shown, and do not block a comparison."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from delivery import __version__
from delivery.bench.code import engine_code
from delivery.device import fingerprint

_DISTRIBUTIONS = ("torch", "triton", "transformers", "numpy", "numba")


def facts(device: str) -> dict[str, Any]:
    """The device fingerprint (what may be compared) and versions (what is being tested), as JSON."""
    found = fingerprint(device)
    return {
        "device": asdict(found),
        "device_slug": found.slug,
        "versions": {
            "deliver": __version__,
            "engine code": engine_code()[:12],
            "python": platform.python_version(),
            **{name: v for name in _DISTRIBUTIONS if (v := _version(name))},
        },
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
