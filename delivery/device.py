"""Devices: which one to use, and the *device fingerprint* that decides what may be compared.

No torch here: the gate and the pipeline read fingerprints too.
"""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from delivery.artifact import canonical_json
from delivery.errors import EnvironmentLacking, UsageError, did_you_mean

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class DeviceFingerprint:
    """What a measurement depends on. Two are comparable when they are equal.

    `memory_bytes` is the GPU's memory, 0 on a CPU; `cores` the processors this process may use.
    """

    kind: str
    name: str
    memory_bytes: int = 0
    cores: int = 0
    driver: str = ""
    mig: str = ""
    power_limit_w: int = 0

    @property
    def slug(self) -> str:
        """A short file name: the device's name and eight digits of the fingerprint's SHA-256."""
        digest = hashlib.sha256(canonical_json(asdict(self)).encode()).hexdigest()[:8]
        words = "".join(c if c.isalnum() else "-" for c in self.name.lower()).split("-")
        return "-".join([*[w for w in words if w][:5], digest])


def resolve_device(device: str) -> str:
    """'cpu' or 'cuda' for 'auto', 'cpu' or 'cuda'.

    Raises UsageError `unknown-device`, EnvironmentLacking `no-gpu`.
    """
    if device not in DEVICES:
        raise UsageError("unknown-device", f"unknown device {device!r}", hint=did_you_mean(device, DEVICES))
    if device == "cpu":
        return "cpu"
    if gpu_count() > 0:
        return "cuda"
    if device == "cuda":
        raise EnvironmentLacking(
            "no-gpu",
            "no NVIDIA GPU can be used",
            why="NVML found no device",
            hint="deliver doctor; or --device cpu",
        )
    return "cpu"


@cache
def gpu_count() -> int:
    """Number of NVIDIA GPUs that NVML sees; 0 without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


@cache
def compute_capability() -> tuple[int, int] | None:
    """(major, minor) of the first GPU; None where there is none."""
    import pynvml

    if not gpu_count():
        return None
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    return int(major), int(minor)


@cache
def fingerprint(device: str) -> DeviceFingerprint:
    """The fingerprint of the first GPU ('cuda') or of the processor ('cpu')."""
    return _gpu_fingerprint() if resolve_device(device) == "cuda" else _cpu_fingerprint()


def usable_cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_fingerprint() -> DeviceFingerprint:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = (line.partition(":") for line in info.read_text("utf-8").splitlines())
        name = next((value.strip() for key, _, value in fields if key.strip() == "model name"), name)
    return DeviceFingerprint(kind="cpu", name=name, cores=usable_cores())


def _gpu_fingerprint() -> DeviceFingerprint:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    mig, power_limit_w = "", 0
    try:
        mig = "mig" if pynvml.nvmlDeviceGetMigMode(handle)[0] else ""
    except pynvml.NVMLError:
        pass  # not every card has the mode
    try:
        power_limit_w = int(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)) // 1000
    except pynvml.NVMLError:
        pass
    return DeviceFingerprint(
        kind="cuda",
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        driver=str(pynvml.nvmlSystemGetDriverVersion()),
        mig=mig,
        power_limit_w=power_limit_w,
    )
