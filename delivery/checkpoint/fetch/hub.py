"""A model of a Hugging Face Hub, or of a mirror that $HF_ENDPOINT names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from delivery.artifact import hash_file
from delivery.checkpoint.fetch.place import Ledger, slot
from delivery.errors import DataError, EnvironmentLacking

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Weights in forms that are not read, when safetensors are there as well.
_IGNORED = ["*.h5", "*.msgpack", "*.onnx", "*.ot", "*.tflite", "flax_model*", "tf_model*", "original/*"]


class HubModel:
    """`owner/name` at a revision (branch, tag or commit; empty for the main branch)."""

    def __init__(self, name: str, revision: str, folder: Path) -> None:
        self.name = name
        self.revision = revision or "main"
        self._folder = folder

    def digests(self) -> Mapping[str, str]:
        """{name: commit}; where the Hub is out of reach, the commit that was fetched last.

        Raises EnvironmentLacking `hub-unreachable`, DataError `hub-refuses`.
        """
        return {self.name: self._commit()}

    def fetch(self, progress: Callable[[str], None]) -> Path:
        """The snapshot's folder; its links lead to files whose SHA-256 was checked.

        Raises as `digests`, and DataError `download-damaged`.
        """
        from huggingface_hub import snapshot_download

        commit = self._commit()
        path = self._folder / f"models--{self.name.replace('/', '--')}" / "snapshots" / commit
        if self._record(commit).whole() is not None and path.is_dir():
            return path
        progress(f"{self.name} at {commit[:12]}")
        patterns = [*_IGNORED, *(["*.bin", "*.pth"] if self._has_safetensors(commit) else [])]
        try:
            path = Path(
                snapshot_download(
                    self.name,
                    revision=commit,
                    cache_dir=self._folder,
                    ignore_patterns=patterns,
                    endpoint=_endpoint(),
                )
            )
        except Exception as error:
            raise self._explain(error) from error
        for file in sorted(path.rglob("*")):
            stored = file.resolve().name
            if file.is_file() and _SHA256.fullmatch(stored) and hash_file(file.resolve()).sha256 != stored:
                raise DataError(
                    "download-damaged",
                    f"{file.name} is not the file that was expected",
                    why=f"expected SHA-256 {stored}",
                    hint=f"rm {file.resolve()}",
                )
        for revision in (self.revision, commit):
            self._record(revision).finish({self.name: commit})
        return path

    def _record(self, revision: str) -> Ledger:
        place = slot(self._folder, f"{self.name}@{revision}")
        place.mkdir(parents=True, exist_ok=True)
        return Ledger(place)

    def _commit(self) -> str:
        from huggingface_hub import HfApi

        if _COMMIT.fullmatch(self.revision):
            return self.revision
        try:
            found = HfApi(endpoint=_endpoint()).model_info(self.name, revision=self.revision, timeout=20).sha
        except Exception as error:
            known = None if _is_refusal(error) else self._record(self.revision).whole()
            if known is None:
                raise self._explain(error) from error
            return known[self.name]
        if not found:
            raise self._explain(ValueError("the Hub named no commit"))
        return str(found)

    def _has_safetensors(self, commit: str) -> bool:
        from huggingface_hub import HfApi

        try:
            files = HfApi(endpoint=_endpoint()).list_repo_files(self.name, revision=commit)
        except Exception:
            return False
        return any(name.endswith(".safetensors") for name in files)

    def _explain(self, error: Exception) -> DataError | EnvironmentLacking:
        text = str(error).strip().split("\n")[0][:200] or type(error).__name__
        if _is_refusal(error):
            return DataError(
                "hub-refuses",
                f"the Hub does not serve {self.name} at {self.revision}",
                why=text,
                hint="check the name and --revision; for gated models log in with `hf auth login`",
            )
        return EnvironmentLacking(
            "hub-unreachable",
            f"the Hub cannot be reached for {self.name}",
            why=f"{_endpoint() or 'https://huggingface.co'}: {text}",
            hint="set HF_ENDPOINT to a mirror, or give a local directory with --model PATH",
        )


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")


def _is_refusal(error: Exception) -> bool:
    names = {"RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError", "HFValidationError"}
    return any(kind.__name__ in names for kind in type(error).__mro__)
