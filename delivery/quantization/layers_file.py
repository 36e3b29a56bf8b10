"""layers.json: how every linear layer was quantised, stored next to the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivery.errors import DataError
from delivery.quantization.write import check_bits

if TYPE_CHECKING:
    from delivery.quantization.plan import ModelPlan
    from delivery.quantization.resume import LayerStore

LAYERS = "layers.json"


@dataclass(frozen=True, slots=True)
class LayersReport:
    """A row per linear layer, a row per block, and sentences. stored_bits: per weight, as written."""

    rows: list[dict[str, Any]]
    blocks: list[dict[str, Any]]
    notes: list[str]
    stored_bits: float

    def worst(self) -> dict[str, Any]:
        """The row with the largest relative error."""
        return max(self.rows, key=lambda r: r["relative_error"])

    def check(self, limit: float) -> None:
        """Raises DataError `layer-error` where a layer's relative error is over the limit; 0: none is."""
        worst = self.worst()
        if limit and worst["relative_error"] > limit:
            raise DataError(
                "layer-error",
                f"{worst['name']} was quantised with a relative error of {worst['relative_error']:.3f}",
                why=f"the limit is {limit:g}",
                hint="a smaller --group-size, --clip, or leave the layer alone with --skip",
            )


def write_layers(
    out: Path, plan: ModelPlan, store: LayerStore, layers: int, scheme: str, form: str
) -> LayersReport:
    """Gather the reports of all layers into `out`, which holds the checkpoint already.

    Raises DataError `bits-per-weight`.
    """
    reports = [store.report(layer) for layer in range(layers)]
    rows = [row for r in reports for row in r["rows"]]
    notes = [note for r in reports for note in r["notes"]]
    bits = check_bits(out, plan, _bits_per_weight(rows))
    blocks = [{"layer": i, "relative_error": r["block_relative_error"]} for i, r in enumerate(reports)]
    content = {
        "scheme": scheme,
        "format": form,
        "bits_per_weight": round(bits, 4),
        "layers": rows,
        "blocks": blocks,
        "notes": [*plan.notes(), *notes],
    }
    (out / LAYERS).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return LayersReport(rows, blocks, notes, bits)


def read_layers(checkpoint: Path) -> list[dict[str, Any]]:
    """The rows of a checkpoint's layers; [] where it has none."""
    path = checkpoint / LAYERS
    return list(json.loads(path.read_text("utf-8"))["layers"]) if path.is_file() else []


def _bits_per_weight(rows: list[dict[str, Any]]) -> float:
    """Over all quantised weights, scales and zero points counted."""
    elements = sum(r["rows"] * r["columns"] for r in rows)
    return float(sum(r["bits_per_weight"] * r["rows"] * r["columns"] for r in rows) / elements)
