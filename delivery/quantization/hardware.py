"""Which GPUs can run a scheme's output: int8 from sm70, FP8 from sm89."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from delivery.device import compute_capability
from delivery.errors import EnvironmentLacking

if TYPE_CHECKING:
    from delivery.quantization.scheme import Storage

_INT8 = (7, 0)
_FP8 = (8, 9)
NEWEST_NEEDED = _FP8
"""A GPU of this compute capability or a newer one runs every scheme."""


def why_not_hardware(storage: Storage, capability: tuple[int, int]) -> str | None:
    """Why a GPU of this compute capability cannot run the products of a scheme; None where it can."""
    from delivery.qtensor import FLOAT8

    needed = _FP8 if storage.weight in FLOAT8 else _INT8
    if capability >= needed:
        return None
    kind = "FP8" if needed == _FP8 else "int8 and 4-bit"
    have, want = (f"sm{major}{minor}" for major, minor in (capability, needed))
    return f"{kind} weights need compute capability {want} or newer, this GPU has {have}"


def check_schemes(names: Iterable[str]) -> None:
    """The first GPU runs what these schemes make; nothing is said where there is none.

    Raises EnvironmentLacking `gpu-too-old`.
    """
    found = compute_capability()
    # A new card runs every scheme: no need to load one, and torch with it.
    if found is not None and found < NEWEST_NEEDED:
        from delivery.quantization.scheme import load_scheme

        check_hardware([load_scheme(name).storage for name in names], found)


def check_hardware(storages: Iterable[Storage], capability: tuple[int, int] | None = None) -> None:
    """Raises EnvironmentLacking `gpu-too-old`, before any work. capability: default the first GPU's."""
    found = compute_capability() if capability is None else capability
    if found is None:
        return
    for storage in storages:
        if reason := why_not_hardware(storage, found):
            raise EnvironmentLacking(
                "gpu-too-old",
                "this GPU cannot run the requested scheme",
                why=reason,
                hint="--scheme awq-w4a16; or quantise for another machine with --device cpu",
            )
