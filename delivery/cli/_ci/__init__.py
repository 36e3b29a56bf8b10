"""CI definitions made from a pipeline file, one template per system."""

from delivery.cli._ci.definition import SYSTEMS, CiOptions, render_ci
from delivery.cli._ci.package import own_package

__all__ = ["SYSTEMS", "CiOptions", "own_package", "render_ci"]
