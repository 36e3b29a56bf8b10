"""The log of a run: `runs/<id>/events.jsonl`, one JSON object per line, and `runs/<id>/run.json`."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delivery.pipeline.store import Store, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from delivery.artifact import Json

_FOLDER = "runs"
_LATEST = "latest"
_RECORD = "run.json"


class RunLog:
    """Logs events. A failed write to the log never fails a run: a full disk is reported elsewhere."""

    def __init__(self, store: Store) -> None:
        self._store = store
        now = time.time_ns()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now // 10**9))
        self.id = f"{stamp}-{now // 1000 % 10**6:06d}-{os.getpid()}"  # sorts by time
        with suppress(OSError):
            self.folder.mkdir(parents=True)
            write_whole(store.folder(_FOLDER) / _LATEST, self.id + "\n")

    @property
    def folder(self) -> Path:
        return self._store.workdir / _FOLDER / self.id

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event with the time, UTC, in ISO 8601."""
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"
        line = json.dumps({"at": stamp, "event": kind, **fields}, ensure_ascii=False, default=str)
        with suppress(OSError), (self.folder / "events.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def record(self, result: Mapping[str, Json], *, finished: bool) -> None:
        """Replace the record of the results so far."""
        text = json.dumps({**result, "finished": finished}, indent=1, ensure_ascii=False)
        with suppress(OSError):
            write_whole(self.folder / _RECORD, text + "\n")


def runs(store: Store) -> Iterator[dict[str, Json]]:
    """Records of past runs, newest first, without runs that made nothing."""
    folder = store.workdir / _FOLDER
    ids = sorted((p.name for p in folder.iterdir() if p.is_dir()), reverse=True) if folder.is_dir() else []
    for run_id in ids:
        with suppress(OSError, ValueError):
            yield json.loads((folder / run_id / _RECORD).read_text("utf-8"))


def latest_steps(store: Store) -> dict[str, dict[str, Json]]:
    """Stage → its entry in the newest run that had that stage."""
    out: dict[str, dict[str, Json]] = {}
    for record in runs(store):
        for entry in record.get("steps", ()):
            out.setdefault(entry["name"], entry)
    return out
