"""`deliver doctor`: checks are functions of facts, so machines that are not here can be examined."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from delivery.cli._doctor.checks import Check, examine, table, version, wheel_for
from delivery.cli._doctor.facts import Facts, Gpu, gather

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", 140 * GIB, 139 * GIB, (9, 0))
V100 = Gpu("Tesla V100", 16 * GIB, 16 * GIB, (7, 0))
B200 = Gpu("NVIDIA B200", 180 * GIB, 179 * GIB, (10, 0))
CPU = Facts(
    python="3.12.1",
    versions={"torch": "2.13.0", "triton": "3.9.0", "fastapi": "0.115", "uvicorn": "0.32"},
    torch={"version": "2.13.0", "cuda": None, "available": False},
    cores=2,
    vector_units=("avx2",),
    memory_bytes=24 * GIB,
    available_bytes=20 * GIB,
    disk_free_bytes=100 * GIB,
    workdir=".deliver",
    shm_bytes=8 * GIB,
    helm="v4.1.4+g05fa379",
)
GPU = replace(
    CPU,
    driver="580.95.05",
    driver_cuda="13.0",
    gpus=(H200,),
    torch={"version": "2.13.0+cu130", "cuda": "13.0", "available": True, "product": 64.0**3},
)


def wrong(facts: Facts) -> list[Check]:
    return [check for check in examine(facts) if check.status in ("warning", "error")]


def only(facts: Facts, name: str, status: str) -> Check:
    found = wrong(facts)
    assert [(c.name, c.status) for c in found] == [(name, status)], found
    return found[0]


@pytest.mark.parametrize("facts", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_good_machine_has_nothing_wrong(facts: Facts) -> None:
    assert wrong(facts) == []


def test_whatever_is_wrong_comes_with_a_fix() -> None:
    bad = replace(
        GPU,
        python="3.10.2",
        torch={"version": "2.13.0", "cuda": None, "available": False},
        triton_wanted="3.6.0",
        available_bytes=GIB,
        swap_used_bytes=GIB,
        shm_bytes=GIB // 16,
        disk_free_bytes=GIB,
        helm="",
    )
    names = {check.name for check in wrong(bad)}
    assert names == {"python", "torch", "triton", "memory", "swap", "shared-memory", "disk", "helm"}
    assert all(check.why and check.fix for check in wrong(bad))


def test_a_cpu_torch_on_a_gpu_machine() -> None:
    check = only(
        replace(GPU, torch={"version": "2.13.0", "cuda": None, "available": False}), "torch", "error"
    )
    assert check.fix.endswith("torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130")


def test_an_old_driver_gets_the_wheel_that_it_runs() -> None:
    old = replace(GPU, driver="550.54.15", driver_cuda="12.4", torch={**GPU.torch, "available": False})
    found = wrong(old)
    assert [check.name for check in found] == ["torch", "pair"]
    assert "needs driver 580.65.06 or newer" in found[1].why
    assert all("whl/cu126" in check.fix for check in found)


@pytest.mark.parametrize("cuda", ["12.0", "12.2", "12.3"])
def test_known_bad_cuda_builds(cuda: str) -> None:
    check = only(replace(GPU, torch={**GPU.torch, "cuda": cuda}), "pair", "warning")
    assert "failed where 12.1 worked" in check.why


def test_known_bad_pair_of_driver_and_cuda() -> None:
    torch = {**GPU.torch, "cuda": "12.1"}
    assert wrong(replace(GPU, torch=torch)) == []
    assert "CUDA graphs" in only(replace(GPU, driver="535.161.08", torch=torch), "pair", "warning").why


def test_cards_and_builds_that_do_not_fit() -> None:
    assert "before Turing" in only(replace(GPU, gpus=(V100,)), "pair", "error").why
    check = only(replace(GPU, gpus=(B200,), torch={**GPU.torch, "cuda": "12.6"}), "pair", "error")
    assert "Blackwell" in check.why
    infos = [c.why for c in examine(replace(GPU, gpus=(V100,))) if c.name == "gpu"]
    assert "fp8" in infos[0]
    assert "int8" not in infos[0]


def test_a_card_in_use() -> None:
    busy = replace(H200, free_bytes=10 * GIB)
    assert "10.0 GiB of 140.0 GiB free" in only(replace(GPU, gpus=(busy,)), "gpu-memory", "warning").found


def test_a_wrong_product_is_an_error() -> None:
    check = only(replace(GPU, torch={**GPU.torch, "product": 1.0}), "torch", "error")
    assert "gave a wrong result" in check.why


def test_a_torch_that_does_not_load() -> None:
    check = only(replace(CPU, torch={}, torch_error="ImportError: libcudart.so.13"), "torch", "error")
    assert "libcudart" in check.why
    assert "whl/cpu" in check.fix


def test_an_old_helm() -> None:
    assert "3.14 or newer" in only(replace(CPU, helm="v3.9.0+g7ceeda6"), "helm", "warning").why


def test_versions_and_wheels() -> None:
    assert version("v3.14.0+g1") == (3, 14, 0)
    assert version("") == ()
    assert [wheel_for(driver) for driver in ("", "470.1", "535.1", "580.95.05")] == [
        "cpu",
        "cpu",
        "cu126",
        "cu130",
    ]
    drivers = [version(entry["driver"]) for entry in table()["wheels"]]
    assert drivers == sorted(drivers, reverse=True)


@pytest.mark.slow
def test_this_machine(tmp_path: Path) -> None:
    facts = gather(tmp_path)
    assert facts.cores >= 1
    assert facts.torch["version"] == facts.versions["torch"]
    program = "import sys; from delivery.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "doctor", "--json", "--workdir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    assert done.returncode == (0 if said["ok"] else 6)
    assert {"python", "torch", "disk", "helm"} <= {check["name"] for check in said["checks"]}
