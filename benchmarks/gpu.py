"""Everything on the card: correctness first, then our figures beside those of other engines.

    python benchmarks/gpu.py                              linear layers: check, tune, time, print
    python benchmarks/gpu.py --ops w4a16 --rows 1,16      part of it
    python benchmarks/gpu.py --attention                  attention and fused kernels (gpu_attention.py)
    python benchmarks/gpu.py --table out.json             also write the tuning table
    python benchmarks/gpu.py --baseline                   also write baselines/gpu-kernels/<device>.json

A check that fails ends the run before anything is timed. Anchors: benchmarks/anchors/*.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for; 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", default="w4a16,w8a8int8,w8a8fp8,w16a16")
    parser.add_argument("--rows", default="1,4,16,64,256,2048")
    parser.add_argument("--shapes", default="qkv,o,gate_up,down")
    parser.add_argument("--skip-cases", action="store_true", help="not the operators' own cases")
    parser.add_argument(
        "--keep-going", action="store_true", help="time what can be timed after a failed check"
    )
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--baseline", action="store_true")
    options = parser.parse_args(arguments)
    if options.attention:
        import gpu_attention

        return int(gpu_attention.main([]) or 0)
    return _linear(options)


def _linear(options: argparse.Namespace) -> int:
    import gpu_linear
    from gpu_timing import copy_bandwidth

    names = options.ops.split(",")
    rows = [int(m) for m in options.rows.split(",")]
    started = time.monotonic()
    checks = [] if options.skip_cases else gpu_linear.check()
    checks += gpu_linear.check_tiles(names, rows)
    failed = [c for c in checks if not c.ok]
    for c in failed:
        print(f"FAILED {c.name}: error {c.error:.2e}, allowed {c.allowed:.0e} {c.problem}")
    print(
        f"{len(checks) - len(failed)} of {len(checks)} checks passed in {time.monotonic() - started:.0f} s",
        flush=True,
    )
    if failed and not options.keep_going:
        return 1
    measured: list[dict[str, Any]] = []
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    print("op        shape        M       us   floor  of it     peer  ratio  ours / theirs", flush=True)
    for name in names:
        for shape in options.shapes.split(","):
            measured += gpu_linear.measure_shape(name, shape, rows)
            _print(
                {k: v for k, v in gpu_linear.best_of(measured).items() if k[:2] == (name, shape)}, bandwidth
            )
        print(f"{name} done at {time.monotonic() - started:.0f} s", flush=True)
    best = gpu_linear.best_of(measured)
    for row in (*gpu_linear.without_overlap(best), *gpu_linear.measure_quantize()):
        print(*(row[k] for k in ("op", "shape", "M", "impl", "us", "gbs")), flush=True)
    if options.table:
        options.table.write_text(gpu_linear.table_of(measured).to_json() + "\n", "utf-8")
    plain = [{k: v for k, v in row.items() if k != "choice"} for row in measured]
    if options.json:
        options.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in plain) + "\n]\n", "utf-8")
    if options.baseline:
        _write_baseline(best, bandwidth)
    return 1 if failed else 0


def anchors() -> dict[tuple[str, str, int], tuple[str, float]]:
    """(op, shape, M) → the best other engine and its µs."""
    best: dict[tuple[str, str, int], tuple[str, float]] = {}
    for row in json.loads((ROOT / "benchmarks/anchors/kernels.json").read_text("utf-8")):
        key = row["op"], row["shape"], row["M"]
        if key not in best or row["us"] < best[key][1]:
            best[key] = row["impl"], row["us"]
    return best


def _print(best: dict[tuple[str, str, int], dict[str, Any]], bandwidth: float) -> None:
    import gpu_linear

    peers = anchors()
    for (op, shape, m), row in best.items():
        n, k = gpu_linear.SHAPES[shape]
        memory_us = gpu_linear.bytes_moved(op, n, k, m) / bandwidth * 1e6
        peak = 1580e12 if op.startswith("w8a8") else 790e12
        floor = max(memory_us, 2 * n * k * m / peak * 1e6)
        impl, peer = peers.get((op, shape, m), ("none", float("nan")))
        print(
            f"{op:9} {shape:8} {m:5} {row['us']:8.2f} {floor:7.2f} {floor / row['us']:6.0%} {peer:8.2f} "
            f"{row['us'] / peer:6.2f}  {row['impl']} / {impl}",
            flush=True,
        )


def _write_baseline(best: dict[tuple[str, str, int], dict[str, Any]], bandwidth: float) -> None:
    from dataclasses import asdict

    import torch
    import triton

    from delivery.device import fingerprint

    device = fingerprint("cuda")
    rows = [{k: v for k, v in row.items() if k != "choice"} for row in best.values()]
    record = {
        "device": asdict(device),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "copy_bandwidth_gbs": round(bandwidth / 1e9),
        "rows": rows,
    }
    out = ROOT / "baselines" / "gpu-kernels" / f"{device.slug}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"wrote {out.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
