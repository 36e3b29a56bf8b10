"""Compile the kernels to be measured in many processes, into Triton's disk cache.

The measuring process finds them there; alone it would spend most of a build in the compiler.

    python -m delivery.engine.compile_ahead      tasks on standard input, one JSON object a line
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from delivery.artifact import Json
from delivery.engine.layer_run import run_layer, sample_activations
from delivery.engine.packed_files import Packer, unpack
from delivery.errors import DeliverError
from delivery.kernels.tuning import Choice, TuningTable

_FEWEST = 8
"""Kernels from which on processes of their own pay."""
_MOST_PROCESSES = 14


Task = tuple[Any, int, int, int, Choice]
"""(layer, rows, n, k, choice): the choice is to be run on the layer, whose weight is [n, k]."""


def described(task: Task, dtype: torch.dtype) -> dict[str, Json]:
    """A task as JSON: the layer by the shapes and dtypes of its tensors. dtype: of float activations."""
    layer, rows, n, k, choice = task
    tensors: dict[str, Json] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        tensors[name] = [list(tensor.shape), _name(tensor.dtype)]

    packed = Packer(add).pack(layer, "layer")
    table = json.loads(TuningTable().with_choice("task", n, k, 1, choice).to_json())
    return {"layer": packed, "tensors": tensors, "rows": rows, "k": k, "dtype": _name(dtype), "choice": table}


def distinct(tasks: Iterable[Task], dtype: torch.dtype) -> list[dict[str, Json]]:
    """The descriptions of those tasks that differ in what is compiled, as far as tiles and dtypes tell."""
    found: dict[object, dict[str, Json]] = {}
    for task in tasks:
        tile = task[-1].tile
        if tile is not None:
            made = described(task, dtype)
            kinds = tuple(kind for _, kind in made["tensors"].values())
            split = tile.splits > 1
            found.setdefault((type(task[0]), kinds, replace(tile, splits=1), split), made)
    return list(found.values())


def compile_ahead(tasks: Iterable[Task], dtype: torch.dtype) -> int:
    """Run each distinct task once, in processes of their own; how many there were.

    What a process cannot launch is left to the measurement, which leaves it out.
    """
    todo = [json.dumps(task) for task in distinct(tasks, dtype)]
    workers = min(_MOST_PROCESSES, (os.cpu_count() or 2) - 2, len(todo) // 2)
    if len(todo) < _FEWEST or workers < 2:
        return 0
    command = [sys.executable, "-m", "delivery.engine.compile_ahead"]
    quiet = subprocess.DEVNULL
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, text=True)
        for _ in range(workers)
    ]
    for first, process in enumerate(running):
        assert process.stdin is not None
        process.stdin.write("\n".join(todo[first::workers]))
        process.stdin.close()
    for process in running:
        process.wait()
    return len(todo)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _run(task: dict[str, Any], device: str) -> None:
    def tensor(name: str) -> torch.Tensor:
        shape, dtype = task["tensors"][name]
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    layer = unpack(task["layer"], tensor)
    (choice,) = TuningTable.from_json(json.dumps(task["choice"])).choices.values()
    x = sample_activations(layer, task["rows"], task["k"], getattr(torch, task["dtype"]))
    run_layer(layer, x, choice)


def main(device: str = "cuda") -> None:
    with torch.inference_mode():
        for line in sys.stdin:
            try:
                _run(json.loads(line), device)
            except (RuntimeError, DeliverError):
                continue  # the measurement will see it too


if __name__ == "__main__":
    main()
