"""What the gate measured, as far as a release needs it: start-up time, throughput, memory, limits.

Everything here is read from reports; a value that no report holds is None, and the chart says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delivery.gate.report import Report

# A disk cache that is warm when the gate measures is cold on a fresh node.
_COLD_START_FACTOR = 5
_STARTUP_FLOOR_S = 60
_STARTUP_UNKNOWN_S = 1800
_STARTUP_PERIOD_S = 5
# A queue that one replica works off within this time needs no further replica.
_QUEUE_WAIT_S = 2.0
_MEMORY_MARGIN = 1.25
_MIB = 1 << 20
_GIB = 1 << 30
_SERVER_BYTES = 512 * _MIB
_MEMORY_STEP_MIB = 256


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured values by meaning, in their units; None where no report has them."""

    load_s: float | None = None
    process_bytes: float | None = None
    """Of the engine's process, on a processor with `kv_bytes` of KV cache; on a GPU, of the card's memory."""
    kv_bytes: float | None = None
    output_tokens_per_s: float | None = None
    requests_per_s: float | None = None

    @classmethod
    def of(cls, reports: Iterable[Report], runtime: str = "") -> Measured:
        """The values of all reports but those about another runtime; of a metric in two, the last one's."""
        about = [r for r in reports if not runtime or r.details.get("runtime", runtime) == runtime]
        values = {m.name: m.value for report in about for m in report.metrics}
        return cls(
            load_s=values.get("load_s"),
            process_bytes=values.get("process_bytes"),
            kv_bytes=values.get("kv_bytes"),
            output_tokens_per_s=values.get("output_throughput"),
            requests_per_s=values.get("request_throughput"),
        )

    def startup(self) -> tuple[int, int, str]:
        """(period in s, failures allowed, why) of the startup probe."""
        if self.load_s is None:
            budget_s = _STARTUP_UNKNOWN_S
            why = f"the load time was not measured, so {budget_s} s."
        else:
            budget_s = max(_STARTUP_FLOOR_S, math.ceil(self.load_s * _COLD_START_FACTOR))
            why = (
                f"loading took {self.load_s:.1f} s; {_COLD_START_FACTOR} times that, "
                f"at least {_STARTUP_FLOOR_S} s."
            )
        return _STARTUP_PERIOD_S, math.ceil(budget_s / _STARTUP_PERIOD_S), why

    def waiting_requests(self) -> tuple[int, str]:
        """(requests waiting per replica that call for another one, why)."""
        if self.requests_per_s is None:
            return 10, "The throughput was not measured: 10 waiting requests a replica is a guess."
        waiting = max(1, math.floor(self.requests_per_s * _QUEUE_WAIT_S))
        why = f"One replica answered {self.requests_per_s:.2f} requests/s: a queue of {_QUEUE_WAIT_S:g} s."
        return waiting, why

    def memory_mib(self, model_bytes: int, kv_bytes: int | None, shm_mib: int) -> int:
        """Host memory that a replica needs, with a margin.

        On a processor (kv_bytes is given): what the engine's process took when it was measured, with the
        KV cache that will be served. On a GPU the measured memory is the card's, so twice the model and
        1 GiB. The HTTP server's own process and /dev/shm come on top.
        """
        if self.process_bytes is None or kv_bytes is None:
            needed = 2.0 * model_bytes + _GIB + (kv_bytes or 0)
        else:
            needed = self.process_bytes - (self.kv_bytes or 0.0) + kv_bytes
        mib = (needed + _SERVER_BYTES) * _MEMORY_MARGIN / _MIB + shm_mib
        return math.ceil(mib / _MEMORY_STEP_MIB) * _MEMORY_STEP_MIB
