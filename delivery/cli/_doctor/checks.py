"""The checks of `deliver doctor`: each says what it found, what is wrong, and the exact fix."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delivery.cli._doctor.facts import Facts

Status = Literal["ok", "warning", "error", "info"]

_TABLE = Path(__file__).parent / "compatibility.json"
_GIB = 1 << 30
_DISK_WARN_BYTES = 20 * _GIB
_DISK_ERROR_BYTES = 2 * _GIB
_MEMORY_WARN_BYTES = 4 * _GIB
_SHM_WARN_BYTES = 1 * _GIB
_GPU_FREE_SHARE = 0.5
_HELM_AT_LEAST = (3, 14)
_PRODUCT_OF_ONES = 64.0**3


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was checked and found and, if there is a problem, why and how to fix it."""

    name: str
    status: Status
    found: str
    why: str = ""
    fix: str = ""


def examine(facts: Facts) -> list[Check]:
    """Every check, in the order in which problems should be fixed."""
    return [
        *_python(facts),
        *_driver(facts),
        *_torch(facts),
        *_pairs(facts),
        *_triton(facts),
        *_memory(facts),
        *_processor(facts),
        *_disk(facts),
        *_tools(facts),
    ]


@cache
def table() -> dict[str, Any]:
    """The compatibility table."""
    data: dict[str, Any] = json.loads(_TABLE.read_text("utf-8"))
    return data


def wheel_for(driver: str) -> str:
    """The newest torch wheel that a driver runs."""
    for entry in table()["wheels"]:
        if version(driver) >= version(entry["driver"]):
            return str(entry["wheel"])
    return "cpu"


