"""A release: the Helm chart of an engine that passed its gate, with everything needed to trust it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.release.admission import admit
    from delivery.release.assemble import ReleaseSpec, write_release
    from delivery.release.chart import ChartSpec, Hardware, Image, chart_name
    from delivery.release.facts import EngineFacts, licence_of
    from delivery.release.index import read_index, verify_release
    from delivery.release.measured import Measured
    from delivery.release.runtimes import runtime
    from delivery.release.signature import Signer, load_public_key

_HOMES = {
    "admit": "admission",
    "ReleaseSpec": "assemble",
    "write_release": "assemble",
    "ChartSpec": "chart",
    "Hardware": "chart",
    "Image": "chart",
    "chart_name": "chart",
    "EngineFacts": "facts",
    "licence_of": "facts",
    "read_index": "index",
    "verify_release": "index",
    "Measured": "measured",
    "runtime": "runtimes",
    "Signer": "signature",
    "load_public_key": "signature",
}
__all__ = [
    "ChartSpec",
    "EngineFacts",
    "Hardware",
    "Image",
    "Measured",
    "ReleaseSpec",
    "Signer",
    "admit",
    "chart_name",
    "licence_of",
    "load_public_key",
    "read_index",
    "runtime",
    "verify_release",
    "write_release",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
