"""The pipeline file's own shape (pydantic): every key, its type and what it means.

Step parameters are not here: they are the fields of the step classes, checked by `spec.py`.
"""

from __future__ import annotations

import re
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

RESERVED = ("gate", "release", "defaults", "model", "version")
_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def _step_id(value: str) -> str:
    if not _ID.fullmatch(value) or value in RESERVED:
        raise ValueError(f"an id is a letter and then letters, digits, - or _, and none of {RESERVED}")
    return value


def _iso_date(value: str) -> str:
    try:
        date.fromisoformat(value)
    except ValueError:
        raise ValueError("a date is written like 2027-01-31") from None
    return value


StepId = Annotated[str, AfterValidator(_step_id)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class Defaults(_Section):
    """What every step gets unless it says otherwise."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where steps run.")
    seed: int = Field(default=0, description="Seed of everything random.", ge=0)


class StepEntry(_Section):
    """One step of the chain."""

    id: StepId | None = Field(default=None, description="Name of the stage; default: `uses`.")
    uses: str = Field(description="The step to run.")
    with_: dict[str, Any] = Field(default_factory=dict, alias="with", description="Its parameters.")
    inputs: dict[str, str | list[str] | None] = Field(
        default_factory=dict,
        description="Role → id of an earlier step, or `ref:` and a digest, path or tag. null unbinds a role.",
    )


class Bounds(_Section):
    """A limit on both sides."""

    min: float | None = None
    max: float | None = None


class Waiver(_Section):
    """A failed metric that may pass until a date."""

    metric: str = Field(description="Name of the metric that is waived.")
    check: str = Field(default="", description="The check in which it is waived; default: all.")
    owner: str = Field(description="Who answers for it.", min_length=1)
    reason: str = Field(description="Why it is acceptable.", min_length=1)
    expires: Annotated[str, AfterValidator(_iso_date)] = Field(
        description="Last day on which it counts, YYYY-MM-DD.",
        json_schema_extra={"format": "date"},
    )


class Gate(_Section):
    """What decides whether the release is made. Changing it judges again and measures nothing."""

    metrics: list[str] = Field(
        default_factory=list,
        description="Latency metrics gated together; empty: TTFT, TPOT and E2E at P95.",
    )
    limits: dict[str, float | Bounds] = Field(
        default_factory=dict,
        description="Metric → limit, in the direction in which the metric gets worse.",
    )
    slo: dict[str, float] = Field(
        default_factory=dict, description="Absolute targets: throughput, TTFT, memory drift."
    )
    missing_baseline: Literal["bootstrap", "fail"] | None = Field(
        default=None, description="With no baseline: record one, or exit 5. Default: fail where CI is set."
    )
    waivers: list[Waiver] = Field(default_factory=list, description="Failed metrics that may pass.")


class PipelineFile(_Section):
    """A deliver pipeline: from a checkpoint to a release."""

    version: Literal[1] = Field(description="Version of this format.")
    model: str = Field(default="demo", description="A path, `demo`, a Hub id or a URL.", min_length=1)
    defaults: Defaults = Field(default_factory=Defaults)
    steps: list[StepEntry] = Field(description="The chain, in order.", min_length=1)
    gate: Gate = Field(default_factory=Gate)
    release: dict[str, Any] = Field(
        default_factory=dict, description="Parameters of the step that makes the release."
    )
