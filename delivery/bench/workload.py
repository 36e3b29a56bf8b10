"""Workloads: the requests sent to a server, as data. The one schema of shipped and users' workload files.

A workload has a shape (prompt and output lengths) and an arrival (when requests come). Its digest covers
both, so two measurements are comparable only when they asked the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.artifact import canonical_json, hash_file
from delivery.errors import DataError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

_FOLDER = Path(__file__).parent / "workloads"
ARRIVALS = ("closed", "constant", "poisson", "ramp", "trace")
_COUNTS = ("requests", "seed", "warmup")
_MOST = 1_000_000
_EXPECTED = {"int": "a whole number", "float": "a finite number", "str": "text"}
SHAPES = ("fixed", "mixed", "shared_prefix", "trace")


@dataclass(frozen=True, slots=True)
class Arrival:
    """When requests come.

    closed: `concurrency` requests are always in flight. constant, poisson: `rate` requests/s, evenly or
    with exponential gaps. ramp: the rate rises linearly from `rate` to `rate_end`. trace: as recorded,
    `speed` times as fast.
    """

    kind: str = "closed"
    concurrency: int = 1
    rate: float = 0.0
    rate_end: float = 0.0
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class LengthClass:
    """A share of the requests, with inclusive ranges of prompt and output tokens."""

    share: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """How long requests are, in tokens.

    fixed: all alike. mixed: `classes` in exact shares. shared_prefix: `prefixes` groups whose prompts
    begin with `prefix_tokens` common tokens. trace: lines of a JSONL file with `timestamp_s`,
    `prompt_tokens`, `output_tokens`.
    """

    kind: str = "fixed"
    prompt_tokens: int = 0
    output_tokens: int = 0
    classes: tuple[LengthClass, ...] = ()
    prefixes: int = 0
    prefix_tokens: int = 0
    file: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """`warmup` requests go first and are not recorded; `seed` decides lengths, arrivals and tokens."""

    name: str
    requests: int
    shape: Shape
    arrival: Arrival
    seed: int = 0
    warmup: int = 4
    trace_sha256: str = ""
    folder: str = field(default="", compare=False)
    """Where a trace's relative path starts."""

    def to_json(self) -> dict[str, Any]:
        """What decides the measurement: everything but the name, the warm-up and paths."""
        data = asdict(self)
        for key in ("name", "warmup", "folder"):
            del data[key]
        data["shape"].pop("file")
        return data

    @property
    def digest(self) -> str:
        """SHA-256 of `to_json`: 64 hexadecimal digits."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()

    @property
    def trace_path(self) -> Path:
        return Path(self.folder) / self.shape.file

    def with_arrival(self, *, rate: float | None = None, concurrency: int | None = None) -> Workload:
        """The same requests at one rate (Poisson, unless evenly spaced) or concurrency.

        Raises UsageError `bad-workload`.
        """
        if rate is not None and concurrency is not None:
            raise UsageError(
                "bad-workload",
                "a rate and a concurrency exclude each other",
                why="a closed loop sends when an answer comes, an open loop by the clock",
                hint="give --rate or --concurrency",
            )
        if rate is not None:
            kind = "constant" if self.arrival.kind == "constant" else "poisson"
            changed = Arrival(kind=kind, rate=rate)
        elif concurrency is not None:
            changed = Arrival(kind="closed", concurrency=concurrency)
        else:
            return self
        made = replace(self, arrival=changed)
        _check(made)
        return made


def workload_names() -> tuple[str, ...]:
    """Workloads that ship with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_workload(spec: str) -> Workload:
    """A shipped workload by name, or one from a JSON file.

    Raises UsageError `unknown-workload`, `bad-workload`; DataError `bad-trace`.
    """
    path = _FOLDER / f"{spec}.json" if spec in workload_names() else Path(spec)
    if not path.is_file():
        raise UsageError(
            "unknown-workload", f"there is no workload {spec!r}", hint=did_you_mean(spec, workload_names())
        )
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError("bad-workload", f"{path} is not a workload", why=str(error)) from error
    return parse_workload(data, name=path.stem, folder=str(path.parent))


def parse_workload(data: Mapping[str, Any], *, name: str = "workload", folder: str = "") -> Workload:
    """A workload from its JSON form; every key is checked. Raises as `load_workload`."""
    top = _fields(data, "workload", ("name", "requests", "shape", "arrival", "seed", "warmup"))
    shape_data = _fields(top.get("shape"), "shape", [f.name for f in fields(Shape)])
    given = shape_data.pop("classes", [])
    classes = [
        _fields(c, "shape.classes", [f.name for f in fields(LengthClass)])
        for c in (given if isinstance(given, list) else [given])
    ]
    try:
        shape = Shape(
            **_typed(shape_data, "shape", Shape),
            classes=tuple(
                LengthClass(float(c["share"]), _range(c["prompt_tokens"]), _range(c["output_tokens"]))
                for c in classes
            ),
        )
        arrival_data = _fields(top.get("arrival"), "arrival", [f.name for f in fields(Arrival)])
        arrival = Arrival(**_typed(arrival_data, "arrival", Arrival))
        counts = _typed({k: top[k] for k in _COUNTS if k in top}, "workload", Workload)
        made = Workload(
            name=str(top.get("name", name)),
            requests=counts.get("requests", 0),
            shape=shape,
            arrival=arrival,
            seed=counts.get("seed", 0),
            warmup=counts.get("warmup", 4),
            folder=folder,
        )
    except (TypeError, ValueError, KeyError) as error:
        raise UsageError("bad-workload", f"workload {name!r} is not valid", why=str(error)) from error
    if made.shape.kind == "trace":
        made = _with_trace(made)
    _check(made)
    return made