def version(text: str) -> tuple[int, ...]:
    """'12.1' → (12, 1), up to the first part that is not a number. '' → ()."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def _install(wheel: str, torch: str) -> str:
    release = torch.partition("+")[0]
    exact = f"=={release}" if release else ""
    return f"pip install --force-reinstall torch{exact} --index-url https://download.pytorch.org/whl/{wheel}"


def _python(facts: Facts) -> Iterator[Check]:
    if version(facts.python) < (3, 11):
        yield Check(
            "python",
            "error",
            facts.python,
            "Python 3.11 or newer is needed",
            "make PYTHON=python3.12 demo; or pyenv install 3.12",
        )
    else:
        yield Check("python", "ok", facts.python)


def _driver(facts: Facts) -> Iterator[Check]:
    if not facts.driver:
        yield Check("driver", "info", "no NVIDIA driver", "everything runs on the CPU")
        return
    cards = ", ".join(f"{g.name} (sm{g.capability[0]}{g.capability[1]})" for g in facts.gpus)
    yield Check("driver", "ok", f"{facts.driver}, CUDA up to {facts.driver_cuda}: {cards or 'no GPU'}")
    for gpu in facts.gpus:
        lacks = [f["name"] for f in table()["features"] if gpu.capability < tuple(f["from"])]
        if lacks:
            yield Check("gpu", "info", gpu.name, f"this GPU has no hardware support for: {', '.join(lacks)}")
        share = gpu.free_bytes / gpu.memory_bytes
        if share < _GPU_FREE_SHARE:
            yield Check(
                "gpu-memory",
                "warning",
                f"{gpu.name}: {_size(gpu.free_bytes)} of {_size(gpu.memory_bytes)} free",
                "another process uses the GPU: engines get less memory, and measurements are invalid",
                "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
            )


def _torch(facts: Facts) -> Iterator[Check]:
    installed = facts.versions.get("torch", "")
    if facts.torch_error:
        yield Check(
            "torch",
            "error",
            installed or "not installed",
            facts.torch_error,
            _install(wheel_for(facts.driver), installed),
        )
        return
    cuda = facts.torch.get("cuda")
    built = f"{facts.torch['version']}, built for {f'CUDA {cuda}' if cuda else 'CPU only'}"
    if not facts.gpus:
        yield Check("torch", "ok", built)
    elif cuda is None:
        yield Check(
            "torch",
            "error",
            built,
            "this machine has a GPU, but this torch was built without CUDA",
            _install(wheel_for(facts.driver), installed),
        )
    elif not facts.torch["available"]:
        yield Check(
            "torch",
            "error",
            built,
            f"torch does not see the GPU that driver {facts.driver} (CUDA up to {facts.driver_cuda}) shows",
            _install(wheel_for(facts.driver), installed),
        )
    elif facts.torch.get("product") != _PRODUCT_OF_ONES:
        yield Check(
            "torch",
            "error",
            built,
            "a matrix product on the GPU gave a wrong result",
            "test the GPU: dcgmi diag -r 3",
        )
    else:
        yield Check("torch", "ok", built)


def _pairs(facts: Facts) -> Iterator[Check]:
    """Combinations of driver, CUDA build and GPU that are known to fail."""
    cuda, installed = facts.torch.get("cuda"), facts.versions.get("torch", "")
    if not (cuda and facts.driver):
        return
    name = f"driver {facts.driver} with CUDA {cuda}"
    for entry in table()["minimum_driver"]:
        if cuda.split(".")[0] == entry["cuda"] and version(facts.driver) < version(entry["driver"]):
            other = _install(wheel_for(facts.driver), installed)
            fix = f"install driver {entry['driver']} or newer; or {other}"
            why = f"CUDA {cuda} needs driver {entry['driver']} or newer ({entry['why']})"
            yield Check("pair", "error", name, why, fix)
    for entry in table()["known_bad"]:
        driver = entry.get("driver", "")
        if cuda in entry["cuda"] and (not driver or version(facts.driver)[:1] == version(driver)):
            yield Check("pair", "warning", name, entry["why"], _install(entry["wheel"], installed))
    for gpu in facts.gpus:
        for entry in table()["capability"]:
            if _misfit(gpu.capability, cuda, entry):
                yield Check(
                    "pair",
                    "error",
                    f"{gpu.name} with CUDA {cuda}",
                    entry["why"],
                    _install(entry["wheel"], installed),
                )


def _misfit(capability: tuple[int, int], cuda: str, entry: dict[str, Any]) -> bool:
    if "below" in entry:
        return capability < tuple(entry["below"]) and version(cuda) >= version(entry["cuda_from"])
    return capability >= tuple(entry["from"]) and version(cuda) < version(entry["cuda_below"])


def _triton(facts: Facts) -> Iterator[Check]:
    installed, wanted = facts.versions.get("triton", ""), facts.triton_wanted
    if wanted and installed != wanted:
        why = f"torch {facts.versions.get('torch', '')} was built with triton {wanted}"
        yield Check("triton", "warning", installed or "not installed", why, f"pip install triton=={wanted}")
    elif not installed and facts.gpus:
        yield Check("triton", "error", "not installed", "GPU kernels need it", "pip install 'deliver[gpu]'")
    else:
        yield Check("triton", "ok" if installed else "info", installed or "not installed: GPU kernels only")


def _memory(facts: Facts) -> Iterator[Check]:
    found = f"{_size(facts.available_bytes)} of {_size(facts.memory_bytes)} available"
    if facts.available_bytes < _MEMORY_WARN_BYTES:
        yield Check(
            "memory",
            "warning",
            found,
            "the demo needs up to 4 GiB",
            "close other programs; deliver run --plan shows the predicted peak of every step",
        )
    else:
        yield Check("memory", "ok", found)
    if facts.swap_used_bytes:
        yield Check(
            "swap",
            "warning",
            f"{_size(facts.swap_used_bytes)} in use",
            "measurements taken while memory is swapped are invalid",
            "sudo swapoff -a && sudo swapon -a",
        )
    if facts.shm_bytes < _SHM_WARN_BYTES:
        yield Check(
            "shared-memory",
            "warning",
            f"/dev/shm has {_size(facts.shm_bytes)}",
            "engine processes exchange tensors through it",
            "sudo mount -o remount,size=8G /dev/shm; for good: echo 'tmpfs /dev/shm tmpfs "
            "defaults,size=8G 0 0' | sudo tee -a /etc/fstab; in a container: docker run --shm-size=8g",
        )
    else:
        yield Check("shared-memory", "ok", f"/dev/shm has {_size(facts.shm_bytes)}")


def _processor(facts: Facts) -> Iterator[Check]:
    vectors = ", ".join(facts.vector_units) or "no known vector instructions"
    yield Check("processor", "ok", f"{facts.cores} cores, {vectors}")


def _disk(facts: Facts) -> Iterator[Check]:
    found = f"{_size(facts.disk_free_bytes)} free for {facts.workdir}"
    fix = "deliver gc; or DELIVER_WORKDIR=/a/larger/disk"
    if facts.disk_free_bytes < _DISK_ERROR_BYTES:
        yield Check("disk", "error", found, "not even the demo fits (it needs 2 GiB)", fix)
    elif facts.disk_free_bytes < _DISK_WARN_BYTES:
        yield Check("disk", "warning", found, "models of a few billion parameters do not fit", fix)
    else:
        yield Check("disk", "ok", found)


def _tools(facts: Facts) -> Iterator[Check]:
    if not facts.helm:
        yield Check(
            "helm",
            "warning",
            "not installed",
            "building a release does not need it; installing one does",
            "https://helm.sh/docs/intro/install",
        )
    elif version(facts.helm)[:2] < _HELM_AT_LEAST:
        least = ".".join(map(str, _HELM_AT_LEAST))
        yield Check(
            "helm",
            "warning",
            facts.helm,
            f"helm {least} or newer is needed",
            "https://helm.sh/docs/intro/install",
        )
    else:
        yield Check("helm", "ok", facts.helm)
    missing = [name for name in ("fastapi", "uvicorn") if name not in facts.versions]
    if missing:
        yield Check(
            "serve",
            "info",
            f"without {', '.join(missing)}",
            "deliver serve needs them",
            "pip install 'deliver[serve]'",
        )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
