"""Predicted sizes of a step's inputs, in bytes and tokens, from configs and headers. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from delivery.engine import memory_estimate
from delivery.engine.options import EngineOptions
from delivery.steps.ahead import Ahead, Known, Peak, config_of, outline_of

if TYPE_CHECKING:
    from delivery.engine.memory_estimate import Loaded
    from delivery.model import ModelConfig

_BUILT = ("max_num_seqs", "max_num_batched_tokens", "kv")
"""Parameters of build, by the engine's names, that determine the engine's memory."""


def loaded(inputs: Known, role: str, kv_tokens: int, device: str = "cpu", **options: Any) -> Loaded | None:
    """Approximate memory of the engine or checkpoint in a role once it is loaded; None if unknown.

    options: engine options that override those that the engine was built with.
    """
    outline = outline_of(inputs, role)
    config = config_of(outline)
    if outline is None or config is None:
        return None
    ahead, engine = inputs[role][0], role.endswith("engine")
    # For an engine that is not built yet, the outline is its checkpoint's.
    packed = engine and ahead.path is not None
    params = ahead.params if engine else {}
    built = {name: params[name] for name in _BUILT if params.get(name)}
    length = min(kv_tokens, options.get("max_model_len") or config.max_position)
    return memory_estimate.loaded(
        config,
        outline.size_bytes(),
        device=device,
        kv_tokens=kv_tokens,
        options=EngineOptions.of({**built, **options, "max_model_len": length}),
        plain=not packed and outline.quantization is None,
    )


def with_runtime(needed: Loaded, device: str, processes: int = 1) -> Peak:
    """The same plus the fixed overhead of a process."""
    if device == "cpu":
        return Peak(processes * memory_estimate.CPU_RUNTIME_BYTES + needed.host_bytes)
    return Peak(
        processes * memory_estimate.HOST_RUNTIME_BYTES + needed.host_bytes,
        processes * memory_estimate.GPU_RUNTIME_BYTES + needed.gpu_bytes,
    )


def packing(stored_bytes: int) -> Peak:
    """Memory of building on a CPU: the weights as stored, and packed."""
    return Peak(memory_estimate.CPU_RUNTIME_BYTES + 2 * stored_bytes)


def card_bytes() -> int | None:
    """Memory of the first GPU in bytes; None if there is none."""
    from delivery.device import fingerprint, gpu_count

    return fingerprint("cuda").memory_bytes if gpu_count() else None


def layer_by_layer(config: ModelConfig, tokens: int, longest: int, *, gram: bool, device: str) -> Peak:
    """Peak memory of processing a model block by block; arguments as in `quantization.memory`."""
    from delivery.quantization.memory import block_bytes, predict_peak_bytes

    computed = predict_peak_bytes(config, tokens, longest, gram=gram, device=device)
    if device == "cpu":
        return Peak(computed)
    return Peak(
        memory_estimate.HOST_RUNTIME_BYTES + block_bytes(config), memory_estimate.GPU_RUNTIME_BYTES + computed
    )


def sizes_of(calibration: Sequence[Ahead]) -> tuple[int, int]:
    """(tokens, longest sample) of a calibration; from its step's parameters if it is not made yet."""
    if not calibration:
        return 0, 0
    ahead = calibration[0]
    if ahead.path is not None:
        found = json.loads((ahead.path / "calibration.json").read_text("utf-8"))
        return int(found["tokens"]), int(found["sample_tokens"]["max"])
    longest = int(ahead.params["sequence_length"])
    return int(ahead.params["samples"]) * longest, longest


def longest(inputs: Known) -> tuple[str, int] | None:
    """The smallest limit on request tokens among the engines and the source: in words, and as a number.

    None if no limit is known.
    """
    limits: list[tuple[str, int]] = []
    if (source := config_of(outline_of(inputs, "source"))) is not None:
        limits.append(("the source was made for", source.max_position))
    for role, name in (("engine", "the engine"), ("baseline_engine", "the baseline's engine")):
        if not inputs.get(role):
            continue
        if (held := session_len(inputs[role][0])) is not None:
            limits.append((f"{name} was built for", held))
        elif (config := config_of(outline_of(inputs, role))) is not None:
            limits.append((f"{name}'s model was made for", config.max_position))
    return min(limits, key=lambda limit: limit[1], default=None)


def session_len(engine: Ahead) -> int | None:
    """Maximum input plus output tokens of an engine, or of one that is to be built. None if unknown."""
    if engine.path is None:
        return engine.params.get("max_session_len") or None
    about = engine.path / "engine.json"
    return json.loads(about.read_text("utf-8")).get("max_model_len") if about.is_file() else None
