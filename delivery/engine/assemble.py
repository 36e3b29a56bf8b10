"""From a path to a ready runner: open, load in the device's forms, plan memory, allocate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from delivery.checkpoint import Checkpoint, Tokenizer
from delivery.device import resolve_device
from delivery.engine import graphs
from delivery.engine.directory import check_fingerprint, is_engine, read_about, read_engine, read_tuning
from delivery.engine.engine_model import EngineModel, Forms, load_model
from delivery.engine.forms_gpu import GpuForms
from delivery.engine.forms_torch import TorchForms
from delivery.engine.inputs import SPARE_SLOTS
from delivery.engine.kv_cache import KVCache, RotaryTables
from delivery.engine.memory_plan import MemoryPlan, plan
from delivery.engine.need import need, recorded_bytes, state_bytes
from delivery.engine.options import EngineOptions
from delivery.engine.runner import ModelRunner
from delivery.engine.warm import warm_up
from delivery.errors import DataError, UsageError
from delivery.kernels import tuning
from delivery.kernels.kv_layout import kv_layout
from delivery.kernels.tuning import TuningTable
from delivery.model.config import ModelConfig
from delivery.model.load import load_config

_CPU_KV_BYTES = 1 << 30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Assembled:
    """A runner with its model, plan and tokenizer (None if the directory has none)."""

    config: ModelConfig
    runner: ModelRunner
    plan: MemoryPlan
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    device: str


def options_for(path: Path, given: dict[str, Any]) -> EngineOptions:
    """The options as given; for an engine directory, over those that it was built with.

    Raises UsageError for an unknown or impossible option, or a dtype other than the engine's.
    """
    if not is_engine(path):
        return EngineOptions.of(given)
    stored = read_about(path)["options"]
    if given.get("dtype", "auto") not in ("auto", stored["dtype"]):
        raise UsageError(
            "engine-option-invalid",
            f"dtype is {given['dtype']!r}",
            why=f"the engine in {path} was built for {stored['dtype']}",
            hint="deliver build, with the other dtype",
        )
    blocks = given.get("cache_max_entry_count") or 0
    if blocks >= 1 and given.get("max_model_len") is None:
        # A number of blocks says how much there is to hold, so sessions are no longer than that.
        held = int(blocks) * int(given.get("block_size") or stored["block_size"])
        stored = {**stored, "max_model_len": min(stored["max_model_len"], held)}
    return EngineOptions.of({**stored, **given, "dtype": stored["dtype"]})


def assemble(path: Path, options: EngineOptions) -> Assembled:
    """Raises DataError for a damaged checkpoint or engine, EnvironmentLacking `plan-does-not-fit` or
    `engine-mismatch`."""
    device = resolve_device(options.device)
    place = torch.device(device)
    checkpoint = Checkpoint.open(path)
    config = load_config(checkpoint.config)
    with torch.inference_mode():
        if is_engine(path):
            as_built = check_fingerprint(path, read_about(path), device, options.mismatch)
            # Choices measured elsewhere are left aside: the card's own table or the rules take their place.
            tuning.install(read_tuning(path) if as_built else TuningTable())
            model = read_engine(path, config, place)
        else:
            tuning.install(TuningTable())
            dtype = activation_dtype(options.dtype, device, config)
            model = load_model(checkpoint, config, place, device_forms(device, dtype))
    if device == "cuda":
        # What casting and packing used is free again: for the plan, and for other processes.
        torch.cuda.empty_cache()
    return around(model, options, device, open_tokenizer(path))


def around(model: EngineModel, options: EngineOptions, device: str, tokenizer: Tokenizer | None) -> Assembled:
    """Plan the memory that the weights leave, allocate it, record decode steps where the device can."""
    config, place = model.config, torch.device(device)
    made = memory_plan(config, options, device, weights_size(model), model.dtype)
    rotary = RotaryTables(config, made.max_model_len, place)
    slots = options.sequences(device) + SPARE_SLOTS
    cache = KVCache(config, made.num_blocks, made.block_size, options.kv, model.dtype, place, slots)
    runner = ModelRunner(
        model,
        cache,
        rotary,
        tokens=options.batched_tokens(device),
        sequences=options.sequences(device),
        device=place,
        seed=options.seed,
    )
    if options.graphs:
        record(runner, options.batched_tokens(device), options.sequences(device))
    if device == "cuda":
        warm_up(runner, options.batched_tokens(device), options.sequences(device))
    eos = config.eos_token_ids if tokenizer is None else tokenizer.eos_token_ids
    return Assembled(config, runner, made, tokenizer, tuple(eos), device)


def memory_plan(
    config: ModelConfig, options: EngineOptions, device: str, weights_bytes: int, dtype: torch.dtype
) -> MemoryPlan:
    """The plan for a device with these weights loaded. Raises UsageError `session-too-long`."""
    asked = options.max_model_len
    if asked is not None and asked > config.max_position:
        raise UsageError(
            "session-too-long",
            f"max_model_len {asked} exceeds the model's maximum length",
            why=f"its config states max_position_embeddings {config.max_position}",
            hint=f"--max-session-len {config.max_position}",
        )
    sequences = options.sequences(device)
    length = asked or config.max_position
    tokens = options.batched_tokens(device)
    recorded = device == "cuda" and options.graphs
    wanted = need(
        config,
        weights_bytes=weights_bytes,
        block_size=options.block_size,
        token_head_bytes=kv_layout(options.kv).token_head_bytes(config.head_dim, dtype),
        tokens=tokens,
        sequences=sequences,
        max_model_len=length,
        item_bytes=dtype.itemsize,
        state_bytes=state_bytes(config, sequences + SPARE_SLOTS, dtype.itemsize),
        graph_bytes=recorded_bytes(config, tokens, sequences, dtype.itemsize) if recorded else 0,
    )
    available = free_memory(device) + weights_bytes
    share = options.cache_max_entry_count
    useful = sequences * length
    if device == "cpu" and share < 1:
        # RAM is shared with everything else: what a laptop can spare, not most of what is free.
        useful = min(useful, max(length, _CPU_KV_BYTES // wanted.block_bytes * options.block_size))
    return plan(wanted, available, share, asked, config.max_position, useful)


def free_memory(device: str) -> int:
    """Bytes that can be allocated on the device now."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    import psutil

    return int(psutil.virtual_memory().available)


