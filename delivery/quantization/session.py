"""One model through the driver, layer by layer, with everything kept that a kill must not lose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from delivery.quantization.driver import BlockResult, Driver
from delivery.quantization.export import block_tensors
from delivery.quantization.plan import ModelPlan, Wishes, make_plan
from delivery.quantization.resume import LayerStore

if TYPE_CHECKING:
    from delivery.checkpoint import Checkpoint
    from delivery.model import ModelConfig


@dataclass(frozen=True, slots=True)
class LayersReport:
    """What layers.json holds: a row per linear layer, a row per block, and sentences."""

    rows: list[dict[str, Any]]
    blocks: list[dict[str, Any]]
    notes: list[str]

    @property
    def bits_per_weight(self) -> float:
        """Over all quantised weights, scales and zero points counted."""
        elements = sum(r["rows"] * r["columns"] for r in self.rows)
        return float(sum(r["bits_per_weight"] * r["rows"] * r["columns"] for r in self.rows) / elements)

    def worst(self) -> dict[str, Any]:
        """The row with the largest relative error."""
        return max(self.rows, key=lambda r: r["relative_error"])


def quantize_layers(
    driver: Driver,
    plan: ModelPlan,
    store: LayerStore,
    format_module: Any,
    after: Callable[[int, BlockResult | None], None],
) -> None:
    """Run the driver over every block that the store does not hold, and keep each in it.

    after: called with the number of layers that are done and the result (None for those found done).
    """
    layers = driver.config.num_layers
    first = store.resume(driver.stream)
    after(first, None)
    for layer in range(first, layers):
        result = driver.quantize_block(layer)
        tensors = block_tensors(result, plan.of_layer(layer), format_module)
        report = {
            "rows": [e.row() for e in result.errors],
            "block_relative_error": result.block_relative,
            "notes": result.notes,
            "tensors": sorted(tensors),
        }
        store.put(layer, tensors, report, driver.stream)
        after(layer + 1, result)


def layers_report(store: LayerStore, layers: int) -> LayersReport:
    """Gather the reports of all layers."""
    reports = [store.report(layer) for layer in range(layers)]
    return LayersReport(
        rows=[row for r in reports for row in r["rows"]],
        blocks=[{"layer": i, "relative_error": r["block_relative_error"]} for i, r in enumerate(reports)],
        notes=[note for r in reports for note in r["notes"]],
    )


def plan_for_format(
    checkpoint: Checkpoint,
    config: ModelConfig,
    wishes: Wishes,
    format_module: Any,
    kv: str | None,
) -> ModelPlan:
    """A plan that the format can hold: group sizes per layer, else one size for all layers.

    The second is tried only where the user asked for one size himself; what the format then still
    refuses is left to `check_export` to say.
    """

    def shape(name: str) -> tuple[int, ...]:
        return checkpoint.info(name).shape

    symmetric = wishes.options.symmetric
    plan = make_plan(config, checkpoint, shape, wishes)
    if not wishes.options.group_sizes.uniform or _fits(plan, symmetric, format_module, kv):
        return plan
    single = make_plan(config, checkpoint, shape, replace(wishes, single_size=True))
    return single if _fits(single, symmetric, format_module, kv) else plan


def _fits(plan: ModelPlan, symmetric: bool, format_module: Any, kv: str | None) -> bool:
    return format_module.why_not_all(plan.prototypes(symmetric), kv) is None
