"""Layer-by-layer work that survives a kill: results per layer, and hidden states at intervals."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from delivery.artifact import canonical_json

if TYPE_CHECKING:
    import torch

    from delivery.quantization.stream import Stream

_STATE = "state.json"
_SAVE_EVERY_S = 20.0
_WORK_PER_SAVING = 20.0
"""Seconds of work for a second of writing hidden states, where `_SAVE_EVERY_S` has not passed before."""
_DISK_BYTES_PER_S = 5e8  # until a first writing was timed


class LayerStore:
    """Finished layers in a scratch folder, valid for one fingerprint.

    Hidden states are written after every layer where that costs next to nothing, else only every so many
    seconds: they can be gigabytes, and the layers since the last writing are cheaper to do again. What
    belongs to another fingerprint is thrown away.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any]) -> None:
        self._folder = folder / "layers"
        self._fingerprint = hashlib.sha256(canonical_json(fingerprint).encode()).hexdigest()
        self._saved_at = time.monotonic()
        self._saving_s: float | None = None
        state = self._state()
        if state is None or state.get("fingerprint") != self._fingerprint:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)

    def resume(self, stream: Stream | None) -> int:
        """The first layer that is still to be done; the stream is moved in front of it."""
        state = self._state()
        if state is None:
            return 0
        if stream is not None:
            stream.restore(self._hidden(int(state["next_layer"])))
        return int(state["next_layer"])

    def put(
        self,
        layer: int,
        tensors: Mapping[str, torch.Tensor],
        report: Mapping[str, Any],
        stream: Stream | None,
        *,
        final: bool = True,
    ) -> None:
        """Keep a finished layer, and the stream behind it when it is time.

        final: off for a layer that later work still changes, so that resuming does it again.
        """
        temporary = self._folder / f".layer.{os.getpid()}"
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, temporary)
        os.replace(temporary, self._tensors(layer))
        self._write(f"{layer:05d}.json", report)
        if not final:
            return
        if stream is None or self._is_due(stream):
            # Named by layer, and the old one goes last: a kill in between finds a pair that fits.
            started, before = time.monotonic(), self._state()
            if stream is not None:
                stream.save(self._hidden(layer + 1))
            self._write(_STATE, {"fingerprint": self._fingerprint, "next_layer": layer + 1})
            if before is not None and before["next_layer"] != layer + 1:
                self._hidden(int(before["next_layer"])).unlink(missing_ok=True)
            self._saved_at = time.monotonic()
            self._saving_s = self._saved_at - started

    def _is_due(self, stream: Stream) -> bool:
        cost_s = stream.size_bytes / _DISK_BYTES_PER_S if self._saving_s is None else self._saving_s
        return time.monotonic() - self._saved_at >= min(_SAVE_EVERY_S, _WORK_PER_SAVING * cost_s)

    def tensors(self, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of a finished layer."""
        found: dict[str, torch.Tensor] = load_file(self._tensors(layer))
        return found

    def report(self, layer: int) -> dict[str, Any]:
        """The report of a finished layer."""
        found = json.loads((self._folder / f"{layer:05d}.json").read_text("utf-8"))
        assert isinstance(found, dict)
        return found

    def _hidden(self, layer: int) -> Path:
        return self._folder / f"hidden-{layer:05d}.safetensors"

    def _tensors(self, layer: int) -> Path:
        return self._folder / f"{layer:05d}.safetensors"

    def _state(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self._folder / _STATE).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        temporary = self._folder / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(value), "utf-8")
        os.replace(temporary, self._folder / name)
