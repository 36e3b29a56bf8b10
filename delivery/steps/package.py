"""The package step: an engine that passed its gate becomes a signed Helm release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from delivery.artifact import Kind
from delivery.errors import UsageError
from delivery.steps.step import Input, Known, StepContext, fields_of, is_check, param, step, takes

if TYPE_CHECKING:
    from delivery.artifact import Artifact
    from delivery.gate.report import Report
    from delivery.release import ChartSpec, EngineFacts

_SOURCES = ("pvc", "image", "http", "s3")
_LOCAL_IMAGE = "deliver"


def _runtimes() -> tuple[str, ...]:
    from delivery.release.runtimes import RUNTIMES

    return tuple(RUNTIMES)


@step
@dataclass(frozen=True, kw_only=True)
class Package:
    """Package an engine that passed the gate as a signed Helm release.

    Refuses an engine whose reports failed, are missing or are about another engine, and a runtime that
    was not measured. The release contains the chart (a folder and a reproducible .tgz), the reports,
    provenance, a bill of materials, a runbook, an index of all files and an Ed25519 signature.
    """

    name: ClassVar[str] = "package"
    version: ClassVar[int] = 2
    makes: ClassVar[Kind] = Kind.RELEASE
    libraries: ClassVar[tuple[str, ...]] = (
        "deliver",
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "triton",
        "numpy",
        "numba",
    )
    seed_matters: ClassVar[bool] = False
    uses_device: ClassVar[bool] = False

    engine: Input = takes(Kind.ENGINE, "The engine to release.")
    report: Input = takes(Kind.REPORT, "Report about the engine.", many=True, optional=True)
    ancestor: Input = takes(
        Kind.CHECKPOINT,
        "Checkpoint that the engine was made from, for the provenance.",
        many=True,
        optional=True,
    )
    calibration: Input = takes(
        Kind.CALIBRATION,
        "Calibration that the engine was made with, for the provenance.",
        many=True,
        optional=True,
    )

    model: str = param("", "Name of the model in the pipeline.", metavar="NAME", path=True)
    release_name: str = param("", "Name of the chart; default: derived from the model.", metavar="NAME")
    model_name: str = param(
        "", "Name under which the model is served; default: the chart's name.", metavar="NAME"
    )
    chart_version: str = param("0.1.0", "Version of the chart (SemVer).", metavar="VERSION")
    revision: str = param("", "Revision of the model; default: the commit, or its digest.", metavar="REV")
    runtime: str = param(
        "deliver", "Runtime that serves the model; it must have been measured.", choices=_runtimes
    )
    image: str = param(
        "",
        "Container image, REPOSITORY@sha256:DIGEST; default: a local tag, with a warning.",
        metavar="IMAGE",
    )
    model_source: str = param("pvc", "Where the cluster gets the model's files.", choices=_SOURCES)
    require: list[str] = param(
        ["smoke", "evaluate", "compare"], "Checks that the engine must have passed.", metavar="CHECK"
    )
    commit: str = param("", "Commit of the weights, for the provenance.", metavar="SHA")
    repository: str = param("", "Repository of the weights, for the provenance.", metavar="URL")
    signing_key: str = param(
        "", "Ed25519 private key (PEM); default: an ephemeral key.", local=True, metavar="FILE"
    )

    def run(self, ctx: StepContext) -> None:
        from delivery.release import EngineFacts, ReleaseSpec, Signer, admit, licence_of, write_release

        engine = ctx.input("engine")
        ancestors = ctx.inputs("ancestor")
        served = self._served(engine, ancestors)
        signer = Signer.load(Path(self.signing_key) if self.signing_key else None)
        reports = ctx.inputs("report")
        judged = admit([engine.digest, served.digest], reports, required=self.require, runtime=self.runtime)
        facts = EngineFacts.read(engine)
        chart = self._chart(served, facts, ancestors, judged)
        write_release(
            ReleaseSpec(
                chart=chart,
                served=served,
                reports=list(zip(judged, reports, strict=True)),
                materials=[engine, *ancestors, *ctx.inputs("calibration"), *reports],
                config=facts.config,
                licence=licence_of(served.path),
                libraries=self.libraries,
                params=self._recorded_params(),
                commit=self.commit,
                repository=self.repository,
            ),
            ctx.out,
            signer,
        )
        if chart.image.allow_tag:
            ctx.finding(
                "warning", f"no image digest was given: the chart runs {chart.image.reference} by tag"
            )
        if signer.is_ephemeral:
            ctx.finding("warning", "signed with an ephemeral key, which proves no identity")

    def check(self) -> None:
        from delivery.errors import did_you_mean
        from delivery.release import Image
        from delivery.release.chart import check_chart_version

        if self.image:
            Image.parse(self.image)
        check_chart_version(self.chart_version)
        checks = _checks()
        for name in self.require:
            if name not in checks:
                raise UsageError(
                    "unknown-check",
                    f"--require names {name!r}, which is not a check",
                    why=f"the checks are {', '.join(checks)}",
                    hint=did_you_mean(name, checks),
                )

    def preflight(self, inputs: Known, device: str = "cpu") -> None:
        """Check that every required check has a report, or will have one."""
        judged = {ahead.step for ahead in inputs.get("report", ())}
        missing = [name for name in self.require if name not in judged]
        if missing:
            raise UsageError(
                "reports-missing",
                f"there is no report of {', '.join(missing)} about the engine",
                why=f"reports were given of: {', '.join(sorted(judged)) or 'none'}",
                hint="--report REF for each; or --require only those that were given",
            )

    def external(self) -> Mapping[str, str]:
        """The key's id: the signature, and so the release, depends on it."""
        if not self.signing_key:
            return {}
        from delivery.release import Signer

        return {"signing-key": Signer.load(Path(self.signing_key)).key_id}

    def _served(self, engine: Artifact, ancestors: list[Artifact]) -> Artifact:
        """What the runtime loads: the engine, or the checkpoint that the engine was built from."""
        from delivery.release import runtime

        if runtime(self.runtime).serves == "engine":
            return engine
        made_from = engine.manifest.inputs.get("checkpoint")
        for ancestor in ancestors:
            if ancestor.digest == made_from:
                return ancestor
        raise UsageError(
            "checkpoint-missing",
            f"{self.runtime} serves a checkpoint, and none was given",
            why=f"the engine was built from {str(made_from)[:12]}",
            hint=f"--ancestor {str(made_from)[:12]}",
        )

    def _chart(
        self,
        served: Artifact,
        facts: EngineFacts,
        ancestors: list[Artifact],
        reports: list[Report],
    ) -> ChartSpec:
        from delivery import __version__
        from delivery.release import ChartSpec, Image, Measured, chart_name, runtime

        name = chart_name(self.release_name or _last_part(self.model) or "model")
        return ChartSpec(
            name=name,
            version=self.chart_version,
            revision=self._revision(served, ancestors),
            model=self.model_name or name,
            model_digest=served.digest,
            files=served.manifest.files,
            runtime=runtime(self.runtime),
            image=Image.parse(self.image or f"{_LOCAL_IMAGE}:{__version__}"),
            hardware=facts.hardware,
            measured=Measured.of(reports, self.runtime),
            max_model_len=facts.max_model_len,
            kv_blocks=facts.kv_blocks,
            kv_bytes=facts.kv_bytes,
            source=self.model_source,
            annotations={
                "deliver.dev/engine": f"sha256:{served.digest}",
                "deliver.dev/model": self._model_shown() or name,
                **({"deliver.dev/commit": self.commit} if self.commit else {}),
            },
        )

    def _revision(self, served: Artifact, ancestors: list[Artifact]) -> str:
        """The model's revision: as given, else the weights' commit, convert's `revision`, or the digest."""
        revisions = [str(a.manifest.params.get("revision", "")) for a in ancestors]
        return self.revision or self.commit or "".join(revisions[:1]) or f"sha256-{served.digest[:12]}"

    def _recorded_params(self) -> dict[str, Any]:
        """The parameters as recorded in the provenance."""
        fields = [f for f in fields_of(type(self)) if not f.is_input and not f.metadata["local"]]
        return {f.name: getattr(self, f.name) for f in fields} | {"model": self._model_shown()}

    def _model_shown(self) -> str:
        """The model without local folders, so that the release is byte-identical on other machines."""
        return Path(self.model).resolve().name if self.model and Path(self.model).exists() else self.model


def _checks() -> list[str]:
    """Names of the steps that make reports."""
    from delivery.steps import CATALOG

    return [name for name, found in CATALOG.items() if is_check(found)]


def _last_part(model: str) -> str:
    """The name in a path, a Hub id or a URL."""
    return model.rstrip("/").rpartition("/")[2]
