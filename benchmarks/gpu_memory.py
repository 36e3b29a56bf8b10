"""Memory on a GPU: what the KV cache's type and block size cost and give, and a batch under a memory cap.

    python benchmarks/gpu_memory.py kv      decode at batch 64 for every KV type and block size
    python benchmarks/gpu_memory.py cap     batch 16 where transformers is out of memory

The 8B shape of gpu_engine.py, random weights, prompts of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from gpu_checks import in_processes
from gpu_engine import PROMPT_TOKENS, engine_around, generate, random_model
from gpu_weights import LLAMA_8B

from delivery.engine import graphs

KV_TYPES = ("auto", "int8", "fp8", "int4")
BLOCK_SIZES = (16, 32, 64)
BATCH, NEW_TOKENS = 64, 33
CAPPED_BATCH = 16


def only_one_recording(batch: int) -> None:
    """Record decode steps of one batch size alone: it is all that is measured here."""
    graphs.decode_sizes = lambda most: [batch]
    graphs.mixed_shapes = lambda tokens, sequences: []


def prompts(batch: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, vocabulary, (batch, PROMPT_TOKENS), generator=generator).tolist()


def kv_rows(model: Any, kv: str, block_size: int) -> dict[str, Any]:
    """Prefill and decode figures of one KV type and block size, bytes a token, how full blocks are."""
    only_one_recording(BATCH)
    engine = engine_around(model, kv=kv, block_size=block_size, max_num_seqs=BATCH)
    texts = prompts(BATCH, engine.config.vocab_size)
    prefill_s = min(generate(engine, texts, 1) for _ in range(2))
    total_s = min(generate(engine, texts, NEW_TOKENS) for _ in range(2))
    plan, longest = engine.plan, PROMPT_TOKENS + NEW_TOKENS
    held = -(-longest // block_size) * block_size
    engine.close()
    return {
        "kv": kv,
        "block_size": block_size,
        "kv_bytes_a_token": plan.block_bytes // plan.block_size,
        "kv_tokens_of_plan": plan.kv_tokens,
        "prefill_tok_s": round(BATCH * PROMPT_TOKENS / prefill_s),
        "tpot_ms": round((total_s - prefill_s) / (NEW_TOKENS - 1) * 1e3, 3),
        "tok_s": round(BATCH * (NEW_TOKENS - 1) / (total_s - prefill_s)),
        "block_utilisation": round(longest / held, 4),
    }


def _compile(task: tuple[str, int]) -> None:
    kv_rows(random_model("w4a16", LLAMA_8B | {"num_hidden_layers": 1}), *task)


def kv(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    cells = list(itertools.product(KV_TYPES, BLOCK_SIZES))
    started = time.perf_counter()
    in_processes(_compile, cells)
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    model = random_model("w4a16", LLAMA_8B | {"num_hidden_layers": arguments.layers})
    rows = []
    for cell in cells:
        rows.append(kv_rows(model, *cell))
        print(rows[-1], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def cap(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Transformers and this engine in bf16, each with the same cap, batch 16 of prompts of 1,024 tokens."""
    cap_bytes = int(arguments.cap_gib * 2**30)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap_bytes / total)
    texts = prompts(CAPPED_BATCH, LLAMA_8B["vocab_size"])
    rows = [{"engine": "transformers", "cap_gib": arguments.cap_gib, **_transformers(texts)}]
    print(rows[-1], flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = random_model("bf16", LLAMA_8B | {"num_hidden_layers": arguments.layers})
    only_one_recording(CAPPED_BATCH)
    tokens = CAPPED_BATCH * (PROMPT_TOKENS + NEW_TOKENS)
    engine = engine_around(
        model,
        max_num_seqs=CAPPED_BATCH,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        cache_max_entry_count=-(-tokens // 64) + CAPPED_BATCH,
    )
    seconds = generate(engine, texts, NEW_TOKENS)
    rows.append(
        {
            "engine": "deliver",
            "cap_gib": arguments.cap_gib,
            "outcome": f"{CAPPED_BATCH} x {NEW_TOKENS} tokens in {seconds:.2f} s",
            "plan_gib": round(engine.plan.total_bytes / 2**30, 2),
            "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        }
    )
    more = generate(engine, prompts(3 * CAPPED_BATCH, LLAMA_8B["vocab_size"]), 2)
    rows[-1]["queued"] = f"{3 * CAPPED_BATCH} requests served in {more:.2f} s"
    print(rows[-1], flush=True)
    engine.close()
    return rows


def _transformers(texts: list[list[int]]) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {k: v for k, v in LLAMA_8B.items() if k not in ("architectures", "model_type", "torch_dtype")}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
        ids = torch.tensor(texts, device="cuda")
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
        outcome = "served"
    except torch.OutOfMemoryError as error:
        outcome = f"out of memory: {str(error)[:90]}"
    finally:
        torch.set_default_dtype(torch.float32)
    return {"outcome": outcome, "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("section", choices=("kv", "cap"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cap-gib", type=float, default=18.25)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = {"kv": kv, "cap": cap}[arguments.section](arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
