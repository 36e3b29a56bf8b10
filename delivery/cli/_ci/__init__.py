"""CI definitions made from a pipeline file, one template per system."""

from delivery.cli._ci.definition import SYSTEMS, CiOptions, render_ci

__all__ = ["SYSTEMS", "CiOptions", "render_ci"]
