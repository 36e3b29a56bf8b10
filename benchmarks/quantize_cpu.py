"""What calibrating and quantising cost on a CPU, against transformers' forward pass over the same tokens.

    python benchmarks/quantize_cpu.py CHECKPOINT                            16 x 256 tokens, AWQ at group 64
    OMP_NUM_THREADS=1 python benchmarks/quantize_cpu.py CHECKPOINT --cpu-time    where other work runs too

Allowed: 3.5 forward passes and 60 seconds for both steps together, process starts included. Seconds are
those of the clock, or with --cpu-time those that processes were running, which neighbours lengthen much less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

_PASSES, _SECONDS = 3.5, 60.0


def main() -> int:
    """Run both steps and the forward pass; 0 when the steps stayed within what is allowed, else 3."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--samples", default="16")
    parser.add_argument("--length", default="256")
    parser.add_argument("--scheme", default="awq-w4a16")
    parser.add_argument("--cpu-time", action="store_true", help="count processor seconds")
    parser.add_argument("extra", nargs="*", help="more options of `deliver quantize`, after --")
    args = parser.parse_args()
    clock = cpu_seconds if args.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        common = ["--workdir", work / "w", "--device", "cpu"]
        corpus = ["--samples", args.samples, "--sequence-length", args.length]
        source = ["--checkpoint", args.checkpoint]
        calibrate_s = deliver(clock, "calibrate", *source, *corpus, "--out", work / "cal", *common)
        tokens = load_file(work / "cal" / "tokens.safetensors")
        lengths = tokens["lengths"].tolist()
        samples = tokens["token_ids"].long().split(lengths)
        # Between the steps and after them, since other work on the machine comes and goes.
        forwards = [forward(clock, args.checkpoint, samples)]
        scheme = ["--scheme", args.scheme, "--group-size", "64", *args.extra]
        inputs = [*source, "--calibration", work / "cal"]
        quantize_s = deliver(clock, "quantize", *inputs, *scheme, "--out", work / "q", *common)
        forwards.append(forward(clock, args.checkpoint, samples))
    allowed_s = _PASSES * sum(forwards) / len(forwards) + _SECONDS
    row = {
        "tokens": sum(lengths),
        "threads": torch.get_num_threads(),
        "clock": "cpu" if args.cpu_time else "wall",
        "load": [round(x, 1) for x in os.getloadavg()],
        "forward_s": [round(s, 1) for s in forwards],
        "calibrate_s": round(calibrate_s, 1),
        "quantize_s": round(quantize_s, 1),
        "allowed_s": round(allowed_s, 1),
        "passed": calibrate_s + quantize_s <= allowed_s,
    }
    print(json.dumps(row))
    return 0 if row["passed"] else 3


def cpu_seconds() -> float:
    """Seconds that this process and those it waited for were running."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def deliver(clock: Callable[[], float], *arguments: object) -> float:
    """Seconds of one command, its start included."""
    start = clock()
    command = [sys.executable, "-c", "import sys; from delivery.cli import main; sys.exit(main())"]
    subprocess.run([*command, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)
    return clock() - start


@torch.no_grad()
def forward(clock: Callable[[], float], checkpoint: Path, samples: tuple[torch.Tensor, ...]) -> float:
    """Seconds of transformers' float32 forward pass over all samples, in batches of about 512 tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model(samples[0][None])
    batch = max(1, 512 // len(samples[0]))
    start = clock()
    for i in range(0, len(samples), batch):
        group = samples[i : i + batch]
        for length in {len(s) for s in group}:
            model(torch.stack([s for s in group if len(s) == length]))
    return clock() - start


if __name__ == "__main__":
    sys.exit(main())
