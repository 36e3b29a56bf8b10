"""Run one model through the driver layer by layer, and keep each result so that a killed run can resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from delivery.model import block, load_block
from delivery.quantization.driver import BlockResult, Driver
from delivery.quantization.export import block_tensors
from delivery.quantization.plan import ModelPlan, Wishes, make_plan
from delivery.quantization.qat import Loss, Tuned, Tuning, refine
from delivery.quantization.resume import LayerStore
from delivery.quantization.running import in_dtype

if TYPE_CHECKING:
    from delivery.checkpoint.outline import Outline
    from delivery.model import ModelConfig
    from delivery.quantization.stream import Stream


@dataclass(frozen=True, slots=True)
class Tail:
    """Fine-tune the last `blocks` blocks. loss: None for the distance to the float model."""

    blocks: int
    tuning: Tuning = field(default_factory=Tuning)
    loss: Loss | None = None


def quantize_layers(
    driver: Driver,
    plan: ModelPlan,
    store: LayerStore,
    format_module: Any,
    after: Callable[[int, BlockResult | None], None],
    tail: Tail | None = None,
) -> Tuned | None:
    """Run the driver over every block that the store does not hold, and keep each in it.

    after: called with the number of layers that are done and the result (None for those found done).
    tail: fine-tune the last blocks; they are done again when a run is resumed. Gives what that achieved.
    """
    layers = driver.config.num_layers
    start = layers - tail.blocks if tail else layers
    target = driver.stream.copy() if tail and driver.stream else None
    first = store.resume(driver.stream)
    after(first, None)
    for layer in range(first if target else 0):
        _float_block(driver, target, layer)
    before: Stream | None = None
    results: list[BlockResult] = []
    for layer in range(first, layers):
        if target:
            _float_block(driver, target, layer)
        if layer == start and driver.stream:
            before = driver.stream.copy()
        result = driver.quantize_block(layer)
        if layer >= start:
            results.append(result)
        else:
            _keep(store, plan, result, format_module, driver.stream)
        after(layer + 1, result)
    if not (tail and before and target):
        return None
    weights = [load_block(driver.source, driver.config, r.layer, driver.device) for r in results]
    tuned = refine(driver.config, results, weights, before, target, driver.dtype, tail.tuning, tail.loss)
    for result in results:
        result.notes.append(f"block {result.layer} was fine-tuned; its layers' errors are those before")
        _keep(store, plan, result, format_module, driver.stream, final=False)
    return tuned


def _keep(
    store: LayerStore,
    plan: ModelPlan,
    result: BlockResult,
    format_module: Any,
    stream: Stream | None,
    *,
    final: bool = True,
) -> None:
    tensors = block_tensors(result, plan.of_layer(result.layer), format_module)
    report = {
        "rows": [e.row() for e in result.errors],
        "block_relative_error": result.block_relative,
        "notes": result.notes,
        "tensors": sorted(tensors),
    }
    store.put(result.layer, tensors, report, stream, final=final)


@torch.no_grad()
def _float_block(driver: Driver, stream: Stream | None, layer: int) -> None:
    assert stream is not None
    weights = in_dtype(load_block(driver.source, driver.config, layer, driver.device), driver.dtype)
    for piece, hidden in stream.run():
        stream.put(piece, block(driver.config, layer, weights, hidden, piece.positions, piece.mixer))


def plan_for_format(
    checkpoint: Outline,
    config: ModelConfig,
    wishes: Wishes,
    format_module: Any,
    kv: str | None,
) -> ModelPlan:
    """A plan that the format can hold: group sizes per layer, else one size for all layers.

    The second is tried only where the user asked for one size himself; what the format then still
    refuses is left to `check_export` to say.
    """
    shape = checkpoint.shape
    wishes = replace(wishes, weights=tuple(n for n in checkpoint.names() if len(shape(n)) == 2))
    plan = make_plan(config, checkpoint, shape, wishes)
    if not wishes.options.group_sizes.uniform or _fits(plan, wishes, format_module, kv):
        return plan
    single = make_plan(config, checkpoint, shape, replace(wishes, single_size=True))
    return single if _fits(single, wishes, format_module, kv) else plan


def _fits(plan: ModelPlan, wishes: Wishes, format_module: Any, kv: str | None) -> bool:
    return format_module.why_not_all(plan.prototypes(wishes.options), kv) is None
