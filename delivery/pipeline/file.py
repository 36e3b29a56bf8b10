"""The structure of a pipeline file (pydantic): every key, its type and its meaning.

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
        raise ValueError("expected a date such as 2027-01-31") from None
    return value


StepId = Annotated[str, AfterValidator(_step_id)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class Defaults(_Section):
    """Defaults of every step."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Device that steps run on.")
    seed: int = Field(default=0, description="Random seed.", ge=0)


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
    """A lower and an upper limit."""

    min: float | None = None
    max: float | None = None


class Waiver(_Section):
    """A metric that may fail until a date."""

    metric: str = Field(description="Name of the metric that is waived.")
    check: str = Field(default="", description="The check in which it is waived; default: all checks.")
    owner: str = Field(description="Who is responsible for the waiver.", min_length=1)
    reason: str = Field(description="Why it is acceptable.", min_length=1)
    expires: Annotated[str, AfterValidator(_iso_date)] = Field(
        description="Last day on which the waiver is valid, YYYY-MM-DD.",
        json_schema_extra={"format": "date"},
    )


class Gate(_Section):
    """What decides whether there is a release. Changes re-evaluate measurements without measuring again."""

    metrics: list[str] = Field(
        default_factory=list,
        description="Latency metrics that are judged together; empty: TTFT, TPOT and E2E at P95.",
    )
    limits: dict[str, float | Bounds] = Field(
        default_factory=dict,
        description="Metric → limit, in the direction in which the metric worsens.",
    )
    slo: dict[str, float | Bounds] = Field(
        default_factory=dict, description="Absolute targets under load: throughput, TTFT, memory drift."
    )
    missing_baseline: Literal["bootstrap", "fail"] | None = Field(
        default=None,
        description="Without a baseline: record one, or exit with 5. Default: fail if CI is set.",
    )
    waivers: list[Waiver] = Field(default_factory=list, description="Metrics that may fail until a date.")


class PipelineFile(_Section):
    """A deliver pipeline: from a checkpoint to a release."""

    version: Literal[1] = Field(description="Version of the file format.")
    model: str = Field(default="demo", description="A path, `demo`, a Hub id or a URL.", min_length=1)
    defaults: Defaults = Field(default_factory=Defaults)
    steps: list[StepEntry] = Field(description="The steps, in order.", min_length=1)
    gate: Gate = Field(default_factory=Gate)
    release: dict[str, Any] = Field(
        default_factory=dict, description="Parameters of the step that makes the release."
    )
