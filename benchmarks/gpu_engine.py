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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_card import Watch
from gpu_checks import in_processes
from gpu_linear import FAMILIES, SHAPES, describe
from gpu_profile import decode_profile, prefill_profile
from gpu_steps import recorded, report
from gpu_timing import Compiled, graph_us
from gpu_weights import KINDS, LLAMA_8B, RandomWeights

from delivery.engine import assemble as assembling
from delivery.engine import core
from delivery.engine.assemble import Assembled, activation_dtype, around, device_forms
from delivery.engine.engine_model import EngineModel, load_model
from delivery.engine.options import EngineOptions
from delivery.engine.request import Request, SamplingParams
from delivery.engine.tune import measured, narrowed
from delivery.kernels.tuning import (
    ROW_BUCKETS,
    Choice,
    Key,
    Tile,
    TuningTable,
    choice_for,
    install,
    installed,
    shipped,
)
from delivery.model.load import load_config

PROMPT_TOKENS, NEW_TOKENS = 1024, 128


def random_model(form: str, config: dict[str, Any], kind: str = "random") -> EngineModel:
    """A model of random weights on the device."""
    parsed = load_config(config)
    forms = device_forms("cuda", activation_dtype("auto", "cuda", parsed))
    with torch.inference_mode():
        return load_model(RandomWeights(config, form, kind), parsed, torch.device("cuda"), forms)


def tune(model: EngineModel, rows: list[int]) -> TuningTable:
    """Measure the model's layers at those row counts and install that beside the table of this card."""

    def time_us(calls: Sequence[Callable[[], object]]) -> float:
        return graph_us(calls, launches=max(4, len(calls)), replays=5)

    with torch.inference_mode():
        found = measured(model, rows, time_us, sampled=256)
    known = shipped(torch.cuda.get_device_name()).choices
    for key, choice in found.choices.items():
        print("   tuned", key, describe(choice), "was", describe(known[key]) if key in known else None)
    install(TuningTable({**known, **installed().choices, **found.choices}))
    return found


def engine_around(model: EngineModel, **options: Any) -> core.EngineCore:
    """An EngineCore over a model in memory; nothing is written to disk."""

    def make(path: Path, given: EngineOptions) -> Assembled:
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


def compile_linears(forms: list[str], tuned_rows: list[int]) -> None:
    """Compile the linear kernels that the forms take, and all that are tried at `tuned_rows`, in many
    processes; an engine would do it one by one."""
    names = {"bf16": "w16a16", "w4a16": "w4a16", "int8": "w8a8int8", "fp8": "w8a8fp8"}
    tasks: dict[tuple[str, Tile], tuple[str, int, int, int, Choice]] = {}
    for name in {names[form] for form in {*forms, "bf16"}}:
        for n, k in SHAPES.values():
            for rows in ROW_BUCKETS:
                choice = choice_for(FAMILIES[name].key, n, k, rows)
                tried = narrowed(FAMILIES[name].candidates(n, k, rows)) if rows in tuned_rows else []
                for each in (choice, *tried):
                    if each is not None and each.tile is not None:
                        tasks.setdefault((name, each.tile), (name, n, k, rows, each))
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


@contextmanager
def no_overlap() -> Iterator[None]:
    """Norms, activations, rotation and attention wait for the kernel in front to end."""
    users = [m for name, m in sys.modules.items() if name.startswith("delivery.kernels.gpu.")]
    users = [m for m in users if hasattr(m, "overlaps") and not m.__name__.endswith(".overlap")]
    before = [m.overlaps for m in users]
    for module in users:
        module.overlaps = lambda _: False
    try:
        yield
    finally:
        for module, function in zip(users, before, strict=True):
            module.overlaps = function


def replay_differs(engine: core.EngineCore) -> int:
    """Of 24 greedy tokens behind one prompt, how many differ between recorded steps and steps launched
    kernel by kernel without overlap, at the same numbers of rows."""
    prompt = torch.randint(0, engine.config.vocab_size, (PROMPT_TOKENS,)).tolist()
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    runner = engine._runner
    recordings = runner.recorded, runner.mixed

    def tokens(name: str) -> list[int]:
        engine.add_request(Request(name, prompt, sampling))
        made: list[int] = []
        while engine.has_unfinished():
            made += [t for output in engine.step() for t in output.new_token_ids]
        return made

    recorded = tokens("recorded")
    runner.recorded = runner.mixed = None
    with no_overlap():
        launched = tokens("launched")
    runner.recorded, runner.mixed = recordings
    return sum(a != b for a, b in zip(recorded, launched, strict=True))


def prompts_of(engine: core.EngineCore, batch: int) -> list[list[int]]:
    """`batch` prompts of random tokens, the same every time."""
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, PROMPT_TOKENS)
    prompts: list[list[int]] = torch.randint(0, engine.config.vocab_size, shape, generator=generator).tolist()
    return prompts


