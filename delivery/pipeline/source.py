"""A strict YAML 1.2 reader that keeps the line of every value; duplicate keys and tags are refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from delivery.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

Place = tuple[str | int, ...]
_PREFIX = "tag:yaml.org,2002:"


@dataclass
class Document:
    """Plain data and line numbers: `lines` maps a path such as ('steps', 2, 'with') to a line."""

    data: Any
    name: str
    lines: dict[Place, int] = field(default_factory=dict)
    origins: dict[Place, str] = field(default_factory=dict)
    """Values that came from an option instead of the file, with the option."""

    def where(self, place: Place) -> str:
        """`file:line` of a value, or of the innermost enclosing value that is in the file."""
        for end in range(len(place), -1, -1):
            if place[:end] in self.origins:
                return self.origins[place[:end]]
            if place[:end] in self.lines:
                return f"{self.name}:{self.lines[place[:end]]}"
        return self.name


def read_yaml(path: Path) -> Document:
    """The document in `path`.

    Raises UsageError `pipeline-not-found`, `yaml-invalid`, `yaml-duplicate-key`.
    """
    try:
        text = path.read_text("utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UsageError(
            "pipeline-not-found",
            f"there is no pipeline file {path}",
            why=error.strerror or "",
            hint="deliver init writes a commented one",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError("yaml-invalid", f"{path} is not UTF-8 text", why=str(error)) from error
    return _compose(text, str(path))


def parse_text(text: str, name: str) -> Any:
    """The plain data of a piece of YAML. Raises UsageError as `read_yaml` does."""
    return _compose(text, name).data


def _compose(text: str, name: str) -> Document:
    yaml = YAML(typ="safe", pure=True)
    try:
        node = yaml.compose(text)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError("yaml-invalid", f"{name}{line} is not YAML", why=str(error.problem)) from error
    except YAMLError as error:
        raise UsageError("yaml-invalid", f"{name} is not YAML", why=str(error)) from error
    document = Document(None, name)
    document.data = _Builder(document, yaml).build(node, ()) if node is not None else None
    return document


class _Builder:
    def __init__(self, document: Document, yaml: Any) -> None:
        self._document = document
        self._yaml = yaml
        self._open: list[int] = []

    def build(self, node: Node, place: Place) -> Any:
        self._document.lines[place] = node.start_mark.line + 1
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            raise UsageError("yaml-invalid", f"{self._here(node)}: an alias contains itself")
        self._open.append(id(node))
        built = (
            self._mapping(node, place)
            if isinstance(node, MappingNode)
            else [self.build(item, (*place, i)) for i, item in enumerate(node.value)]
        )
        self._open.pop()
        return built

    def _mapping(self, node: MappingNode, place: Place) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, ScalarNode) else None
            here = self._here(key_node)
            if key is None or key == "<<":
                raise UsageError("yaml-invalid", f"{here}: a key must be plain text")
            if key in out:
                first = self._document.where((*place, key))
                raise UsageError(
                    "yaml-duplicate-key", f"{here}: duplicate key {key!r}", why=f"first at {first}"
                )
            out[key] = self.build(value_node, (*place, key))
            self._document.lines[(*place, key)] = key_node.start_mark.line + 1
        return out

    def _scalar(self, node: ScalarNode) -> Any:
        kind = str(node.tag).removeprefix(_PREFIX)
        if kind == "timestamp":
            return node.value  # dates are checked where they are expected
        if kind not in ("str", "int", "float", "bool", "null"):
            raise UsageError(
                "yaml-invalid",
                f"{self._here(node)}: the tag {node.tag} is not allowed",
                why="only plain data is allowed",
            )
        value = self._yaml.constructor.construct_object(node, deep=True)
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError("yaml-invalid", f"{self._here(node)}: {node.value} is not a finite number")
        return float(value) if isinstance(value, float) else value

    def _here(self, node: Node) -> str:
        return f"{self._document.name}:{node.start_mark.line + 1}"
