"""On the module path of the pipeline test's jobs: an engine whose steps take a known time.

A step lasts `STEP_MS`, or what the `config.json` of the model says under `planted_step_ms`. So a commit of
weights can be exactly 30 % slower than the one before, on a machine that is neither quiet nor fast.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

STEP_MS = 12.0


class _Planted(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "delivery.engine.core":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _plant(module.EngineCore)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _plant(core: Any) -> None:
    init, step = core.__init__, core.step

    def started(self: Any, path: Any, **options: Any) -> None:
        init(self, path, **options)
        config = json.loads((Path(path) / "config.json").read_text("utf-8"))
        self.planted_s = config.get("planted_step_ms", STEP_MS) / 1e3

    def stepped(self: Any) -> Any:
        end = time.perf_counter() + self.planted_s
        outputs = step(self)
        time.sleep(max(0.0, end - time.perf_counter()))
        return outputs

    core.__init__, core.step = started, stepped


sys.meta_path.insert(0, _Planted())
