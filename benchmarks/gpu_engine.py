"""The whole engine on a GPU, in the protocol of the anchors: an 8B Llama of random weights, prompts of
1,024 tokens, 128 new tokens, greedy, no prefix cache; TPOT = (total − prefill) / 127. No waiting for requests
to join a batch (`wait_time_ms`), which the anchors do not have either.

    python benchmarks/gpu_engine.py [bf16 w4a16 int8 fp8] [--batches 1,16,64,256]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_checks import in_processes
from gpu_linear import FAMILIES, SHAPES
from torch.profiler import ProfilerActivity
from torch.profiler import profile as record

from delivery.engine import assemble as assembling
from delivery.engine import core
from delivery.engine.assemble import Assembled, activation_dtype, around, device_forms
from delivery.engine.engine_model import load_model
from delivery.engine.options import EngineOptions
from delivery.engine.request import Request, SamplingParams
from delivery.kernels.tuning import ROW_BUCKETS, Choice, Tile, choice_for
from delivery.model.load import load_config
from delivery.qtensor import QTensor

PROMPT_TOKENS, NEW_TOKENS = 1024, 128
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
}


class RandomWeights:
    """A WeightSource that draws weights on the device; linear layers in the asked-for form."""

    def __init__(self, config: dict[str, Any], form: str) -> None:
        self._config = config
        self._form = form

    def has(self, name: str) -> bool:
        return name.endswith(".weight")

    def tensor(self, name: str, device: Any = "cpu") -> torch.Tensor:
        return torch.ones(self._config["hidden_size"], dtype=torch.bfloat16, device=device)

    def weight(self, prefix: str, device: Any = "cpu") -> torch.Tensor | QTensor:
        n, k = self._shape(prefix)
        if self._form == "bf16" or "layers" not in prefix:
            return torch.randn(n, k, dtype=torch.bfloat16, device=device) * k**-0.5
        if self._form == "w4a16":
            qdata = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
            scale = (
                torch.rand(n, k // 128, device=device, dtype=torch.float32) * 0.2 * k**-0.5 + 0.05 * k**-0.5
            )
            zero = torch.full((n, k // 128), 8, dtype=torch.uint8, device=device)
            return QTensor(qdata, scale.to(torch.float16), zero, 128, 4)
        dtype = torch.int8 if self._form == "int8" else torch.float8_e4m3fn
        scale = torch.full((n, 1), k**-0.5 / (40.0 if dtype == torch.int8 else 1.0), device=device)
        if dtype == torch.int8:
            qdata = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
        else:
            qdata = torch.randn(n, k, device=device).to(dtype)
        return QTensor(qdata, scale, None, -1, 8, act_dtype=dtype)

    def _shape(self, prefix: str) -> tuple[int, int]:
        c = self._config
        h, i, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
        kv = c["num_key_value_heads"] * c["head_dim"]
        return {
            "q_proj": (h, h),
            "k_proj": (kv, h),
            "v_proj": (kv, h),
            "o_proj": (h, h),
            "gate_proj": (i, h),
            "up_proj": (i, h),
            "down_proj": (h, i),
            "embed_tokens": (v, h),
            "lm_head": (v, h),
        }[prefix.rpartition(".")[2]]


def random_engine(form: str, config: dict[str, Any], **options: Any) -> core.EngineCore:
    """An EngineCore over random weights; nothing is written to disk."""

    def make(path: Path, given: EngineOptions) -> Assembled:
        parsed = load_config(config)
        dtype = activation_dtype(given.dtype, "cuda", parsed)
        place = torch.device("cuda")
        with torch.inference_mode():
            model = load_model(RandomWeights(config, form), parsed, place, device_forms("cuda", dtype))
        return around(model, given, "cuda", None)

    original: Callable[..., Assembled] = assembling.assemble
    core.assemble = make
    try:
        with tempfile.TemporaryDirectory() as empty:
            return core.EngineCore(
                Path(empty), device="cuda", prefix_cache=False, wait_time_ms=0.0, **options
            )
    finally:
        core.assemble = original


def compile_linears(forms: list[str]) -> None:
    """Compile the linear kernels that the forms take, in many processes; an engine would do it one by one."""
    names = {"bf16": "w16a16", "w4a16": "w4a16", "int8": "w8a8int8", "fp8": "w8a8fp8"}
    tasks: dict[tuple[str, Tile], tuple[str, int, int, int, Choice]] = {}
    for name in {names[form] for form in forms} | {"w16a16"}:
        for n, k in SHAPES.values():
            for rows in ROW_BUCKETS:
                choice = choice_for(FAMILIES[name].key, n, k, rows)
                if choice is not None and choice.tile is not None:
                    tasks.setdefault((name, choice.tile), (name, n, k, rows, choice))
    in_processes(_run_once, list(tasks.values()))


def _run_once(task: tuple[str, int, int, int, Choice]) -> None:
    name, n, k, rows, choice = task
    family = FAMILIES[name]
    family.run(family.activations(rows, k), family.weight(n, k), choice)
    torch.cuda.synchronize()


def generate(engine: core.EngineCore, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds until every prompt has its tokens."""
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(f"r{started}-{index}", list(prompt), sampling))
    count = 0
    while engine.has_unfinished():
        count += sum(len(o.new_token_ids) for o in engine.step())
    torch.cuda.synchronize()
    assert count == new_tokens * len(prompts), (count, new_tokens, len(prompts))
    return time.perf_counter() - started


