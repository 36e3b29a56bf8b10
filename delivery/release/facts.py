"""What a release says about its engine, read from the engine's own files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError
from delivery.release.chart import Hardware

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from delivery.artifact import Artifact

_CONFIG = "config.json"
_ENGINE = "engine.json"
_LICENCES = (
    ("Apache License", "Apache-2.0"),
    ("MIT License", "MIT"),
    ("LLAMA", "Llama Community License"),
    ("Gemma Terms", "Gemma Terms of Use"),
)
_FRONT_MATTER = re.compile(r"\A---\n.*?^license:\s*(\S+)\s*$.*?^---$", re.MULTILINE | re.DOTALL)
_HEAD_CHARACTERS = 500
# On a processor the KV cache is the pod's own memory. The plan may have taken most of the build machine's.
_KV_BYTES_ON_CPU = 2 << 30


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """`config` is the model's config.json, `max_model_len` the session length in tokens.

    kv_blocks, kv_bytes: the KV cache that a replica reserves; None on a GPU, where it takes its share of
    the card.
    """

    config: Mapping[str, Any]
    hardware: Hardware
    max_model_len: int | None
    kv_blocks: int | None = None
    kv_bytes: int | None = None

    @classmethod
    def read(cls, engine: Artifact) -> EngineFacts:
        """Raises DataError `engine-damaged`."""
        about = _json(engine.file(_ENGINE))
        device = about.get("device", {})
        is_gpu = device.get("kind") == "cuda"
        hardware = Hardware(
            name=str(device.get("name", "unknown")),
            gpus=int(about.get("tp", 1)) if is_gpu else 0,
            cores=int(device.get("cores", 0)),
        )
        blocks = None if is_gpu else _kv_blocks(about.get("plan", {}))
        return cls(
            config=_json(engine.file(_CONFIG)),
            hardware=hardware,
            max_model_len=about.get("max_model_len"),
            kv_blocks=blocks,
            kv_bytes=None if blocks is None else blocks * about["plan"]["block_bytes"],
        )


def licence_of(model: Path) -> str:
    """The licence that a checkpoint states: an SPDX id or a name; empty when it states none."""
    for card in (model / "README.md", model / "MODEL_CARD.md"):
        if card.is_file() and (match := _FRONT_MATTER.search(card.read_text("utf-8", "replace"))):
            return match[1]
    for path in sorted(p for p in model.glob("LICENSE*") if p.is_file()):
        head = path.read_text("utf-8", "replace")[:_HEAD_CHARACTERS]
        return next((name for mark, name in _LICENCES if mark in head), path.name)
    return ""


def _kv_blocks(plan: Mapping[str, Any]) -> int | None:
    """As many KV blocks as the plan has or fit the bound, but enough for one session of full length."""
    if not plan.get("block_bytes"):
        return None
    session = -(-plan["max_model_len"] // plan["block_size"])
    return int(min(plan["num_blocks"], max(session, _KV_BYTES_ON_CPU // plan["block_bytes"])))


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            "engine-damaged", f"{path} cannot be read", why=str(error), hint="build the engine again"
        ) from error
    return found
