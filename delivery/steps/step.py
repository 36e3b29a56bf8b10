"""What a step is: a frozen dataclass whose fields are its options and whose docstring is its help.

A *transform* makes a new artifact in `run`. A *check* measures in `run` and judges in `judge`: the
measurement is cached, the verdict is recomputed every time, so that a changed limit or baseline
judges again without measuring again.

Step modules are imported for `--help`, so they import torch inside `run` only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from delivery.artifact import Artifact, Digests, Json, Kind
from delivery.steps.ahead import Ahead as Ahead
from delivery.steps.ahead import Known as Known
from delivery.steps.ahead import Peak as Peak
from delivery.steps.ahead import outline_of as outline_of
from delivery.steps.ahead import path_of as path_of

if TYPE_CHECKING:
    from delivery.checkpoint.outline import Outline

Severity = Literal["info", "warning", "error"]
Direction = Literal["lower", "higher", "both"]
T = TypeVar("T")

# The declared type of a step's input field. Its value is the reference as written (a digest prefix,
# a path or a tag); the runner resolves it and `ctx.input(role)` gives the artifact.
Input = str | Sequence[str] | None


def takes(kind: Kind, help: str = "", *, optional: bool = False, many: bool = False) -> Any:
    """Declare an input: its role is the field's name.

    If the pipeline does not bind the role, these rules do:
    `source` to the checkpoint that the step's other inputs were made from (the convert step's);
    a `many` role of reports to every report about the same engine, of another kind to everything of
    that kind that the step's other inputs were made from;
    an optional role of a kind that another role of the step has too, to nothing;
    any other to the nearest earlier step that makes the kind.
    """
    return dataclasses.field(
        default=() if many else None,
        metadata={"input": True, "kind": kind, "help": help, "optional": optional, "many": many},
    )


def param(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None,
    secret: bool = False,
    judges: bool = False,
    local: bool = False,
    path: bool | Callable[[str], str] = False,
    metavar: str | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Any:
    """Declare a parameter.

    choices: allowed values, or a function that lists them (called when needed, never at import).
    secret: never written to a manifest, a log or a report.
    judges: affects the verdict only, so it is not part of the measurement's cache key.
    local: affects how the work is done (threads, cache folders) but not the result; not in the key.
    path: may name local files or folders; then only their last part is recorded, so that the same content
    elsewhere has the same key. Their content has to be in `external()`. A function returns what is recorded.
    at_least, at_most: the smallest and the largest allowed number, in the parameter's own unit.
    """
    metadata = {
        "input": False,
        "help": help,
        "choices": choices,
        "secret": secret,
        "judges": judges,
        "local": local,
        "path": path,
        "metavar": metavar,
        "at_least": at_least,
        "at_most": at_most,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Task(Protocol):
    """A progress bar, or plain lines if stderr is not a terminal."""

    def advance(self, amount: float = 1) -> None: ...
    def note(self, text: str) -> None: ...
    def __enter__(self) -> Task: ...
    def __exit__(self, *exc: object) -> None: ...


class StepContext(Protocol):
    """What a running step is given."""

    out: Path
    """Temporary directory that becomes the artifact by rename."""
    scratch: Path
    """Work directory that survives a kill, one per cache key and locked; used to resume per layer."""
    device: str
    seed: int
    gate: Mapping[str, Json]
    """What the measurement will be judged by; read only to decide when enough has been measured."""

    def input(self, role: str) -> Artifact: ...
    def inputs(self, role: str) -> list[Artifact]: ...
    def has(self, role: str) -> bool: ...
    def progress(self, title: str, total: float, unit: str) -> Task: ...
    def metric(self, name: str, value: float, unit: str, direction: Direction) -> None: ...
    def finding(self, severity: Severity, text: str) -> None: ...


class JudgeContext(Protocol):
    """The inputs of a check's verdict: the measurement, the limits and the baselines."""

    measurement: Artifact
    out: Path
    """Already holds links to the measurement's files; `judge` adds `report.json` and its renderings."""
    model: str
    """Name of the model that baselines are stored under."""
    gate: Mapping[str, Json]
    """The pipeline's `gate:` section as plain JSON: metrics, limits, slo, missing_baseline, waivers.

    Waivers are applied by the runner after `judge`: it turns a metric of status `fail` into `waived`
    and a FAIL none of whose metrics still fails into WAIVED. So every reason to fail is a metric.
    """
    baselines: Path
    """Folder of committed baselines."""
    local_baselines: Path
    """Folder under the workdir, where a bootstrapped baseline is recorded."""

    def input(self, role: str) -> Artifact: ...
    def has(self, role: str) -> bool: ...


