"""The build fingerprint: what an engine directory was built with and for. No torch.

It decides whether an engine may be loaded as it is; what may be *compared* is the device fingerprint's
affair (`delivery.device`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from delivery import __version__
from delivery.device import fingerprint

LAYOUT = 1
"""Version of the packed forms. Raise it when a stored form no longer means the same."""


def build_fingerprint(device: str, checkpoint_digest: str) -> dict[str, Any]:
    """The device, the versions of what compiles kernels, and the checkpoint's digest."""
    return {
        "device": asdict(fingerprint(device)),
        "layout": LAYOUT,
        "deliver": __version__,
        "torch": _version("torch"),
        "triton": _version("triton") if device == "cuda" else "",
        "numba": _version("numba") if device == "cpu" else "",
        "checkpoint": checkpoint_digest,
    }


def differences(built: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs, one phrase each: 'torch 2.11.0 → 2.13.0'. The checkpoint is not looked at."""
    flat_built, flat_here = _flat(built), _flat(here)
    names = [name for name in {**flat_built, **flat_here} if name != "checkpoint"]
    return [
        f"{name} {flat_built.get(name)} → {flat_here.get(name)}"
        for name in names
        if flat_built.get(name) != flat_here.get(name)
    ]


def unusable(built: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Why packed weights of `built` cannot be read by `here` at all; None when only choices are stale."""
    if built.get("layout") != here["layout"]:
        return f"its weights are packed in layout {built.get('layout')}, this version reads {here['layout']}"
    kinds = (built.get("device", {}).get("kind"), here["device"]["kind"])
    if kinds[0] != kinds[1]:
        return f"it was built for {kinds[0]}, this is {kinds[1]}"
    return None


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat |= {f"{name}.{inner}": v for inner, v in item.items()}
        else:
            flat[name] = item
    return flat


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
