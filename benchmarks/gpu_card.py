"""What the card does while something runs: clock, power, what holds its clock down. Reads, sets nothing."""

from __future__ import annotations

import statistics
import threading
import time
from types import TracebackType

import pynvml

_INTERVAL_S = 0.01
_POWER_CAP = 0x4
"""NVML's bit for "the power limit holds the clock down"."""


class Watch:
    """Samples the first card from a thread of its own between `with` and its end.

    After it: `clock_mhz` and `power_w`, medians without the first `skip` of the time; `capped`, the share of
    samples at which the power limit held the clock down.
    """

    def __init__(self, skip: float = 0.2) -> None:
        pynvml.nvmlInit()
        self._skip = skip
        self._card = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._samples: list[tuple[int, float, bool]] = []
        self._ended = threading.Event()
        self.clock_mhz, self.power_w, self.capped, self.seconds = 0.0, 0.0, 0.0, 0.0

    def __enter__(self) -> Watch:
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.seconds = time.perf_counter() - self._began
        late = self._samples[int(len(self._samples) * self._skip) :] or [(0, 0.0, False)]
        self.clock_mhz = statistics.median(clock for clock, _, _ in late)
        self.power_w = statistics.median(power for _, power, _ in late)
        self.capped = sum(capped for _, _, capped in late) / len(late)

    def __str__(self) -> str:
        return f"{self.clock_mhz:.0f} MHz, {self.power_w:.0f} W, power limit at {self.capped:.0%} of samples"

    def _run(self) -> None:
        reasons = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or pynvml.nvmlDeviceGetCurrentClocksThrottleReasons
        while not self._ended.wait(_INTERVAL_S):
            clock = pynvml.nvmlDeviceGetClockInfo(self._card, pynvml.NVML_CLOCK_SM)
            self._samples.append((clock, self._power_w(), bool(reasons(self._card) & _POWER_CAP)))

    def _power_w(self) -> float:
        field = getattr(pynvml, "NVML_FI_DEV_POWER_INSTANT", 186)
        value = pynvml.nvmlDeviceGetFieldValues(self._card, [field])[0]
        if value.nvmlReturn == pynvml.NVML_SUCCESS:
            return float(value.value.uiVal) / 1000
        return float(pynvml.nvmlDeviceGetPowerUsage(self._card)) / 1000
