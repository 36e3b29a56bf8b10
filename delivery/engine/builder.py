"""build: a checkpoint becomes an engine directory.

Weights are repacked for the device's kernels, memory is planned, kernels are compiled and measured,
so that no request pays for it.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from delivery.artifact import MANIFEST, Json, canonical_json, hash_tree, read_artifact
from delivery.checkpoint import Checkpoint
from delivery.device import resolve_device
from delivery.engine import fusion
from delivery.engine import tune as measuring
from delivery.engine.assemble import activation_dtype, around, device_forms, memory_plan, weights_size
from delivery.engine.directory import write_engine
from delivery.engine.engine_model import EngineModel, load_model
from delivery.engine.fingerprint import build_fingerprint
from delivery.engine.options import EngineOptions
from delivery.kernels import tuning
from delivery.kernels.tuning import TuningTable
from delivery.model.load import load_config

_STORED = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefill",
    "adaptive",
    "kv",
    "block_size",
    "cache_max_entry_count",
)


def build(
    checkpoint: Path | str,
    out: Path | str,
    *,
    checkpoint_digest: str = "",
    progress: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda _: None,
    tune: bool = True,
    **options: Any,
) -> dict[str, Json]:
    """Write an engine directory for a checkpoint and return what engine.json says.

    options: `EngineOptions`; they become the engine's defaults. progress is called once per layer, note
    called with the name of each later stage. tune: on a GPU, measure the fastest kernels, and compile what
    serving will launch.
    Raises DataError for a damaged checkpoint, EnvironmentLacking when the plan does not fit.
    """
    chosen = EngineOptions.of(options)
    device = resolve_device(chosen.device)
    source = Checkpoint.open(checkpoint)
    config = load_config(source.config)
    dtype = activation_dtype(chosen.dtype, device, config)
    with torch.inference_mode():
        model = load_model(source, config, torch.device(device), device_forms(device, dtype), progress)
    plan = memory_plan(config, chosen, device, weights_size(model), dtype)
    table = _prepared(model, chosen, device, note) if tune and device == "cuda" else TuningTable()
    settled = {
        **{name: getattr(chosen, name) for name in _STORED},
        "max_model_len": plan.max_model_len,
        "max_num_seqs": chosen.sequences(device),
        "max_num_batched_tokens": chosen.batched_tokens(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
    digest = checkpoint_digest or digest_of(Path(checkpoint))
    stamp = build_fingerprint(device, digest)
    about: dict[str, Json] = {
        "model": config.family,
        "device": stamp["device"],
        "tp": chosen.tp,
        "max_model_len": plan.max_model_len,
        "build": stamp,
        "options": settled,
        "plan": plan.to_json(),
        "forms": _forms(model),
        "tuned": len(table.choices),
        "fusion": fusion.report(config, quantized_activations=_quantized_activations(model)),
        "config": _plain(asdict(config)),
    }
    write_engine(Path(out), source, model, about, table)
    return about


def _prepared(
    model: EngineModel, options: EngineOptions, device: str, note: Callable[[str], None]
) -> TuningTable:
    """The choices measured on this card. What serving launches with them is compiled, into the disk cache."""
    from delivery.kernels.gpu.timing import graph_us

    def time_us(calls: Sequence[Callable[[], object]]) -> float:
        return graph_us(calls, launches=max(4, len(calls)), replays=5)

    before = tuning.installed()
    try:
        with torch.inference_mode():
            table = measuring.measured(
                model,
                measuring.row_counts(options.batched_tokens(device)),
                time_us,
                options.sequences(device),
                note,
            )
        tuning.install(table)
        note("recording steps")
        around(model, options, device, None)  # records steps, and with that compiles them
    finally:
        tuning.install(before)
        gc.collect()  # runner and recordings know each other
        torch.cuda.empty_cache()
    return table


def digest_of(checkpoint: Path) -> str:
    """An artifact's digest; for any other directory, the SHA-256 over the digests of its files."""
    if (checkpoint / MANIFEST).is_file():
        return read_artifact(checkpoint).digest
    files = [[ref.path, ref.sha256] for ref in hash_tree(checkpoint)]
    return hashlib.sha256(canonical_json(files).encode()).hexdigest()


def _forms(model: EngineModel) -> dict[str, int]:
    """How many layers are packed in which form."""
    counts: dict[str, int] = {}
    runs = [r for b in model.blocks for r in (*b.linears.values(), *(p.run for p in b.products.values()))]
    for run in (*runs, model.head.head):
        name = getattr(run, "form", type(run).__name__)
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def _quantized_activations(model: EngineModel) -> bool:
    runs = [p.run for b in model.blocks for p in b.products.values()]
    return any(getattr(run, "act_dtype", None) is not None for run in runs)


def _plain(value: Any) -> Json:
    """Tuples become lists, as JSON would make them."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
