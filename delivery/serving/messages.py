"""What the server process and the engine process say to each other: these types and no others.

Messages travel pickled over a pipe between a process and the child that it spawned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivery.engine.outputs import EngineStats, RequestOutput
    from delivery.engine.request import SamplingParams
    from delivery.errors import DeliverError


# To the engine


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a request. `priority` −1 is the highest, then 0, then 1."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """The client is gone, or does not want the rest: free the request's blocks."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish nothing more and end the process."""


ToEngine = Submit | Abort | Stop


# From the engine


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded. `load_s` is the seconds that took."""

    load_s: float
    stats: EngineStats
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of one step, and the engine's state after it."""

    outputs: tuple[RequestOutput, ...]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be run, with the reason for its client."""

    request_id: str
    error: DeliverError


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot go on; the process ends after this."""

    error: DeliverError


FromEngine = Ready | Outputs | Refused | Failed
