"""Publish the results of a run, or of a single step, to `latest/<stage>` and `reports/<stage>/`."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from delivery.pipeline.result import StageResult
    from delivery.pipeline.store import Store

# The renderings of a report, as `delivery.report` names them.
RENDERINGS = ("report.json", "report.html", "junit.xml", "metrics.txt", "summary.md")


def publish(store: Store, steps: Iterable[StageResult], not_made: Iterable[str] = ()) -> None:
    """Point `latest/<stage>` at each artifact, and copy the renderings of reports to `reports/<stage>/`.

    CI collects files by fixed paths and does not follow links, hence the copies. `not_made` stages, which a
    stopped run did not reach, lose their entry: an old release must not be mistaken for this run's.
    """
    for stage in not_made:
        (store.folder("latest") / stage).unlink(missing_ok=True)
        shutil.rmtree(store.workdir / "reports" / stage, ignore_errors=True)
    for step in steps:
        _link(store.folder("latest") / step.name, store.path_of(step.artifact.digest))
        if step.report is None:
            continue
        folder = store.folder(f"reports/{step.name}")
        for name in RENDERINGS:
            if step.artifact.file(name).is_file():
                beside = folder / f".{name}.{os.getpid()}"
                shutil.copyfile(step.artifact.file(name), beside)
                os.replace(beside, folder / name)


def _link(link: Path, target: Path) -> None:
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    os.replace(beside, link)
