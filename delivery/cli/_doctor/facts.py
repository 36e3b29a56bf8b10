"""What this machine is and has. Gathered here, judged elsewhere."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from delivery.device import usable_cores

_VECTOR_UNITS = ("avx2", "avx512f", "avx512_vnni", "amx_int8", "asimd", "sve")
_TORCH_TIMEOUT_S = 120
_TOOL_TIMEOUT_S = 20
_DISTRIBUTIONS = (
    *("torch", "transformers", "tokenizers", "safetensors", "triton", "numpy", "numba", "gguf"),
    *("fastapi", "uvicorn", "matplotlib", "compressed-tensors", "nvidia-ml-py"),
)
# In a separate process: a torch that does not fit the machine may hang, or die on an illegal instruction.
_ASK_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
if found["available"]:
    x = torch.ones(64, 64, device="cuda")
    found["product"] = float((x @ x).sum().item())
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver reports it."""

    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """Everything that the checks look at; an empty string means that it is absent."""

    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    driver: str = ""
    driver_cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    torch: dict[str, Any] = field(default_factory=dict)
    torch_error: str = ""
    triton_wanted: str = ""
    cores: int = 0
    vector_units: tuple[str, ...] = ()
    memory_bytes: int = 0
    available_bytes: int = 0
    swap_used_bytes: int = 0
    disk_free_bytes: int = 0
    workdir: str = ""
    shm_bytes: int = 0
    helm: str = ""
    kubectl: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def gather(workdir: Path) -> Facts:
    """Gather the facts of this machine; takes as long as importing torch."""
    import psutil

    driver, driver_cuda, gpus = _nvml()
    found, error = _ask_torch()
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    shm = Path("/dev/shm")
    return Facts(
        python=platform.python_version(),
        versions={name: text for name in _DISTRIBUTIONS if (text := _version(name))},
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=gpus,
        torch=found,
        torch_error=error,
        triton_wanted=_triton_wanted(),
        cores=usable_cores(),
        vector_units=_vector_units(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        swap_used_bytes=swap.used,
        disk_free_bytes=shutil.disk_usage(_existing(workdir)).free,
        workdir=str(workdir),
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else 0,
        helm=_tool("helm", "version", "--short"),
        kubectl=_tool("kubectl", "version", "--client"),
    )


def _nvml() -> tuple[str, str, tuple[Gpu, ...]]:
    import pynvml

    try:
        pynvml.nvmlInit()
        code = pynvml.nvmlSystemGetCudaDriverVersion()
        gpus = tuple(map(_gpu, range(pynvml.nvmlDeviceGetCount())))
        return str(pynvml.nvmlSystemGetDriverVersion()), f"{code // 1000}.{code % 1000 // 10}", gpus
    except pynvml.NVMLError:
        return "", "", ()


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(str(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.free), (major, minor))


def _ask_torch() -> tuple[dict[str, Any], str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"it did not answer within {_TORCH_TIMEOUT_S} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return {}, lines[-1] if lines else f"it exited with status {done.returncode}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, ""


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _triton_wanted() -> str:
    """The triton version that the installed torch was built with, where its metadata pins one."""
    try:
        pins = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return ""
    for pin in pins:
        name, _, version = pin.partition(";")[0].partition("==")
        if name.strip() == "triton":
            return version.strip()
    return ""


def _vector_units() -> tuple[str, ...]:
    """The instruction sets of this CPU that the kernels use."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text("utf-8").splitlines() if info.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return tuple(unit for unit in _VECTOR_UNITS if unit in value.split())
    return ()


def _existing(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _tool(name: str, *arguments: str) -> str:
    """First line of a tool's output; empty when it is not installed or fails."""
    found = shutil.which(name)
    if found is None:
        return ""
    try:
        done = subprocess.run(
            [found, *arguments],
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_S,
            check=False,
            env={**os.environ, "HELM_NO_PLUGINS": "1"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
