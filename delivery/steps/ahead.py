"""What is known about a step before it runs: its inputs, which may not exist yet, and its peak memory."""

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
    """Predicted peak memory of a step, in bytes.

    host_bytes: resident memory of its processes. gpu_bytes: their GPU memory; 0 if no GPU is used.
    """

    host_bytes: int
    gpu_bytes: int = 0


class Ahead:
    """What is known about an input before the step runs; the input itself may not exist yet.

    step: name of the step that makes it. params: parameters of that step. path: its folder; None until it
    exists. predict: returns the outline that the step will produce, if it can be predicted.
    """

    def __init__(
        self,
        step: str,
        params: Mapping[str, Any],
        path: Path | None = None,
        predict: Callable[[], Outline | None] = lambda: None,
    ) -> None:
        self.step = step
        self.params = params
        self.path = path
        self._predict = predict

    @cached_property
    def outline(self) -> Outline | None:
        """Config and headers of a checkpoint: read from its folder, or predicted by its step.

        None if they are not known yet. Raises what opening a checkpoint raises.
        """
        if self.path is not None:
            from delivery.checkpoint import Checkpoint

            return Checkpoint.open(self.path)
        return self._predict()


# Role → what is known about its artifacts; unbound roles are absent.
Known = Mapping[str, Sequence[Ahead]]


def outline_of(inputs: Known, role: str) -> Outline | None:
    """The outline of the checkpoint bound to a role; None if unbound or unknown."""
    found = inputs.get(role, ())
    return found[0].outline if found else None


def path_of(inputs: Known, role: str) -> Path | None:
    """The folder of the artifact bound to a role; None if unbound or not made yet."""
    found = inputs.get(role, ())
    return found[0].path if found else None


def config_of(outline: Outline | None) -> ModelConfig | None:
    """The config of a checkpoint, without torch; None if it is not known yet."""
    from delivery.model.families import family_for

    return None if outline is None else family_for(outline.config).config(outline.config)