def activation_dtype(asked: str, device: str, config: ModelConfig) -> torch.dtype:
    """float32 on a CPU, the checkpoint's own 16-bit dtype on a GPU, unless asked otherwise."""
    if asked != "auto":
        return _DTYPES[asked]
    if device == "cpu":
        return torch.float32
    stated = config.dtype.removeprefix("torch.")
    return _DTYPES.get(stated, torch.bfloat16) if stated != "float32" else torch.bfloat16


def device_forms(device: str, dtype: torch.dtype) -> Forms:
    """How the device computes."""
    if device == "cuda":
        return GpuForms(dtype)
    if dtype != torch.float32:
        return TorchForms(dtype)
    from delivery.engine.forms_cpu import CpuForms  # numba is loaded where it computes

    return CpuForms()


def record(runner: ModelRunner, tokens: int, sequences: int) -> None:
    """Give the runner recorded steps, of the kinds that its device and its model allow."""
    if runner.device.type == "cuda":
        if graphs.why_not(runner.model) is None:
            mixed = graphs.why_not_mixed(runner.model.config) is None
            shapes = graphs.mixed_shapes(tokens, sequences) if mixed else []
            recorded = graphs.CudaGraphs(runner, graphs.decode_sizes(sequences), shapes)
            runner.recorded, runner.mixed = recorded, recorded if mixed else None
        return
    from delivery.engine import cpu_decode, cpu_prompt

    if cpu_decode.why_not(runner.model, runner.cache) is None:
        runner.recorded = cpu_decode.CpuDecode(runner.model, runner.cache, runner.rotary, runner.stage)
        if cpu_prompt.why_not(runner.cache) is None:
            runner.mixed = cpu_prompt.CpuPrompts(runner)


def open_tokenizer(path: Path) -> Tokenizer | None:
    try:
        return Tokenizer.open(path)
    except DataError as error:
        if error.code != "tokenizer-missing":
            raise
        return None


def weights_size(model: EngineModel) -> int:
    """Bytes of all distinct tensors that a model's forms hold."""
    sizes: dict[int, int] = {}
    for tensor in _tensors((model.blocks, model.embedding, model.head), set()):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, f.name) for f in dataclasses.fields(value)]
    for part in parts:
        yield from _tensors(part, seen)
