"""What is known of a step before it runs: its inputs, which may not be there yet, and the memory it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.checkpoint.outline import Outline
    from delivery.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a step takes, foretold, in bytes.

    host_bytes: resident memory of its processes. gpu_bytes: what they hold of a GPU; 0 where none computes.
    """

    host_bytes: int
    gpu_bytes: int = 0


class Ahead:
    """An input as far as it is known before the step runs, which may be before the input is there.

    step: name of the step that makes it. params: what that step is told. path: its folder; None while it
    is not there.
    """

    def __init__(
        self,
        step: str,
        params: Mapping[str, Any],
        path: Path | None = None,
        foretell: Callable[[], Outline | None] = lambda: None,
    ) -> None:
        self.step = step
        self.params = params
        self.path = path
        self._foretell = foretell

    @cached_property
    def outline(self) -> Outline | None:
        """Config and headers of a checkpoint, as it lies there or as its step foretells it.

        None where they are not known yet. Raises what opening a checkpoint raises.
        """
        if self.path is not None:
            from delivery.checkpoint import Checkpoint

            return Checkpoint.open(self.path)
        return self._foretell()


# Role → what is known of its artifacts; a role that is bound to nothing is missing.
Known = Mapping[str, Sequence[Ahead]]


def outline_of(inputs: Known, role: str) -> Outline | None:
    """The outline of the one checkpoint in a role; None where it is not bound or not known."""
    found = inputs.get(role, ())
    return found[0].outline if found else None


def path_of(inputs: Known, role: str) -> Path | None:
    """The folder of the one artifact in a role; None where it is not bound or not there."""
    found = inputs.get(role, ())
    return found[0].path if found else None


def config_of(outline: Outline | None) -> ModelConfig | None:
    """The config of a checkpoint, without torch; None where nothing is known of it yet."""
    from delivery.model.families import family_for

    return None if outline is None else family_for(outline.config).config(outline.config)