class PartnerContext(Protocol):
    """What a step may use to name further inputs; `inputs` has the digests of those it was given."""

    model: str
    device: str
    baselines: Path
    local_baselines: Path
    inputs: Mapping[str, Digests]

    def made_from(self, digest: str) -> Mapping[str, Digests]:
        """Role → digest of the inputs of an artifact of the store; {} for one that is not there."""
        ...


class Step(Protocol):
    """The contract of a step class; `@step` checks it."""

    name: ClassVar[str]
    version: ClassVar[int]
    makes: ClassVar[Kind]
    libraries: ClassVar[tuple[str, ...]]
    """Distributions whose version affects the output, and so the cache key."""
    device_matters: ClassVar[bool]
    """Whether the output depends on the class of the device (default no)."""
    seed_matters: ClassVar[bool]
    """Whether the output depends on the pipeline's seed (default yes)."""
    uses_device: ClassVar[bool]
    """Whether it computes on the device at all (default yes)."""

    def run(self, ctx: StepContext) -> None: ...

    def check(self) -> None:
        """Raise UsageError for values that cannot work with any inputs. Fast, without torch."""

    def preflight(self, inputs: Known, device: str = "cpu") -> None:
        """Raise for values that cannot work with these inputs, as far as they are known, on 'cpu' or 'cuda'.

        Called before a run computes anything, again when an unknown input has been made, and when the step
        is run on its own. Uses configs and headers only; no weight is read.
        """

    def outline(self, inputs: Known) -> Outline | None:
        """Predicted outline of the checkpoint that the step makes; None if unknown. Without torch."""
        ...

    def external(self) -> Mapping[str, str]:
        """Name → SHA-256 of every external file or text that affects the output."""
        ...

    def partners(self, ctx: PartnerContext) -> Mapping[str, str]:
        """Role → digest of the artifact that an unbound optional role should use if the store has it."""
        ...

    def predict_peak(self, inputs: Known, device: str = "cpu") -> Peak | None:
        """Peak memory on 'cpu' or 'cuda', predicted from config and headers only, without torch; None if
        unknown."""
        ...


@dataclass(frozen=True)
class Field:
    """One declared field of a step, as the command line and the pipeline file see it."""

    name: str
    type: str
    default: Any
    metadata: Mapping[str, Any]

    @property
    def is_input(self) -> bool:
        return bool(self.metadata["input"])


def fields_of(cls: type[Any]) -> tuple[Field, ...]:
    """The declared fields in order. Raises TypeError for one made without `param` or `takes`."""
    out = []
    for f in dataclasses.fields(cls):
        if "input" not in f.metadata:
            raise TypeError(f"{cls.__name__}.{f.name}: declare step fields with param() or takes()")
        made = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        out.append(Field(f.name, str(f.type), made, f.metadata))
    return tuple(out)


def step(cls: type[T]) -> type[T]:
    """Check a step class and add the defaults it omits; place it above `@dataclass(frozen=True, ...)`."""
    for name in ("name", "makes"):
        if not hasattr(cls, name):
            raise TypeError(f"{cls.__name__} needs a class variable {name!r}")
    for name, value in (
        ("version", 1),
        ("libraries", ()),
        ("device_matters", False),
        ("seed_matters", True),
        ("uses_device", True),
    ):
        if not hasattr(cls, name):
            setattr(cls, name, value)
    for name, method in (
        ("check", lambda self: None),
        ("preflight", lambda self, inputs, device="cpu": None),
        ("outline", lambda self, inputs: None),
        ("external", lambda self: {}),
        ("partners", lambda self, ctx: {}),
        ("predict_peak", lambda self, inputs, device="cpu": None),
    ):
        if not hasattr(cls, name):
            setattr(cls, name, method)
    fields_of(cls)
    return cls


def is_check(cls: type[Any]) -> bool:
    """Whether the step judges: it has a `judge(ctx: JudgeContext) -> Report`."""
    return hasattr(cls, "judge")
