"""The Helm chart of a release, rendered from `chart_template/` and what was measured.

Only Chart.yaml, values.yaml and the table of series are rendered here (jinja2 with square brackets,
so that Helm's own braces pass through); every other template is copied as it is.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from delivery.errors import UsageError
from delivery.release.dashboard import dashboard
from delivery.release.measured import Measured
from delivery.release.runtimes import API_KEYS_FILE, Runtime
from delivery.release.values_schema import values_schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delivery.artifact import FileRef

_TEMPLATE = Path(__file__).parent / "chart_template"
_IMAGE = re.compile(r"^(?P<repository>[^@\s]+?)(?:@(?P<digest>sha256:[0-9a-f]{64})|:(?P<tag>[\w][\w.-]*))$")
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"  # Helm reads 64 bits
_PRERELEASE = rf"(?:{_NUMBER}|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_BUILD = r"[0-9A-Za-z-]+"
_SEMVER = re.compile(
    rf"{_NUMBER}(\.{_NUMBER}){{2}}(-{_PRERELEASE}(\.{_PRERELEASE})*)?(\+{_BUILD}(\.{_BUILD})*)?"
)
_NAME_LIMIT = 40
_MIB = 1 << 20
_PRE_STOP_S = 5
_CLIENT_TIMEOUT_S = 300
GRACE_S = _PRE_STOP_S + _CLIENT_TIMEOUT_S + 5
"""Seconds that a pod gets to finish its requests."""


@dataclass(frozen=True, slots=True)
class Image:
    """A container image by digest, or (marked everywhere) by tag."""

    repository: str
    digest: str = ""
    tag: str = ""

    @property
    def allow_tag(self) -> bool:
        return not self.digest

    @property
    def reference(self) -> str:
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"

    @classmethod
    def parse(cls, text: str) -> Image:
        """`REPOSITORY@sha256:…` or `REPOSITORY:TAG`. Raises UsageError `image-reference`."""
        match = _IMAGE.match(text)
        if match is None or match["tag"] == "latest":
            raise UsageError(
                "image-reference",
                f"{text!r} does not say which image to run",
                why="expected REPOSITORY@sha256:DIGEST, or REPOSITORY:TAG with a tag other than latest",
                hint="docker buildx imagetools inspect REPOSITORY:TAG prints the digest",
            )
        return cls(match["repository"], match["digest"] or "", match["tag"] or "")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the gate measured on: `gpus` devices of `name`, or a processor with `cores`."""

    name: str
    gpus: int = 0
    cores: int = 2


@dataclass(frozen=True)
class ChartSpec:
    """Everything that a chart depends on."""

    name: str
    version: str
    revision: str
    model: str
    model_digest: str
    files: Sequence[FileRef]
    runtime: Runtime
    image: Image
    hardware: Hardware
    measured: Measured
    max_model_len: int | None = None
    kv_blocks: int | None = None
    kv_bytes: int | None = None
    source: str = "pvc"
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)


def chart_name(text: str) -> str:
    """A name for charts and Kubernetes objects (RFC 1123, at most 40 characters) from any text."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_NAME_LIMIT].strip("-")
    return name if name[:1].isalpha() else f"model-{name}".strip("-")


def check_chart_version(text: str) -> None:
    """Raises UsageError `chart-version` for what is no SemVer 2 version; Helm accepts no other."""
    if not _SEMVER.fullmatch(text):
        raise UsageError(
            "chart-version",
            f"{text!r} is not a valid chart version",
            why="expected MAJOR.MINOR.PATCH, with -PRERELEASE or +BUILD after it if need be (SemVer 2)",
            hint="--chart-version 1.0.0",
        )


def write_chart(spec: ChartSpec, parent: Path) -> Path:
    """Write the chart into `parent/<name>` and return that directory."""
    chart = parent / spec.name
    values = _values(spec)
    environment = Environment(
        block_start_string="[%",
        block_end_string="%]",
        variable_start_string="[[",
        variable_end_string="]]",
        comment_start_string="[#",
        comment_end_string="#]",
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    for source in sorted(p for p in _TEMPLATE.rglob("*") if p.is_file() and p.suffix != ".pyc"):
        relative = source.relative_to(_TEMPLATE)
        target = chart / relative.with_suffix("" if source.suffix == ".j2" else source.suffix)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text("utf-8")
        if source.suffix == ".j2":
            text = environment.from_string(text).render(values)
        target.write_text(text, "utf-8")
    schema = values_schema(spec.runtime.kind, allow_tag=spec.image.allow_tag)
    _write_json(chart / "values.schema.json", schema)
    baseline = spec.measured.output_tokens_per_s or 0.0
    _write_json(chart / "files" / "dashboard.json", dashboard(spec.model, spec.runtime.series, baseline))
    sums = "".join(f"{f.sha256}  {f.path}\n" for f in sorted(spec.files, key=lambda f: f.path))
    (chart / "files" / "model.sha256").write_text(sums, "utf-8")
    return chart


def _values(spec: ChartSpec) -> dict[str, Any]:
    measured, hardware = spec.measured, spec.hardware
    period_s, failures, startup_why = measured.startup()
    waiting, waiting_why = measured.waiting_requests()
    shm_mib = 1024 if hardware.gpus else 256
    model_mib = spec.size_bytes // _MIB + 1
    return {
        "chart": {
            "name": spec.name,
            "version": spec.version,
            "description": f"{spec.model}, served by {spec.runtime.kind}, as it passed its release gate",
            "annotations": spec.annotations,
        },
        "runtime": spec.runtime,
        "series": {name: getattr(spec.runtime.series, name) for name in spec.runtime.series.__slots__},
        "arguments": spec.runtime.arguments(spec.model, spec.max_model_len, spec.kv_blocks),
        "api_keys_file": API_KEYS_FILE,
        "image": spec.image,
        "model": {
            "name": spec.model,
            "revision": spec.revision,
            "digest": spec.model_digest,
            "files": len(spec.files),
            "size_bytes": spec.size_bytes,
            "source": spec.source,
        },
        "device": {
            "name": hardware.name,
            "count": hardware.gpus,
            "product": hardware.name.replace(" ", "-") if hardware.gpus else "",
        },
        "resources": {
            "cpu": str(max(1, hardware.cores if not hardware.gpus else 4)),
            "memory": f"{measured.memory_mib(spec.size_bytes, spec.kv_bytes, shm_mib)}Mi",
            "ephemeral": f"{model_mib + 1024}Mi",
            "ephemeral_limit": f"{model_mib + 4096}Mi",
            "shm": f"{shm_mib}Mi",
        },
        "probes": {"period": period_s, "failures": failures, "note": startup_why},
        "drain": {
            "client_s": _CLIENT_TIMEOUT_S,
            "pre_stop": _PRE_STOP_S,
            "grace": GRACE_S,
        },
        "autoscaling": {"waiting": waiting, "note": waiting_why, "kv_usage": 0.8},
        "rules": {"baseline": round(measured.output_tokens_per_s or 0.0, 1)},
    }


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False) + "\n", "utf-8")