def measure(engine: core.EngineCore, batch: int, repeats: int = 2) -> dict[str, float]:
    """The anchors' figures at one batch size; the best of `repeats` after a warm-up."""
    generator = torch.Generator().manual_seed(batch)
    vocabulary = engine.config.vocab_size
    prompts = torch.randint(0, vocabulary, (batch, PROMPT_TOKENS), generator=generator).tolist()
    generate(engine, prompts, 2)
    prefill_s = min(generate(engine, prompts, 1) for _ in range(repeats))
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    total_s = min(generate(engine, prompts, NEW_TOKENS) for _ in range(repeats))
    after = torch.cuda.memory_stats()["segment.all.allocated"]
    return {
        "batch": batch,
        "prefill_s": round(prefill_s, 4),
        "total_s": round(total_s, 4),
        "prefill_tok_s": round(batch * PROMPT_TOKENS / prefill_s),
        "tpot_ms": round((total_s - prefill_s) / (NEW_TOKENS - 1) * 1e3, 3),
        "new_segments": after - before,
    }


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f}"


def anchor(form: str, batch: int) -> dict[str, float]:
    path = Path(__file__).parent / "anchors" / f"vllm-{form}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return next((row for row in rows if row["batch"] == batch), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", default=["bf16", "w4a16", "int8", "fp8"])
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    started = time.perf_counter()
    compile_linears(arguments.forms)
    print(f"linear kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for form in arguments.forms:
        started = time.perf_counter()
        engine = random_engine(form, LLAMA_8B | {"num_hidden_layers": arguments.layers}, max_num_seqs=256)
        plan = engine.plan
        peak = torch.cuda.max_memory_allocated()
        print(
            f"{form}: loaded in {time.perf_counter() - started:.1f} s, weights {gib(plan.weights_bytes)}, "
            f"plan {gib(plan.total_bytes)}, allocated {gib(peak)} GiB",
            flush=True,
        )
        for batch in map(int, arguments.batches.split(",")):
            row = {"form": form, **measure(engine, batch)}
            peer = anchor(form, batch)
            rows.append(
                row | {"vllm_tpot_ms": peer.get("tpot_ms"), "vllm_prefill": peer.get("prefill_tok_s")}
            )
            print("  ", rows[-1], flush=True)
        print(
            f"   plan {plan.total_bytes / 2**30:.2f} GiB, measured peak "
            f"{torch.cuda.max_memory_reserved() / 2**30:.2f} GiB reserved",
            flush=True,
        )
        if arguments.profile:
            profile(engine)
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def profile(engine: core.EngineCore) -> None:
    """Device time by kernel of eight prompts; host time by function of the same; one layer of a decode step
    at batch 1, kernel by kernel, with the time at which each starts and ends."""
    prompts = [[7] * PROMPT_TOKENS for _ in range(8)]
    with record(activities=[ProfilerActivity.CUDA]) as seen:
        generate(engine, prompts, 1)
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=50))
    host = cProfile.Profile()
    host.enable()
    for _ in range(4):
        generate(engine, prompts, 1)
    host.disable()
    pstats.Stats(host).sort_stats("tottime").print_stats(28)
    for batch in (1, 64):
        with record(activities=[ProfilerActivity.CUDA]) as seen:
            generate(engine, [[7] * PROMPT_TOKENS for _ in range(batch)], 8)
        kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels.sort(key=lambda e: e.time_range.start)
        middle = len(kernels) - 150
        begin = kernels[middle].time_range.start
        print(f"batch {batch}: start, end, duration in us of kernels in a row")
        for e in (*kernels[middle : middle + 21], *kernels[-24:]):
            at = e.time_range
            print(f"{at.start - begin:9.1f} {at.end - begin:9.1f} {at.end - at.start:7.1f}  {e.name[:70]}")


if __name__ == "__main__":
    main()
