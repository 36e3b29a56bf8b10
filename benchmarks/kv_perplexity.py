"""What a quantised KV cache costs in quality: held-out perplexity of one model under every KV type.

    python benchmarks/kv_perplexity.py CHECKPOINT [--kv auto int8 fp8 int4] [--windows 16] [--tokens 512]

The texts are the held-out parts of the built-in corpora, the same windows for every type, scored through the
engine, so that every key and value is read back from the paged cache. `change` is the difference of the mean
negative log-probabilities to the first type, per token in nats, with the standard error of that difference
over windows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from delivery.checkpoint import Checkpoint
from delivery.corpus import builtin_names, heldout_windows
from delivery.engine import LLM

KV_TYPES = ("auto", "int8", "fp8", "int4")


def window_losses(
    checkpoint: Path, kv: str, device: str, windows: dict[str, list[list[int]]]
) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Corpus → negative log-probabilities of each window's tokens after its first."""
    longest = max(len(ids) for texts in windows.values() for ids in texts)
    with LLM(checkpoint, device=device, kv=kv, max_model_len=longest + 1, max_num_seqs=1) as engine:
        return {name: [-scores for scores in engine.score(texts)] for name, texts in windows.items()}


def row(
    corpus: str, kv: str, losses: list[np.ndarray[Any, Any]], before: list[np.ndarray[Any, Any]]
) -> dict[str, Any]:
    """Perplexity over all tokens, and the paired change."""
    everything = np.concatenate(losses)
    changes = np.array([float((a - b).mean()) for a, b in zip(losses, before, strict=True)])
    return {
        "corpus": corpus,
        "kv": kv,
        "tokens": int(everything.size),
        "perplexity": round(float(np.exp(everything.mean(dtype=np.float64))), 4),
        "change_nats": round(float(changes.mean()), 5),
        "standard_error": round(float(changes.std(ddof=1) / np.sqrt(changes.size)), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--kv", nargs="+", default=KV_TYPES, choices=KV_TYPES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    options = parser.parse_args()
    tokenizer = Checkpoint.open(options.checkpoint).tokenizer()
    windows = dict(heldout_windows(builtin_names(), tokenizer, options.windows, options.tokens))
    rows, first = [], {}
    for kv in options.kv:
        losses = window_losses(options.checkpoint, kv, options.device, windows)
        first = first or losses
        for corpus, found in losses.items():
            rows.append(row(corpus, kv, found, first[corpus]))
            print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