def read_trace(path: Path) -> list[tuple[float, int, int]]:
    """(timestamp_s, prompt_tokens, output_tokens) per line, from the earliest on. DataError `bad-trace`."""
    rows = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("bad-trace", f"the trace {path} cannot be read", why=str(error)) from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            at = float(row["timestamp_s"])
            if not math.isfinite(at):
                raise ValueError(f"timestamp_s is {at}")
            rows.append((at, int(row["prompt_tokens"]), int(row["output_tokens"])))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DataError(
                "bad-trace",
                f"{path}:{number} is not a line of a trace",
                why=f"expected timestamp_s, prompt_tokens and output_tokens: {error!r}",
            ) from error
    rows.sort()
    if not rows or min(r[1] for r in rows) < 1 or min(r[2] for r in rows) < 1:
        raise DataError(
            "bad-trace", f"{path} has no usable requests", why="every request has tokens in and out"
        )
    return [(at - rows[0][0], tokens_in, tokens_out) for at, tokens_in, tokens_out in rows]


def _with_trace(workload: Workload) -> Workload:
    path = workload.trace_path
    if not path.is_file():
        raise DataError("bad-trace", f"the trace {path} does not exist", hint="give its path in shape.file")
    count = workload.requests or len(read_trace(path))
    return replace(workload, trace_sha256=hash_file(path).sha256, requests=count)


def _check(workload: Workload) -> None:
    shape, arrival = workload.shape, workload.arrival
    needs: list[tuple[bool, str]] = [
        (1 <= workload.requests <= _MOST, f"requests is at least 1 and at most {_MOST:,}"),
        (workload.seed >= 0, "seed is at least 0"),
        (workload.warmup >= 0, "warmup is at least 0"),
        (shape.kind in SHAPES, f"shape.kind is one of {', '.join(SHAPES)}"),
        (arrival.kind in ARRIVALS, f"arrival.kind is one of {', '.join(ARRIVALS)}"),
    ]
    if shape.kind in ("fixed", "shared_prefix"):
        needs += [(shape.prompt_tokens >= 1 and shape.output_tokens >= 1, "the shape has tokens in and out")]
    if shape.kind == "shared_prefix":
        needs += [(shape.prefixes >= 1 and shape.prefix_tokens >= 1, "prefixes and prefix_tokens are given")]
    if shape.kind == "mixed":
        needs += [(abs(sum(c.share for c in shape.classes) - 1) < 1e-6, "the shares of classes add up to 1")]
        needs += [(all(c.share > 0 for c in shape.classes), "every class has a share over 0")]
    if arrival.kind == "closed":
        needs += [(arrival.concurrency >= 1, "arrival.concurrency is at least 1")]
    if arrival.kind in ("constant", "poisson", "ramp"):
        needs += [(0 < arrival.rate < math.inf, "arrival.rate is over 0 requests/s, and finite")]
    if arrival.kind == "ramp":
        needs += [(arrival.rate_end > 0, "arrival.rate_end is over 0 requests/s")]
    if arrival.kind == "trace":
        needs += [
            (shape.kind == "trace" and arrival.speed > 0, "arrivals of a trace need a trace and a speed")
        ]
    broken = [rule for holds, rule in needs if not holds]
    if broken:
        raise UsageError("bad-workload", f"workload {workload.name!r} is not valid", why="; ".join(broken))


def _fields(data: Any, where: str, known: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UsageError("bad-workload", f"{where} is not a mapping", why=f"got {data!r}")
    for key in data:
        if key not in known:
            raise UsageError(
                "bad-workload", f"{where} has no key {key!r}", hint=did_you_mean(str(key), known)
            )
    return dict(data)


def _typed(data: Mapping[str, Any], where: str, cls: type[Any]) -> dict[str, Any]:
    """The values as the fields of `cls` want them. Raises ValueError for one of another type."""
    kinds = {f.name: str(f.type) for f in fields(cls)}
    out: dict[str, Any] = {}
    for key, value in data.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if kinds[key] == "float" and number:
            out[key] = float(value)
        elif (kinds[key] == "int" and number and isinstance(value, int)) or (
            kinds[key] == "str" and isinstance(value, str)
        ):
            out[key] = value
        else:
            raise ValueError(f"{where}.{key} is {value!r}, expected {_EXPECTED[kinds[key]]}")
    return out


def _range(value: Any) -> tuple[int, int]:
    ends = value if isinstance(value, list) else [value, value]
    whole = len(ends) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in ends)
    if not whole or not 1 <= ends[0] <= ends[1]:
        raise ValueError(f"a range of tokens is [low, high] with 1 ≤ low ≤ high, got {value!r}")
    return ends[0], ends[1]
