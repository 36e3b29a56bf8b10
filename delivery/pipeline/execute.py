"""Execute one step: take its result from the cache, or run it in a temporary folder and commit it."""

from __future__ import annotations

import gc
import shutil
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivery.artifact import Manifest
from delivery.pipeline.context import Reporter, RunContext
from delivery.pipeline.keys import key_of, key_parts
from delivery.pipeline.peak import PeakMeter
from delivery.pipeline.refs import is_external

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from delivery.artifact import Artifact, Json
    from delivery.pipeline.keys import Job
    from delivery.pipeline.store import Store

_WORTH_COLLECTING_S = 1.0


@dataclass(frozen=True, slots=True)
class Made:
    """The artifact of a step (for a check, the measurement); `seconds` is the time spent in this run."""

    artifact: Artifact
    key: str
    cached: bool
    seconds: float


def make(
    job: Job, store: Store, reporter: Reporter, *, force: bool = False, gate: Mapping[str, Json] | None = None
) -> Made:
    """The output of a step, made once for its cache key.

    If another run is doing the same work, this one waits for it. `force` runs the step even if it is cached.
    `gate` is what a check will judge by; it is not part of the key.
    The work folder `scratch` survives a kill and is removed after success.
    """
    started = time.monotonic()
    with store.remembering():
        parts = key_parts(job)
    key = key_of(parts)
    if not force and (hit := _sound(key, store, reporter)):
        return Made(hit, key, cached=True, seconds=0.0)

    def on_wait(holder: str) -> None:
        reporter.display.line(f"{job.id}: waiting for {holder}, which is doing the same work")

    with store.key_lock(key, on_wait):
        if not force and (hit := _sound(key, store, reporter)):
            return Made(hit, key, cached=True, seconds=0.0)
        scratch = store.workdir / "scratch" / key
        if force:
            shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True, exist_ok=True)
        artifact = _run(job, parts, store, reporter, scratch, gate or {})
        store.remember_key(key, artifact, parts)
        shutil.rmtree(scratch, ignore_errors=True)
    return Made(artifact, key, cached=False, seconds=time.monotonic() - started)


def _run(
    job: Job,
    parts: dict[str, Json],
    store: Store,
    reporter: Reporter,
    scratch: Path,
    gate: Mapping[str, Json],
) -> Artifact:
    device = job.resolved_device() if type(job.step).uses_device else "cpu"
    started = time.time()
    with store.building() as out:
        ctx = RunContext(out, scratch, device, job.seed, job.inputs, reporter, gate)
        meter = PeakMeter()
        with store.remembering():
            job.step.run(ctx)
        record = {
            "stage": job.id,
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "seconds": round(time.time() - started, 3),
            "device": device,
            "peak_rss_bytes": meter.peak_bytes(),
            "params": job.params(judging=True, local=True),
            "plain_inputs": {
                role: str(a.path.resolve())
                for role, found in job.inputs.items()
                for a in found
                if is_external(a)
            },
            "libraries": parts["libraries"],
            "metrics": ctx.metrics,
            "findings": ctx.findings,
        }
        if time.time() - started > _WORTH_COLLECTING_S:
            _give_back_memory()
        step = type(job.step)
        manifest = Manifest(step.makes, step.name, step.version, job.params(), job.input_digests())
        return store.commit(out, manifest, record)


def _give_back_memory() -> None:
    """Free this step's tensors and the GPU allocator's cache before the next step."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _sound(key: str, store: Store, reporter: Reporter) -> Artifact | None:
    """The cached artifact of a key; a damaged one is discarded, so that it is made again."""
    artifact = store.cached(key)
    if artifact is None:
        return None
    damage = store.damage(artifact)
    if damage is None:
        return artifact
    reporter.display.line(f"  warning: the cached {artifact.path} is damaged: {damage}; making it again")
    reporter.log.event("damaged", stage=reporter.stage, artifact=artifact.digest, damage=damage)
    store.discard(artifact)
    return None
