"""One run of the demo, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_run import Ran, run_demo


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chain") / "work"


@pytest.fixture(scope="session")
def demo(workdir: Path) -> Ran:
    """The demo from its source to a packaged release."""
    return run_demo(workdir)


@pytest.fixture(scope="session")
def source(demo: Ran) -> Path:
    """The embedded model as a Hugging Face directory, in floating point."""
    return Path(demo.step("convert")["path"])
