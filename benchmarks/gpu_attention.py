"""Attention and the fused elementwise kernels on a GPU, in microseconds beside published peers.

    python benchmarks/gpu_attention.py                        everything
    python benchmarks/gpu_attention.py decode prefill fused   some of it
    python benchmarks/gpu_attention.py candidates             tile shapes of the decode kernel
    python benchmarks/gpu_attention.py --json out.json

Every cell is checked against the float64 reference before it is timed. Times are medians of CUDA graph
replays over inputs that rotate through more memory than the L2 cache holds. Shape: Llama-3-8B (32 query
heads, 8 kv heads, head_dim 128, hidden 4096, MLP 14336, vocabulary 128256), bf16, pages of 64 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from delivery.kernels import OPS
from delivery.kernels.gpu.decode_config import DecodeConfig, decode_candidates
from delivery.kernels.kv_layout import LAYOUTS, kv_layout

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
HIDDEN, MLP, VOCABULARY = 4096, 14336, 128256
BLOCK_SIZE = 64
L2_BYTES = 256e6
"""Inputs rotate through at least this much."""
COPY_TB_S, BF16_TFLOP_S = 4.2, 790
"""Ceilings measured on an H200: a large copy (read plus written), a large bf16 product."""
DTYPE = torch.bfloat16

# (batch, context): microseconds of FlashAttention-3, paged, on an H200.
DECODE_PEERS = {
    (1, 1152): 15.0,
    (1, 8192): 19.6,
    (16, 1152): 31.0,
    (64, 1152): 87.9,
    (64, 4096): 257.0,
    (256, 1152): 311.0,
}
# (batch, tokens): TFLOP/s of torch's cuDNN attention.
PREFILL_PEERS = {(8, 1024): 432.0, (1, 8192): 613.0, (1, 32768): 596.0}


@dataclass(frozen=True)
class Row:
    """One cell. `floor_us`: the larger of bytes over bandwidth and operations over the peak rate."""

    op: str
    backend: str
    cell: str
    us: float
    floor_us: float
    peer_us: float | None
    error: float
    gb_s: float
    tflop_s: float

    def text(self) -> str:
        peer = "" if self.peer_us is None else f"peer {self.peer_us:8.1f} x{self.us / self.peer_us:5.2f}"
        rates = f"{self.gb_s:6.0f} GB/s {self.tflop_s:6.1f} TFLOP/s"
        return (
            f"{self.op:22} {self.backend:7} {self.cell:26} {self.us:9.1f} us  floor {self.floor_us:8.1f}  "
            f"{rates}  error {self.error:.1e}  {peer}"
        )


def row(
    op: str,
    backend: str,
    cell: str,
    us: float,
    byte_count: float,
    operations: float,
    error: float,
    peer_us: float | None = None,
) -> Row:
    floor_us = max(byte_count / COPY_TB_S / 1e6, operations / BF16_TFLOP_S / 1e6)
    return Row(op, backend, cell, us, floor_us, peer_us, error, byte_count / us / 1e3, operations / us / 1e6)


def time_us(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds of one call, from replays of a graph of all of them."""
    torch.cuda.synchronize()  # the inputs were made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        for _ in range(2):
            graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
    spans = [a.elapsed_time(b) for a, b in pairwise(events)]
    return statistics.median(spans) * 1e3 / len(calls)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Pool:
    """A paged cache of random keys and values, and tables of blocks drawn from it."""

    def __init__(self, kv_dtype: str, blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.layout, self.block_size, self.blocks = kv_layout(kv_dtype), block_size, blocks
        self.caches = []
        for _ in "kv":
            values, scales = self.layout.allocate(blocks, block_size, KV_HEADS, HEAD_DIM, DTYPE, "cuda")
            for part in range(0, blocks, 256):
                n = min(256, blocks - part)
                x = torch.randn(n * block_size, KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
                stored, stored_scales = self.layout.quantize(x)
                values[part : part + n] = stored.view(n, block_size, KV_HEADS, -1)
                if scales is not None and stored_scales is not None:
                    laid = stored_scales.view(n, block_size, KV_HEADS, -1).permute(0, 2, 3, 1)
                    scales[part : part + n] = laid
            self.caches.append((values, scales))

    def tables(self, batch: int, context: int) -> list[torch.Tensor]:
        """As many [batch, blocks of a sequence] tables as rotate the cache out of L2."""
        each = -(-context // self.block_size)
        size = batch * context * KV_HEADS * 2 * self.layout.token_head_bytes(HEAD_DIM, DTYPE)
        count = max(1, min(int(L2_BYTES // size) + 1, self.blocks // (batch * each)))
        order = torch.randperm(self.blocks, device="cuda")[: count * batch * each].to(torch.int32)
        return list(order.view(count, batch, each))


def attention_args(
    pool: Pool, table: torch.Tensor, queries: int, context: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of paged attention: every sequence has `queries` new tokens at the end of `context`."""
    batch = table.shape[0]
    (k, k_scale), (v, v_scale) = pool.caches
    q = torch.randn(batch * queries, HEADS + 2 * KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)[:, :HEADS]
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * queries
    contexts = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    return (q, k, v, table, starts, contexts, HEAD_DIM**-0.5), {"k_scale": k_scale, "v_scale": v_scale}


def checked(args: tuple[Any, ...], scales: dict[str, Any], out: torch.Tensor) -> float:
    """Error of the last rows of the last sequence."""
    q, k, v, table, starts, contexts, scale = args
    rows = min(48, int(starts[-1] - starts[-2]))
    last = (q[-rows:].double(), k, v, table[-1:], starts[:2].clamp(max=rows), contexts[-1:], scale)
    return relative_error(out[-rows:], OPS["paged_attention"].reference(*last, **scales))


def decode(pools: Iterator[Pool] | None = None) -> Iterator[Row]:
    for pool in pools or (Pool(name, 6144) for name in LAYOUTS):
        for (batch, context), peer in DECODE_PEERS.items():
            sets = [attention_args(pool, table, 1, context) for table in pool.tables(batch, context)]
            error = checked(*sets[0], OPS["paged_attention"](*sets[0][0], **sets[0][1]))
            us = time_us([lambda a=a, s=s: OPS["paged_attention"](*a, **s) for a, s in sets])
            values = batch * context * KV_HEADS
            byte_count = values * 2 * pool.layout.token_head_bytes(HEAD_DIM, DTYPE)
            operations = values * HEADS / KV_HEADS * 4 * HEAD_DIM
            cell = f"{pool.layout.name} {batch} x {context}"
            yield row("decode_attention", "triton", cell, us, byte_count, operations, error, peer)


def prefill() -> Iterator[Row]:
    """Whole prompts and last chunks of long ones over every kind of cache, and cuDNN on whole prompts."""
    for name in LAYOUTS:
        pool = Pool(name, 1024)
        for (batch, tokens), peer in PREFILL_PEERS.items():
            peer_us = _prefill_operations(batch, tokens, tokens) / peer / 1e6
            yield _paged_prefill(pool, batch, tokens, tokens, peer_us)
            if name == "auto":
                yield _dense_prefill(batch, tokens, peer_us)
        for queries, context in ((512, 8192), (2048, 32768)):
            yield _paged_prefill(pool, 1, queries, context, None)


def _prefill_operations(batch: int, queries: int, context: int) -> int:
    return 4 * HEAD_DIM * HEADS * batch * (queries * (context - queries) + queries * (queries + 1) // 2)


def _paged_prefill(pool: Pool, batch: int, queries: int, context: int, peer_us: float | None) -> Row:
    args, scales = attention_args(pool, pool.tables(batch, context)[0], queries, context)
    error = checked(args, scales, OPS["paged_attention"](*args, **scales))
    stored = context * KV_HEADS * 2 * pool.layout.token_head_bytes(HEAD_DIM, DTYPE)
    byte_count = batch * (2 * queries * HEADS * HEAD_DIM * 2 + stored)
    us = time_us([lambda: OPS["paged_attention"](*args, **scales)] * 3, 5)
    cell = f"{pool.layout.name} " + (
        f"{batch} x {context}" if queries == context else f"{queries} of {context}"
    )
    operations = _prefill_operations(batch, queries, context)
    return row("paged prefill", "triton", cell, us, byte_count, operations, error, peer_us)


def _dense_prefill(batch: int, tokens: int, peer_us: float) -> Row:
    prompt = OPS["prompt_attention"]
    byte_count = batch * tokens * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM * 2
    qkv = torch.randn(batch * tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    dense = (*qkv.split((HEADS, KV_HEADS, KV_HEADS), 1), (tokens,) * batch, HEAD_DIM**-0.5)
    out = prompt(*dense, backend="cudnn")
    first = [x[:512].double() for x in dense[:3]]
    error = relative_error(out[:512], prompt.reference(*first, (512,), HEAD_DIM**-0.5))
    us = time_us([lambda: prompt(*dense, backend="cudnn")] * 3, 5)
    operations = _prefill_operations(batch, tokens, tokens)
    return row("prompt attention", "cudnn", f"{batch} x {tokens}", us, byte_count, operations, error, peer_us)


def fused() -> Iterator[Row]:
    """Norms, activation, rotary and sampling: (name, tokens, arguments by token count, bytes a token)."""
    int8, fp8 = torch.int8, torch.float8_e4m3fn
    weight = torch.rand(HIDDEN, device="cuda", dtype=DTYPE)
    norms: dict[str, tuple[Callable[[int], tuple[Any, ...]], int]] = {
        "rms_norm": (lambda t: (_random(t, HIDDEN), weight, 1e-5), 4 * HIDDEN),
        "add_rms_norm": (lambda t: (_random(t, HIDDEN), _random(t, HIDDEN), weight, 1e-5), 8 * HIDDEN),
        "rms_norm_quant": (lambda t: (_random(t, HIDDEN), weight, 1e-5, fp8), 3 * HIDDEN),
        "add_rms_norm_quant": (
            lambda t: (_random(t, HIDDEN), _random(t, HIDDEN), weight, 1e-5, int8),
            7 * HIDDEN,
        ),
        "silu_mul": (lambda t: (_random(t, 2 * MLP),), 6 * MLP),
        "silu_mul_quant": (lambda t: (_random(t, 2 * MLP), int8), 5 * MLP),
        "sample": (_greedy, 2 * VOCABULARY),
    }
    for tokens in (1, 64, 256, 8192):
        for name, (make, token_bytes) in norms.items():
            if name == "sample" and tokens > 256:
                continue
            count = max(1, min(64, int(L2_BYTES // (tokens * token_bytes)) + 1))
            yield _fused_row(
                name, f"{tokens} tokens", [make(tokens) for _ in range(count)], tokens * token_bytes
            )
    for tokens in (1, 64, 256):
        sets = [_nucleus(tokens) for _ in range(4)]
        yield _fused_row("sample", f"{tokens} tokens, top-k top-p", sets, tokens * 2 * VOCABULARY)
    for kv_dtype in LAYOUTS:
        pool = Pool(kv_dtype, 256)
        for tokens in (1, 64, 8192):
            moved = 4 * (HEADS + KV_HEADS) + 2 * KV_HEADS
            stored = 2 * KV_HEADS * pool.layout.token_head_bytes(HEAD_DIM, DTYPE)
            sets = [_rotary(pool, tokens) for _ in range(max(1, min(64, 8192 // tokens)))]
            cell = f"{kv_dtype} {tokens} tokens"
            yield _fused_row("rope_cache_write", cell, sets, tokens * (moved * HEAD_DIM + stored))


def _fused_row(name: str, cell: str, sets: list[tuple[Any, ...]], byte_count: float) -> Row:
    op = OPS[name]
    copies = [a.clone() if isinstance(a, torch.Tensor) and name == "rope_cache_write" else a for a in sets[0]]
    wide = [a.double() if _is_float(a) else a for a in copies]
    want = op.reference(*wide)
    got = op(*sets[0])
    pairs = list(zip(_tuple(got), _tuple(want), strict=True))
    if name == "rope_cache_write":  # what the caches and their scales hold
        pairs += [(a, b) for a, b in zip(sets[0][6:], wide[6:], strict=True) if a is not None]
    error = max(relative_error(a, b) for a, b in pairs)
    us = time_us([lambda a=a: op(*a) for a in sets * max(1, 16 // len(sets))])
    return row(name, "triton", cell, us, byte_count, 0.0, error)


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == DTYPE


def _random(tokens: int, features: int) -> torch.Tensor:
    return torch.randn(tokens, features, device="cuda", dtype=DTYPE)


def _greedy(rows: int) -> tuple[Any, ...]:
    return (*_logits(rows, 0.0), False)


def _nucleus(rows: int) -> tuple[Any, ...]:
    logits, temperature, top_k, top_p, seed, position = _logits(rows, 0.8)
    return logits, temperature, top_k + 50, top_p * 0.9, seed, position, True


def _logits(rows: int, temperature: float) -> tuple[torch.Tensor, ...]:
    index = torch.arange(rows, device="cuda")
    ones = torch.ones(rows, device="cuda")
    top_k = torch.zeros(rows, device="cuda", dtype=torch.int32)
    return _random(rows, VOCABULARY) * 3, ones * temperature, top_k, ones, index, index


def _rotary(pool: Pool, tokens: int) -> tuple[Any, ...]:
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    angle = torch.rand(tokens, HEAD_DIM // 2, device="cuda") * 6
    slots = torch.randperm(pool.blocks * pool.block_size, device="cuda")[:tokens]
    (k_cache, k_scale), (v_cache, v_scale) = pool.caches
    parts = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
    return *parts, angle.cos(), angle.sin(), slots, k_cache, v_cache, k_scale, v_scale


def candidates() -> Iterator[Row]:
    """Every tile shape of the decode kernel in every cell: what `decode_config` is chosen from."""
    for name in LAYOUTS:
        pool = Pool(name, 6144)
        for config in decode_candidates(name):
            for (batch, context), peer in DECODE_PEERS.items():
                sets = [attention_args(pool, table, 1, context) for table in pool.tables(batch, context)]
                out = torch.empty(batch, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
                calls = [partial(_decode_with, *args, scales, out, config) for args, scales in sets]
                calls[0]()
                error = checked(*sets[0], out)
                values = batch * context * KV_HEADS
                byte_count = values * 2 * pool.layout.token_head_bytes(HEAD_DIM, DTYPE)
                shape = f"{config.tile}/{config.stages}/{config.warps}/{config.programs}/{config.registers}"
                cell = f"{name} {batch} x {context} {shape}"
                us = time_us(calls)
                yield row("decode candidate", "triton", cell, us, byte_count, 0.0, error, peer)


def _decode_with(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    _starts: torch.Tensor,
    contexts: torch.Tensor,
    scale: float,
    scales: dict[str, Any],
    out: torch.Tensor,
    config: DecodeConfig,
) -> None:
    from delivery.kernels.gpu.decode_attention import decode_attention

    kv_scales = scales["k_scale"], scales["v_scale"]
    decode_attention(q, k, v, table, contexts, out, scale, None, None, *kv_scales, config)


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "decode": decode,
    "prefill": prefill,
    "fused": fused,
    "candidates": candidates,
}
USUAL = ("decode", "prefill", "fused")
LARGEST_ERROR = 3e-2


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the rows asked for; 1 if one of them is wrong by more than LARGEST_ERROR."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: {' '.join(USUAL)}")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown section {min(unknown)!r}; known: {', '.join(SECTIONS)}")
    torch.manual_seed(1)
    rows = []
    for section in options.sections or USUAL:
        for measured in SECTIONS[section]():
            print(measured.text(), flush=True)
            rows.append(measured)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", "utf-8")
    wrong = [r for r in rows if not r.error <= LARGEST_ERROR]
    for r in wrong:
        print(f"wrong: {r.op} {r.cell}: relative error {r.error:.1e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
