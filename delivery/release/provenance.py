"""The origin of a release: an in-toto Statement v1 with SLSA Provenance v1.

It contains no time and no machine, so the same inputs give the same bytes; the run's own record is
next to the artifact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delivery import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delivery.artifact import Artifact, FileRef

_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://slsa.dev/provenance/v1"
_BUILD_TYPE = "https://deliver.dev/package/v1"
_BUILDER = "https://deliver.dev/deliver"


def provenance(
    *,
    subjects: Sequence[FileRef],
    params: Mapping[str, Any],
    materials: Iterable[Artifact],
    commit: str,
    repository: str,
) -> dict[str, Any]:
    """A statement about `subjects` (files of the release).

    params: parameters of the package step. materials: the input artifacts with the parameters of their
    steps. commit and repository: of the weights, empty when unknown.
    """
    dependencies = [_dependency(artifact) for artifact in materials]
    if commit:
        uri = f"git+{repository}@{commit}" if repository else f"git:{commit}"
        dependencies.insert(0, {"name": "weights", "uri": uri, "digest": {"gitCommit": commit}})
    return {
        "_type": _STATEMENT,
        "subject": [{"name": ref.path, "digest": {"sha256": ref.sha256}} for ref in subjects],
        "predicateType": _PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": dict(params),
                "internalParameters": {},
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": _BUILDER, "version": {"deliver": __version__}},
            },
        },
    }


def _dependency(artifact: Artifact) -> dict[str, Any]:
    manifest = artifact.manifest
    return {
        "name": f"{manifest.kind}/{manifest.step}",
        "digest": {"sha256": artifact.digest},
        "annotations": {
            "step": manifest.step,
            "step_version": manifest.step_version,
            "params": dict(manifest.params),
            "inputs": {r: list(d) if isinstance(d, tuple) else [d] for r, d in manifest.inputs.items()},
        },
    }