def measure(engine: core.EngineCore, batch: int, repeats: int = 2) -> dict[str, Any]:
    """The anchors' figures at one batch size; the best of `repeats` after a warm-up."""
    prompts = prompts_of(engine, batch)
    with Compiled() as first:
        generate(engine, prompts, 2)
    with Watch() as card:
        prefill_s = min(generate(engine, prompts, 1) for _ in range(repeats))
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    totals_s = []
    with Compiled() as compiled:
        for _ in range(repeats):
            with Watch(skip=0.75) as decoding:
                totals_s.append(generate(engine, prompts, NEW_TOKENS))
    total_s = min(totals_s)
    after = torch.cuda.memory_stats()["segment.all.allocated"]
    return {
        "batch": batch,
        "prefill_s": round(prefill_s, 4),
        "total_s": round(total_s, 4),
        "prefill_tok_s": round(batch * PROMPT_TOKENS / prefill_s),
        "tpot_ms": round((total_s - prefill_s) / (NEW_TOKENS - 1) * 1e3, 3),
        "new_segments": after - before,
        "compiled": first.names + compiled.names,
        "prefill_mhz": card.clock_mhz,
        "prefill_w": round(card.power_w),
        "prefill_capped": round(card.capped, 2),
        "decode_mhz": decoding.clock_mhz,
        "decode_w": round(decoding.power_w),
        "decode_capped": round(decoding.capped, 2),
    }


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f}"


def anchor(form: str, batch: int) -> dict[str, float]:
    path = Path(__file__).parent / "anchors" / f"vllm-{form}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return next((row for row in rows if row["batch"] == batch), {})


def transformers_tpot_ms(batch: int) -> float | None:
    """Of transformers' `generate` in bf16; None where it was not measured."""
    rows = json.loads((Path(__file__).parent / "anchors" / "hf.json").read_text())
    rate = next((row["decode_tok_s"] for row in rows if row["batch"] == batch), None)
    return None if rate is None else round(batch / rate * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", default=["bf16", "w4a16", "int8", "fp8"])
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--weights", choices=KINDS, default="random")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--steps", action="store_true", help="print what each kind of step takes")
    parser.add_argument("--step-tokens", type=int, default=8192, help="the most tokens of a step")
    parser.add_argument("--host", action="store_true", help="print where the host's time goes")
    parser.add_argument("--tune", default="", help="row counts at which layers are measured first: 512,8192")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    tables: dict[Key, Choice] = {}
    started = time.perf_counter()
    tuned_rows = [int(rows) for rows in arguments.tune.split(",") if rows]
    compile_linears(arguments.forms, tuned_rows)
    print(f"linear kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)
    for form in arguments.forms:
        started = time.perf_counter()
        model = random_model(form, LLAMA_8B | {"num_hidden_layers": arguments.layers}, arguments.weights)
        print(f"{form}: weights made in {time.perf_counter() - started:.1f} s", flush=True)
        if tuned_rows:
            tables.update(tune(model, tuned_rows).choices)
            print(f"{form}: measured at {time.perf_counter() - started:.1f} s", flush=True)
            if arguments.json:
                arguments.json.with_suffix(".table.json").write_text(TuningTable(tables).to_json())
        started = time.perf_counter()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        engine = engine_around(model, max_num_seqs=256, max_num_batched_tokens=arguments.step_tokens)
        del model
        plan = engine.plan
        peak = torch.cuda.max_memory_allocated()
        print(
            f"{form}: recorded in {time.perf_counter() - started:.1f} s, weights {gib(plan.weights_bytes)}, "
            f"plan {gib(plan.total_bytes)}, allocated {gib(peak)} GiB",
            flush=True,
        )
        print(f"   {replay_differs(engine)} of 24 tokens differ without recordings and overlap", flush=True)
        for batch in map(int, arguments.batches.split(",")):
            row = {
                "form": form,
                "weights": arguments.weights,
                **measure(engine, batch, 2 if batch < 256 else 1),
            }
            peer = anchor(form, batch)
            theirs = {"vllm_tpot_ms": peer.get("tpot_ms"), "vllm_prefill": peer.get("prefill_tok_s")}
            rows.append(row | theirs | {"transformers_tpot_ms": transformers_tpot_ms(batch)})
            print("  ", rows[-1], flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))
        print(
            f"   plan {plan.total_bytes / 2**30:.2f} GiB, measured peak "
            f"{torch.cuda.max_memory_reserved() / 2**30:.2f} GiB reserved",
            flush=True,
        )
        largest = max(map(int, arguments.batches.split(",")))
        if arguments.steps:
            with recorded(engine) as steps:
                generate(engine, prompts_of(engine, largest), NEW_TOKENS)
            report(steps)
        if arguments.profile:
            prefill_profile(engine)
            decode_profile(engine, 1)
            decode_profile(engine, largest)
        if arguments.host:
            host_profile(engine)
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def host_profile(engine: core.EngineCore) -> None:
    """Host time by function of a step that is launched kernel by kernel."""
    host = cProfile.Profile()
    host.enable()
    for _ in range(3):
        generate(engine, [[7] * PROMPT_TOKENS for _ in range(8)], 1)
    host.disable()
    pstats.Stats(host).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
