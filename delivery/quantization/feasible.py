"""Whether a checkpoint can be quantised as requested, from its config and headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivery.errors import DataError, UsageError
from delivery.formats import check_export, load_format
from delivery.model import load_config
from delivery.quantization.embedding import check_embedding_format
from delivery.quantization.scheme import load_scheme
from delivery.quantization.session import plan_for_format

if TYPE_CHECKING:
    from delivery.checkpoint.outline import Outline
    from delivery.quantization.plan import ModelPlan, Wishes


def check_float(checkpoint: Outline) -> None:
    """Raises DataError `already-quantised`."""
    if checkpoint.quantization is not None:
        raise DataError(
            "already-quantised",
            "the checkpoint is already quantised",
            why=f"its config names quant_method {checkpoint.quantization.get('quant_method')!r}",
            hint="quantise the float checkpoint that it was made from",
        )


def feasible_plan(
    checkpoint: Outline, wishes: Wishes, form: str, kv: str | None, *, calibrated: bool, tuned: bool
) -> tuple[ModelPlan, str]:
    """The plan, and the name of a format that can represent it.

    form: a format's name, or 'auto' for the scheme's usual one. calibrated: there is calibration data.
    tuned: blocks are to be fine-tuned on it.
    Raises UsageError `recipe`, `nothing-to-quantise`, `format-refuses`, `calibration-needed`.
    """
    name = load_scheme(wishes.scheme).formats[0] if form == "auto" else form
    check_embedding_format(wishes.options, name)
    plan = plan_for_format(checkpoint, load_config(checkpoint.config), wishes, load_format(name), kv)
    check_export(name, plan.prototypes(wishes.options), kv)
    needing = [f"scheme {s.name!r}" for s in plan.schemes() if s.needs(wishes.options)]
    needing += ["--kv"] if kv else []
    needing += ["--qat"] if tuned else []
    if needing and not calibrated:
        raise UsageError(
            "calibration-needed",
            f"{needing[0]} needs calibration data",
            why="it looks at activations",
            hint="deliver calibrate --checkpoint DIR --out CAL, then --calibration CAL; or rtn-w4a16",
        )
    return plan, name
