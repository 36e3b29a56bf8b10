"""Reading a smoke suite's file. Apart from the schema, so that judging needs no YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivery.errors import UsageError
from delivery.gate.outputs.suite import Suite, parse_suite

if TYPE_CHECKING:
    from pathlib import Path


def read_suite(path: Path) -> Suite:
    """The suite in a YAML (1.2) or JSON file. Raises UsageError `bad-suite`."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        data = YAML(typ="safe", pure=True).load(path.read_text("utf-8"))
    except (YAMLError, OSError, ValueError) as error:  # ValueError: not UTF-8, or a day like 2026-02-30
        raise UsageError("bad-suite", f"{path} cannot be read", why=str(error)) from error
    return parse_suite(data, str(path))
