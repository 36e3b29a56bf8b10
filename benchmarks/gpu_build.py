"""`deliver build` on a card: how long it takes, how long its engine takes to load, what a first request pays.

    python benchmarks/gpu_build.py FOLDER [--form int8] [--layers 32]

Writes a checkpoint of the 8B shape with random weights and builds it; then loads the engine in a process of
its own, with the files in the page cache. All three under FOLDER, which must not exist.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Compiled
from gpu_weights import LLAMA_8B, RandomWeights

from delivery.checkpoint import CheckpointWriter
from delivery.engine import EngineCore, Request, SamplingParams, build
from delivery.engine import assemble as assembling
from delivery.formats import load_format
from delivery.kernels.tuning import TuningTable
from delivery.qtensor import QTensor

PROMPT_TOKENS, NEW_TOKENS = 1024, 16
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_checkpoint(out: Path, form: str, layers: int) -> None:
    """A published checkpoint of random weights."""
    config = LLAMA_8B | {"num_hidden_layers": layers}
    source, stored = RandomWeights(config, form), load_format("compressed-tensors")
    kinds: dict[str, Any] = {}
    with CheckpointWriter(out) as writer:
        for layer in range(layers):
            base = f"model.layers.{layer}"
            for name in LINEARS:
                prefix = f"{base}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}"
                weight = source.weight(prefix, "cuda")
                kinds[prefix] = weight if isinstance(weight, QTensor) else None
                parts = {f"{prefix}.weight": weight}
                if isinstance(weight, QTensor):
                    parts = stored.pack(prefix, weight)
                for part, tensor in parts.items():
                    writer.add(part, tensor.cpu())
            for name in ("input_layernorm", "post_attention_layernorm"):
                writer.add(f"{base}.{name}.weight", source.tensor("norm"))
        writer.add("model.norm.weight", source.tensor("norm"))
        for name in ("model.embed_tokens", "lm_head"):
            writer.add(f"{name}.weight", source.weight(name, "cuda").cpu())
        if any(kinds.values()):
            config["quantization_config"] = stored.quantization_config({**kinds, "lm_head": None})
        writer.finish(config)


def build_engine(checkpoint: Path, out: Path) -> None:
    began = time.perf_counter()
    about = build(checkpoint, out, device="cuda", max_num_seqs=256, checkpoint_digest="generated")
    table = TuningTable.from_json((out / "tuning.json").read_text("utf-8"))
    backends: dict[str, int] = {}
    for choice in table.choices.values():
        backends[choice.backend] = backends.get(choice.backend, 0) + 1
    print(f"built in {time.perf_counter() - began:.1f} s: {about['tuned']} choices, {backends}", flush=True)


def load_engine(path: Path) -> None:
    """Load once, then the same request twice."""
    seconds: dict[str, float] = {}

    def timed(module: Any, name: str) -> None:
        inner = getattr(module, name)

        def around(*args: Any, **given: Any) -> Any:
            began = time.perf_counter()
            made = inner(*args, **given)
            torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - began
            return made

        setattr(module, name, around)

    torch.zeros(1, device="cuda")
    for name in ("read_engine", "record", "warm_up"):
        timed(assembling, name)
    began = time.perf_counter()
    with EngineCore(path, device="cuda", prefix_cache=False, wait_time_ms=0.0) as engine:
        loaded = time.perf_counter() - began
        parts = ", ".join(f"{name} {taken:.2f}" for name, taken in seconds.items())
        print(f"loaded in {loaded:.2f} s ({parts})", flush=True)
        prompt = torch.randint(0, engine.config.vocab_size, (PROMPT_TOKENS,)).tolist()
        for turn in ("first", "second", "sampled"):
            sampling = SamplingParams(
                max_tokens=NEW_TOKENS,
                temperature=0.8 if turn == "sampled" else 0.0,
                top_p=0.9,
                ignore_eos=True,
            )
            with Compiled() as compiled:
                asked = time.perf_counter()
                engine.add_request(Request(turn, prompt, sampling))
                first, count = 0.0, 0
                while engine.has_unfinished():
                    for output in engine.step():
                        count += len(output.new_token_ids)
                        first = first or time.perf_counter() - asked
                whole = time.perf_counter() - asked
            print(
                f"{turn} request: first token {first * 1e3:.1f} ms, {count} tokens {whole * 1e3:.1f} ms, "
                f"compiled {compiled.names}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", default="int8")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--only", choices=("checkpoint", "build", "load"))
    options = parser.parse_args()
    checkpoint, engine = options.folder / "checkpoint", options.folder / "engine"
    if options.only == "checkpoint":
        write_checkpoint(checkpoint, options.form, options.layers)
    elif options.only == "build":
        build_engine(checkpoint, engine)
    elif options.only == "load":
        load_engine(engine)
    else:
        options.folder.mkdir(parents=True)
        rest = ["--form", options.form, "--layers", str(options.layers)]
        for part in ("checkpoint", "build", "load", "load"):
            began = time.perf_counter()
            command = [sys.executable, __file__, str(options.folder), *rest, "--only", part]
            subprocess.run(command, check=True)
            print(json.dumps({"part": part, "seconds": round(time.perf_counter() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
