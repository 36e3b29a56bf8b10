"""How much the inputs of a step take and hold, foretold from configs and headers: bytes, tokens. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from delivery.engine import foresee
from delivery.engine.options import EngineOptions
from delivery.steps.ahead import Ahead, Known, Peak, config_of, outline_of

if TYPE_CHECKING:
    from delivery.engine.foresee import Loaded
    from delivery.model import ModelConfig

_BUILT = ("max_num_seqs", "max_num_batched_tokens", "kv")
"""Parameters of build that decide how much memory its engine takes, named as the engine names them."""


def loaded(inputs: Known, role: str, kv_tokens: int, device: str = "cpu", **options: Any) -> Loaded | None:
    """About what the engine or checkpoint in a role takes once it is loaded; None where it is not known.

    options: engine options that go before those that the engine was built with.
    """
    outline = outline_of(inputs, role)
    config = config_of(outline)
    if outline is None or config is None:
        return None
    ahead, engine = inputs[role][0], role.endswith("engine")
    # Of an engine that is still to be built, the outline is its checkpoint's.
    packed = engine and ahead.path is not None
    told = ahead.params if engine else {}
    built = {name: told[name] for name in _BUILT if told.get(name)}
    length = min(kv_tokens, options.get("max_model_len") or config.max_position)
    return foresee.loaded(
        config,
        outline.size_bytes(),
        device=device,
        kv_tokens=kv_tokens,
        options=EngineOptions.of({**built, **options, "max_model_len": length}),
        plain=not packed and outline.quantization is None,
    )


def with_runtime(needed: Loaded, device: str, processes: int = 1) -> Peak:
    """The same with what every process takes by itself."""
    if device == "cpu":
        return Peak(processes * foresee.CPU_RUNTIME_BYTES + needed.host_bytes)
    return Peak(
        processes * foresee.HOST_RUNTIME_BYTES + needed.host_bytes,
        processes * foresee.GPU_RUNTIME_BYTES + needed.gpu_bytes,
    )


def packing(stored_bytes: int) -> Peak:
    """Of building on a CPU: the weights as they are stored, and packed."""
    return Peak(foresee.CPU_RUNTIME_BYTES + 2 * stored_bytes)


def card_bytes() -> int | None:
    """Memory of the first GPU; None where there is none."""
    from delivery.device import fingerprint, gpu_count

    return fingerprint("cuda").memory_bytes if gpu_count() else None


def layer_by_layer(config: ModelConfig, tokens: int, longest: int, *, gram: bool, device: str) -> Peak:
    """Peak of walking through a model block by block; arguments as `quantization.memory` takes them."""
    from delivery.quantization.memory import block_bytes, predict_peak_bytes

    computed = predict_peak_bytes(config, tokens, longest, gram=gram, device=device)
    if device == "cpu":
        return Peak(computed)
    return Peak(foresee.HOST_RUNTIME_BYTES + block_bytes(config), foresee.GPU_RUNTIME_BYTES + computed)


def sizes_of(calibration: Sequence[Ahead]) -> tuple[int, int]:
    """(tokens, longest sample) of a calibration that is there; of one to come, what its step is told."""
    if not calibration:
        return 0, 0
    ahead = calibration[0]
    if ahead.path is not None:
        found = json.loads((ahead.path / "calibration.json").read_text("utf-8"))
        return int(found["tokens"]), int(found["sample_tokens"]["max"])
    longest = int(ahead.params["sequence_length"])
    return int(ahead.params["samples"]) * longest, longest


def longest(inputs: Known) -> tuple[str, int] | None:
    """What bounds the tokens of a request to the engines and the source, in words, and the bound.

    None where none of them is known.
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
    """Input plus output tokens that an engine holds; of one to come, what build is told. None if unknown."""
    if engine.path is None:
        return engine.params.get("max_session_len") or None
    about = engine.path / "engine.json"
    return json.loads(about.read_text("utf-8")).get("max_model_len") if about.is_file() else None
