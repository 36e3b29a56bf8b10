"""The convert step: any source to one canonical checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from delivery.artifact import Kind, hash_file, walk
from delivery.errors import UsageError
from delivery.steps.step import StepContext, param, step

if TYPE_CHECKING:
    from delivery.checkpoint.canonical import Canonical

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@step
@dataclass(frozen=True, kw_only=True)
class Convert:
    """Read a model in any form and write one canonical safetensors checkpoint.

    Reads Hugging Face directories (safetensors or pytorch_model.bin, single or sharded) and GGUF. The
    architecture comes from the checkpoint's own `architectures`; tokenizer, chat template, generation
    config and all other files travel unchanged.
    """

    name: ClassVar[str] = "convert"
    version: ClassVar[int] = 1
    makes: ClassVar[Kind] = Kind.CHECKPOINT
    libraries: ClassVar[tuple[str, ...]] = ("gguf", "tokenizers")

    model: str = param("", "A path, demo, a Hub id or a URL.", metavar="PATH|demo|HUB_ID|URL")
    architecture: str = param("", "Class name that the checkpoint must state; an error where it differs.")
    source_format: str = param("auto", "Form of the weights.", choices=("auto", "safetensors", "bin", "gguf"))
    revision: str = param("", "Branch, tag or commit of a Hub id.")
    download_dir: str = param("", "Folder for downloads; default: the cache.", local=True)
    trust_remote_code: bool = param(False, "Run the model's own Python code, to convert its tokenizer.")
    dtype: str = param(
        "auto",
        "Dtype of all weights; auto keeps what is stored, and makes quantised GGUF bfloat16.",
        choices=_DTYPES,
    )
    shard_bytes: int = param(5_000_000_000, "Largest size of one weight file in bytes.")

    def run(self, ctx: StepContext) -> None:
        from delivery.checkpoint.convert import convert

        source = self._source()
        with ctx.progress("convert", source.source.size_bytes, "B") as task:
            done = convert(source, ctx.out, self.shard_bytes, task.advance)
        for note in source.notes:
            ctx.finding("info", note)
        ctx.metric("weights_bytes", done["bytes"], "B", "lower")

    def external(self) -> Mapping[str, str]:
        if self.model == "demo":
            from delivery.checkpoint.demo import GGUF, GGUF_SHA256

            return {GGUF: GGUF_SHA256}
        path = Path(self.model)
        if path.is_file():
            return {path.name: hash_file(path).sha256}
        return {name: hash_file(file).sha256 for name, file in walk(path)} if path.is_dir() else {}

    def predict_peak_bytes(self, inputs: Mapping[str, Path]) -> int | None:
        if self.model == "demo" or not Path(self.model).exists():
            return None
        return _RUNTIME_BYTES + self._source().source.largest_bytes

    def _source(self) -> Canonical:
        from delivery.checkpoint.convert import open_source
        from delivery.checkpoint.demo import fetch_demo

        if not self.model:
            raise UsageError("model-missing", "no model is given", hint="--model demo")
        path = fetch_demo() if self.model == "demo" else Path(self.model)
        return open_source(
            path,
            architecture=self.architecture or None,
            source_format=self.source_format,
            dtype=self.dtype,
        )


_RUNTIME_BYTES = 400_000_000
