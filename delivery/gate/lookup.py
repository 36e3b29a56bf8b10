"""Find the baseline of a measurement, and create a first one if the pipeline allows it.

Creating and recording are separate: whether a measurement may become a baseline is known only after it was
judged, and later measurements must not be compared with one that failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivery.errors import BaselineError
from delivery.gate import baseline as baselines
from delivery.gate.baseline import Baseline, Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """Which baseline: `model` on `device` (its slug and fingerprint) with a workload."""

    model: str
    device_slug: str
    device: Mapping[str, Any]
    workload: Mapping[str, Any]
    workload_digest: str

    def path(self, root: Path) -> Path:
        return baselines.location(root, self.model, self.device_slug, self.workload_digest)


@dataclass(frozen=True, slots=True)
class Found:
    """The baseline to compare with. `made_now`: this measurement is its own baseline.

    `path` is where a baseline just made belongs; None for one that lies in its file already.
    """

    baseline: Baseline
    made_now: bool
    note: str = ""
    path: Path | None = None

    def record(self) -> None:
        """Write a new baseline to its file; does nothing for an existing one."""
        if self.path is not None:
            baselines.write(self.path, self.baseline)


def find(place: Place, committed: Path, local: Path) -> Baseline | None:
    """The committed baseline, else the one recorded locally.

    Raises BaselineError `baseline-other-device` for a file that is of something else than its folders say.
    """
    for root in (committed, local):
        path = place.path(root)
        if path.is_file():
            found = baselines.read(path)
            check_content(path, found, place)
            return found
    return None


def check_content(path: Path, found: Baseline, place: Place) -> None:
    """A file copied or moved by hand must not be compared with, or updated, because of where it lies.

    Raises BaselineError `baseline-other-device`.
    """
    about = [
        ("device", dict(found.device), dict(place.device)),
        ("workload", found.workload_digest, place.workload_digest),
    ]
    if baselines.model_folder(found.model) != baselines.model_folder(place.model):
        about.insert(0, ("model", found.model, place.model))
    other = [f"{name} {was!r}, expected {here!r}" for name, was, here in about if was != here]
    if other:
        raise BaselineError(
            "baseline-other-device",
            f"{path} is the baseline of something else",
            why=f"it says {'; '.join(other)}",
            hint="restore it from version control, or delete it, then: deliver baseline update --reason TEXT",
        )


def find_or_make(place: Place, committed: Path, local: Path, snapshot: Snapshot, missing: str) -> Found:
    """The baseline; when there is none, `missing` decides: "bootstrap" makes one of `snapshot`.

    It is not written: `record` does that under `local`, once the measurement was judged good.
    A measurement that its baseline was bootstrapped from stays the baseline's own when it is judged again.
    Raises BaselineError `baseline-missing`, or `baseline-other-device` when only other devices have one.
    """
    found = find(place, committed, local)
    own = found is not None and found.bootstrapped and found.current.measurement == snapshot.measurement
    if found is not None and not own:
        return Found(found, made_now=False)
    others = sorted(
        {
            device
            for root in (committed, local)
            for device in baselines.other_devices(root, place.model, place.workload_digest, place.device_slug)
        }
    )
    also = f"; there is one for {', '.join(others)}, which cannot be compared with" if others else ""
    note = f"no baseline of {place.model} on {place.device_slug}{also}"
    if found is not None:
        # The same words as when it was made: an equal report is found again, and what follows it too.
        return Found(found, made_now=True, note=note)
    if missing != "bootstrap":
        raise _missing(place, others, committed)
    made = baselines.new(
        place.model, place.device, place.workload, place.workload_digest, snapshot, bootstrapped=True
    )
    return Found(made, made_now=True, note=note, path=place.path(local))


def _missing(place: Place, others: list[str], committed: Path) -> BaselineError:
    record = "deliver baseline update --reason TEXT, then commit the file"
    if others:
        return BaselineError(
            "baseline-other-device",
            f"the baseline of {place.model} was measured on another device",
            why=f"expected {place.device_slug}, there is {', '.join(others)}",
            hint=f"run on that device, or on this one: {record}",
        )
    return BaselineError(
        "baseline-missing",
        f"there is no baseline of {place.model} on {place.device_slug}",
        why=f"workload {place.workload_digest[:12]}, looked in {committed}",
        hint=record,
    )
