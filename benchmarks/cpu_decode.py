"""Decode and prefill on this machine's CPU: our engine beside transformers and llama.cpp, in one run.

    python benchmarks/cpu_decode.py CHECKPOINT [QUANTISED ...] [--llama-cpp GGUF] [--tokens 64]
        [--prefill 512] [--repeats 3]

Every candidate is loaded once; then they take turns, so that a change of the machine's mood meets all of
them. Each figure is the best of its repeats, in tokens per second, with the median in brackets. llama.cpp
runs by the package `llama_cpp` (llama-cpp-python), one request at a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch

from delivery.engine import LLM, SamplingParams

PROMPT_TOKENS = 32
BATCHES = (1, 4, 8, 16)


class Candidate(ABC):
    """Something that generates, timed."""

    name: str
    weights_bytes: int
    most_requests = BATCHES[-1]

    def decode(self, batch: int, tokens: int) -> float:
        """Tokens a second after the first ones, over a batch."""
        prompts = [[5 + i] * PROMPT_TOKENS for i in range(batch)]
        once = self.seconds(prompts, 1)
        return batch * (tokens - 1) / (self.seconds(prompts, tokens) - once)

    def prefill(self, tokens: int) -> float:
        """Tokens a second of one prompt."""
        return tokens / self.seconds([list(range(5, 5 + tokens))], 1)

    @abstractmethod
    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """How long `tokens` greedy tokens for each prompt take."""


class Ours(Candidate):
    """The engine over a checkpoint or an engine directory."""

    def __init__(self, path: str, tokens: int) -> None:
        self.name = f"ours {Path(path).name}"
        self._llm = LLM(
            path, device="cpu", prefix_cache=False, max_num_batched_tokens=1024, max_model_len=2048
        )
        self.weights_bytes = self._llm.stats().weights_bytes

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        started = time.perf_counter()
        self._llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
        return time.perf_counter() - started


class Theirs(Candidate):
    """transformers' `generate` in float32."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.name = "transformers float32"
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.weights_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - started


class LlamaCpp(Candidate):
    """llama.cpp's greedy generation over a GGUF file."""

    most_requests = 1

    def __init__(self, path: str, threads: int) -> None:
        from llama_cpp import Llama

        self.name = f"llama.cpp {Path(path).name}"
        self._model = Llama(
            path, n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self.weights_bytes = Path(path).stat().st_size

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        self._model.reset()
        started = time.perf_counter()
        self._model.eval(prompts[0])
        for _ in range(tokens - 1):
            self._model.eval([self._model.sample(temp=0.0)])
        self._model.sample(temp=0.0)
        return time.perf_counter() - started


def measure(
    candidates: list[Candidate], run: Callable[[Candidate], float], repeats: int, requests: int = 1
) -> list[dict[str, float] | None]:
    """Best and median tokens a second of every candidate, interleaved; None of those that cannot."""
    seen: list[list[float]] = [[] for _ in candidates]
    for _ in range(repeats):
        for figures, candidate in zip(seen, candidates, strict=True):
            if requests <= candidate.most_requests:
                figures.append(run(candidate))
    return [{"best": max(f), "median": statistics.median(f)} if f else None for f in seen]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="the float model, also run with transformers")
    parser.add_argument("quantised", nargs="*", help="more checkpoints or engines of the same model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--llama-cpp", metavar="GGUF", help="the same model for llama.cpp")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    candidates: list[Candidate] = [] if options.no_transformers else [Theirs(options.checkpoint)]
    candidates += [Ours(path, options.tokens) for path in (options.checkpoint, *options.quantised)]
    if options.llama_cpp:
        candidates.append(LlamaCpp(options.llama_cpp, options.threads))
    gc.collect()
    for candidate in candidates:  # compiles, allocates, touches every weight
        candidate.decode(1, 4)
        candidate.prefill(64)
    rows: dict[str, list[dict[str, float] | None]] = {}
    for batch in options.batches:
        name = f"decode, batch {batch}"
        rows[name] = measure(
            candidates, lambda c, b=batch: c.decode(b, options.tokens), options.repeats, batch
        )
    name = f"prefill, {options.prefill}"
    rows[name] = measure(candidates, lambda c: c.prefill(options.prefill), options.repeats)
    width = max(len(c.name) for c in candidates)
    print(f"{'tokens/s: best (median)':24}" + "".join(f"{c.name:>{width + 2}}" for c in candidates))
    for name, figures in rows.items():
        cells = ["" if f is None else f"{f['best']:.1f} ({f['median']:.1f})" for f in figures]
        print(f"{name:24}" + "".join(f"{cell:>{width + 2}}" for cell in cells))
    print(f"{'weights, MB':24}" + "".join(f"{c.weights_bytes / 1e6:>{width + 2}.0f}" for c in candidates))
    if options.json:
        found = {c.name: {name: rows[name][i] for name in rows} for i, c in enumerate(candidates)}
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
