"""Cache keys: everything that affects a step's output, and nothing else.

Step, step version, parameters (except those that affect only the verdict or how the work is done, and
secrets), input digests, digests of external files, versions of the libraries that the step names, the
seed, and the device if it matters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.artifact import canonical_json
from delivery.device import fingerprint, resolve_device
from delivery.steps.step import fields_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from delivery.artifact import Artifact, Digests, Json

# Parameters that say where a step runs; `device_matters` says whether that affects the output.
_DEVICE = "device"
_SEED = "seed"


@dataclass(frozen=True, slots=True)
class Job:
    """One step ready to run: its instance, its input artifacts by role, and where it runs."""

    id: str
    step: Any
    inputs: Mapping[str, tuple[Artifact, ...]]
    device: str = "auto"
    seed: int = 0

    def resolved_device(self) -> str:
        """'cpu' or 'cuda'; a step's own `device` parameter overrides the pipeline's."""
        return resolve_device(getattr(self.step, _DEVICE, None) or self.device)

    def input_digests(self) -> dict[str, Digests]:
        """Role → digest, or digests if the role takes many."""
        many = {f.name for f in fields_of(type(self.step)) if f.is_input and f.metadata["many"]}
        return {
            role: tuple(a.digest for a in found) if role in many else found[0].digest
            for role, found in self.inputs.items()
            if found
        }

    def params(self, *, judging: bool = False, local: bool = False) -> dict[str, Json]:
        """Parameters as JSON: those that affect the output, and those requested too. Never secrets."""
        out: dict[str, Json] = {}
        for f in fields_of(type(self.step)):
            hidden = f.is_input or f.metadata["secret"] or (f.metadata["judges"] and not judging)
            if not hidden and (local or not (f.metadata["local"] or f.name == _DEVICE)):
                value = getattr(self.step, f.name)
                out[f.name] = _plain(value if local else _bare(value, f.metadata["path"]))
        if type(self.step).seed_matters and _SEED not in out:
            out[_SEED] = self.seed
        return out


def key_parts(job: Job) -> dict[str, Json]:
    """The parts of the key, as JSON; `--plan` shows which of them changed."""
    step = type(job.step)
    return {
        "step": step.name,
        "step_version": step.version,
        "params": job.params(),
        "inputs": {r: list(d) if isinstance(d, tuple) else d for r, d in job.input_digests().items()},
        "external": dict(job.step.external()),
        "libraries": {name: _version(name) for name in step.libraries},
        "device": fingerprint(job.resolved_device()).slug if step.device_matters else None,
    }


def key_of(parts: Mapping[str, Json]) -> str:
    """SHA-256 of the canonical JSON of the parts."""
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def differences(before: Mapping[str, Json], after: Mapping[str, Json]) -> list[str]:
    """The differences between the parts of two keys, as short phrases: 'group_size 64 → 32'."""
    out = []
    for part, new in after.items():
        old = before.get(part)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            out += [_change(name, old.get(name), new.get(name)) for name in names]
        else:
            out.append(_change(part, old, new))
    return out


def _change(name: str, old: Json, new: Json) -> str:
    texts = [str(value) for value in (old, new)]
    return f"{name} changed" if max(map(len, texts)) > 24 else f"{name} {texts[0]} → {texts[1]}"


def _bare(value: Any, path: bool | Callable[[str], str]) -> Any:
    """Local paths without their parent folders (`path` says whether, or how); other values unchanged."""
    if not path or not value:
        return value
    if isinstance(value, list | tuple):
        return [_bare(one, path) for one in value]
    if callable(path):
        return path(value)
    return Path(value).resolve().name if Path(value).exists() else value


def _plain(value: Any) -> Json:
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"
