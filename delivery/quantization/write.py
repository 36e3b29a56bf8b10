"""Write a quantised checkpoint, and verify it: unchanged tensors, finite scales, bits per weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from delivery.checkpoint import Checkpoint, CheckpointWriter
from delivery.checkpoint.verify import verify_export
from delivery.errors import DataError
from delivery.quantization.export import replaced_names
from delivery.quantization.plan import ModelPlan
from delivery.quantization.resume import LayerStore

if TYPE_CHECKING:
    import torch

_SLACK_BITS = 0.5
_NOT_WEIGHTS = ("bias", "g_idx", "weight_g_idx", "weight_shape", "input_scale", "k_scale", "v_scale")


def write_checkpoint(
    source: Checkpoint,
    plan: ModelPlan,
    store: LayerStore,
    layers: int,
    quantization: Mapping[str, Any],
    out: Path,
    shard_bytes: int,
    extra: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Carry over what did not change, then the layers from the store one by one; the config last.

    extra: tensors from outside the layers that replace the source's (a quantised embedding).
    Raises DataError: what `CheckpointWriter` and `verify_export` raise.
    """
    replaced = replaced_names(plan.targets)
    if plan.embedding is not None:
        replaced.add(f"{plan.embedding.prefix}.weight")
    changed = {n for layer in range(layers) for n in store.report(layer)["tensors"]}
    carried = [name for name in source.names() if name not in replaced and name not in changed]
    with CheckpointWriter(out, shard_bytes) as writer:
        writer.copy_files(source)
        for name in carried:
            writer.add(name, source.tensor(name))
        for name, tensor in extra.items():
            writer.add(name, tensor)
        for layer in range(layers):
            for name, tensor in store.tensors(layer).items():
                writer.add(name, tensor)
        writer.finish({**source.config, "quantization_config": dict(quantization)})
    verify_export(out, source, carried)


def check_bits(out: Path, plan: ModelPlan, expected: float) -> float:
    """Stored bits per quantised weight, read from the headers of what was written.

    expected: from the QTensors themselves. Raises DataError `bits-per-weight` when more than half a bit
    was written on top, which means that a layer was stored in another form than it was planned in.
    """
    written = Checkpoint.open(out)
    elements = size_bytes = 0
    prefixes = set()
    for target in plan.targets:
        if target.planned is not None:
            elements += target.rows * target.columns
            prefixes.add(target.stored)
    for name in written.names():
        prefix, _, kind = name.rpartition(".")
        if prefix in prefixes and kind not in _NOT_WEIGHTS:
            size_bytes += written.info(name).size_bytes
    bits = 8 * size_bytes / elements
    if bits > expected + _SLACK_BITS or bits < 1:
        raise DataError(
            "bits-per-weight",
            f"{out} holds {bits:.2f} bits per quantised weight",
            why=f"expected {expected:.2f} from what was quantised",
            hint="this is a bug in the export; please report it with layers.json",
        )
    return bits
