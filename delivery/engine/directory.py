"""Engine directories: packed weights, plan, tuning table; written by `build`, read by `EngineCore`.

engine.json says what the engine is and what it was built with, layout.json where each packed tensor
belongs; tensors are stored as safetensors, next to every other file of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from delivery.artifact import Json, canonical_json
from delivery.checkpoint import Checkpoint, CheckpointWriter
from delivery.checkpoint.reader import safetensors_dtype
from delivery.engine.engine_model import EngineModel
from delivery.engine.fingerprint import build_fingerprint, differences, unusable
from delivery.engine.packed_files import Packer, tensor_names, unpack
from delivery.engine.read_weights import read_to
from delivery.errors import DataError, EnvironmentLacking
from delivery.kernels.tuning import TuningTable
from delivery.model.config import ModelConfig

ABOUT = "engine.json"
LAYOUT_FILE = "layout.json"
TUNING = "tuning.json"
FORMAT = "deliver-engine"
FORMAT_VERSION = 1

log = logging.getLogger(__name__)


def is_engine(path: Path) -> bool:
    """Whether a directory is an engine directory."""
    return (path / ABOUT).is_file()


def write_engine(
    out: Path, source: Checkpoint, model: EngineModel, about: Mapping[str, Json], table: TuningTable
) -> None:
    """Write an engine directory atomically. table: the choices measured for it, empty for none."""
    stored: dict[str, Json] = {}
    with CheckpointWriter(out) as writer:

        def add(name: str, tensor: torch.Tensor) -> None:
            stored[name] = [safetensors_dtype(tensor.dtype), list(tensor.shape)]
            writer.add(name, tensor)

        packer = Packer(add)
        layout = {
            "dtype": packer.pack(model.dtype, ""),
            "blocks": [packer.pack(b, f"blocks.{i}") for i, b in enumerate(model.blocks)],
            "embedding": packer.pack(model.embedding, "embedding"),
            "head": packer.pack(model.head, "head"),
        }
        writer.copy_files(source)
        writer.add_file(LAYOUT_FILE, _json(layout))
        if table.choices:
            writer.add_file(TUNING, (table.to_json() + "\n").encode())
        form = _form_digest(source.config, layout, stored)
        made = {"format": FORMAT, "format_version": FORMAT_VERSION, "form_sha256": form}
        writer.add_file(ABOUT, _json({**made, **about}))
        writer.finish(source.config)


def read_about(path: Path) -> dict[str, Any]:
    """engine.json. Raises DataError `engine-damaged` or `engine-format`."""
    about = _read(path / ABOUT)
    if about.get("format") != FORMAT or about.get("format_version") != FORMAT_VERSION:
        raise DataError(
            "engine-format",
            f"{path} is an engine of another version",
            why=f"expected {FORMAT} {FORMAT_VERSION}, "
            f"got {about.get('format')} {about.get('format_version')}",
            hint="deliver build --checkpoint CHECKPOINT --out DIR",
        )
    build, options = about.get("build"), about.get("options")
    if not isinstance(build, dict) or not isinstance(build.get("device"), dict):
        raise _damaged(path / ABOUT, "it does not say what it was built on")
    if not isinstance(options, dict):
        raise _damaged(path / ABOUT, "it does not say with which options it was built")
    return about


def check_fingerprint(path: Path, about: Mapping[str, Any], device: str, policy: str) -> bool:
    """Whether the tuned choices of an engine hold here.

    policy: 'rebuild' gives False (with a warning) when only choices are stale, 'refuse' raises then too.
    Raises EnvironmentLacking `engine-mismatch` when the packed weights cannot be used at all.
    """
    built = about.get("build", {})
    here = build_fingerprint(device, str(built.get("checkpoint", "")))
    changed = differences(built, here)
    reason = unusable(built, here)
    if reason is not None or (changed and policy == "refuse"):
        raise EnvironmentLacking(
            "engine-mismatch",
            f"the engine in {path} was not built for this machine",
            why=reason or "; ".join(changed),
            hint="deliver build --checkpoint CHECKPOINT --out DIR, on this machine",
        )
    if changed:
        log.warning("%s was built elsewhere (%s): its tuned choices are not used", path, "; ".join(changed))
    return not changed


def read_engine(path: Path, config: ModelConfig, device: torch.device) -> EngineModel:
    """The model of an engine directory; on a CPU its weights stay mapped from the files.

    Raises DataError `engine-damaged` where config, layout or tensor headers are not those that were built.
    """
    layout = _read(path / LAYOUT_FILE)
    files = Checkpoint.open(path)
    stored: dict[str, Json] = {n: [files.info(n).dtype, list(files.info(n).shape)] for n in files.names()}
    stated = read_about(path).get("form_sha256", "")
    # Kernels take sizes at their word: a wrong one reads beyond the end of a tensor.
    if stated and stated != _form_digest(files.config, layout, stored):
        why = (
            f"sizes in {LAYOUT_FILE}, config.json or the headers of the weights are not those that were built"
        )
        raise _damaged(path, why)
    read: dict[str, torch.Tensor] = {}
    if device.type == "cuda":
        read = read_to(files, tensor_names(layout), device)

    def tensor(name: str) -> torch.Tensor:
        if name not in read:
            read[name] = files.tensor(name, device)
        return read[name]

    try:
        return EngineModel(
            config,
            unpack(layout["dtype"], tensor),
            [unpack(block, tensor) for block in layout["blocks"]],
            unpack(layout["embedding"], tensor),
            unpack(layout["head"], tensor),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path / LAYOUT_FILE, f"{type(error).__name__}: {error}") from error


def read_tuning(path: Path) -> TuningTable:
    """The choices measured when the engine was built; empty where none were. Raises DataError
    `tuning-table-damaged`."""
    file = path / TUNING
    return TuningTable.from_json(file.read_text("utf-8")) if file.is_file() else TuningTable()


def _form_digest(config: Mapping[str, Any], layout: Json, stored: Mapping[str, Json]) -> str:
    """SHA-256 of everything that says how large things are. stored: name → [dtype, shape] of a tensor."""
    return hashlib.sha256(canonical_json([config, layout, stored]).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(found, dict):
        raise _damaged(path, "expected a JSON object")
    return found


def _damaged(path: Path, why: str) -> DataError:
    return DataError("engine-damaged", f"{path} cannot be read", why=why, hint="build the engine again")


def _json(value: Json) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
