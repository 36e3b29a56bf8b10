"""The convert step: a model from any source to one canonical checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from delivery.artifact import Kind
from delivery.steps.step import Known, Peak, StepContext, param, step

if TYPE_CHECKING:
    from delivery.checkpoint.canonical import Canonical
    from delivery.checkpoint.fetch import Model
    from delivery.checkpoint.outline import Outline

_FORMATS = ("auto", "safetensors", "bin", "gguf")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_RUNTIME_BYTES = 400_000_000
"""Memory of Python with torch before any tensor is read (measured)."""


@step
@dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert a model from any supported format to one canonical safetensors checkpoint.

    Reads Hugging Face directories (safetensors or pytorch_model.bin, single or sharded) and GGUF, from a
    path, a Hub, a URL (http, s3, ...) or an OCI registry. The architecture is read from the checkpoint's
    `architectures`; tokenizer, chat template, generation config and all other files are copied unchanged.
    """

    name: ClassVar[str] = "convert"
    version: ClassVar[int] = 1
    makes: ClassVar[Kind] = Kind.CHECKPOINT
    uses_device: ClassVar[bool] = False
    seed_matters: ClassVar[bool] = False
    libraries: ClassVar[tuple[str, ...]] = ("gguf", "tokenizers")

    model: str = param(
        "", "Model to convert: a path, demo, a Hub id or a URL.", metavar="PATH|demo|HUB_ID|URL", path=True
    )
    architecture: str = param(
        "",
        "Expected architecture (class name); it is an error if the checkpoint states another.",
        metavar="CLASS",
    )
    source_format: str = param(
        "auto", "Format of the source; auto: detect it from the files.", choices=_FORMATS
    )
    revision: str = param("", "Branch, tag or commit of a Hub id; default: its main branch.", metavar="REV")
    download_dir: str = param("", "Folder for downloads; default: the cache.", local=True, metavar="DIR")
    trust_remote_code: bool = param(False, "Run the model's own Python code, to convert its tokenizer.")
    dtype: str = param(
        "auto", "Dtype of all weights; auto: keep it, with bfloat16 for quantised GGUF.", choices=_DTYPES
    )
    dequantize: bool = param(False, "Dequantise the weights of an already quantised checkpoint.")
    shard_bytes: int = param(
        5_000_000_000, "Maximum size of a weight file in bytes.", metavar="BYTES", at_least=1
    )

    def run(self, ctx: StepContext) -> None:
        from delivery.checkpoint.complete import check_complete, check_shapes
        from delivery.checkpoint.convert import convert

        with ctx.progress("fetch", 1, "model") as task:
            path = self._model().fetch(task.note)
            task.advance()
        source = self._open(path)
        check_complete(source.config, source.names())
        if (outline := source.outline()) is not None:
            check_shapes(outline)
        with ctx.progress("convert", source.size_bytes, "bytes") as task:
            done = convert(source, ctx.out, self.shard_bytes, task.advance)
        for note in source.notes:
            ctx.finding("info", note)
        ctx.metric("weights_bytes", done["bytes"], "bytes", "lower")

    def external(self) -> Mapping[str, str]:
        return self._model().digests()

    def preflight(self, inputs: Known, device: str = "cpu") -> None:
        """Check that the architecture is known and, if headers list the tensors, that none is missing."""
        from delivery.checkpoint.complete import check_complete, check_shapes

        if (outline := self.outline(inputs)) is not None:
            check_complete(outline.config, outline.names())
            check_shapes(outline)

    def outline(self, inputs: Known) -> Outline | None:
        local = self._model().local
        return None if local is None else self._open(local).outline()

    def predict_peak(self, inputs: Known, device: str = "cpu") -> Peak | None:
        local = self._model().local
        return None if local is None else Peak(_RUNTIME_BYTES + self._open(local).peak_bytes)

    def _model(self) -> Model:
        from delivery.checkpoint.fetch import locate

        return locate(self.model, revision=self.revision, download_dir=self.download_dir)

    def _open(self, path: Path) -> Canonical:
        from delivery.checkpoint.convert import open_source

        return open_source(
            path,
            architecture=self.architecture or None,
            source_format=self.source_format,
            dtype=self.dtype,
            dequantize=self.dequantize,
            trust_remote_code=self.trust_remote_code,
        )
