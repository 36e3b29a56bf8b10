"""Inputs that a step finds by itself: what its baseline was measured on, if the store still has it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delivery.pipeline.judge import committed_baselines
from delivery.steps.step import fields_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from delivery.artifact import Digests
    from delivery.pipeline.keys import Job
    from delivery.pipeline.store import Store


@dataclass(frozen=True)
class Surroundings:
    """Implements `delivery.steps.step.PartnerContext`."""

    model: str
    device: str
    baselines: Path
    local_baselines: Path
    inputs: Mapping[str, Digests]
    store: Store

    def made_from(self, digest: str) -> Mapping[str, Digests]:
        artifact = self.store.find(digest)
        return {} if artifact is None else artifact.manifest.inputs


def with_partners(job: Job, store: Store, model: str) -> Job:
    """The job with its unbound roles bound to artifacts that the step names and the store has."""
    open_roles = {f.name for f in fields_of(type(job.step)) if f.is_input} - set(job.inputs)
    if not open_roles or not type(job.step).uses_device:
        return job
    around = Surroundings(
        model,
        job.resolved_device(),
        committed_baselines(),
        store.workdir / "baselines",
        job.input_digests(),
        store,
    )
    named = {role: d for role, d in job.step.partners(around).items() if role in open_roles}
    found = {role: (a,) for role, digest in named.items() if (a := store.find(digest)) is not None}
    return replace(job, inputs={**job.inputs, **found}) if found else job
