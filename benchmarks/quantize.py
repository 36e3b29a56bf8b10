"""Seconds per decoder layer, peak memory and layer error of the quantisers, on one device.

    python3 benchmarks/quantize.py                      Llama-3-8B layers, 128 x 512 tokens, on a GPU
    python3 benchmarks/quantize.py --tiny               a small shape, to try the script on a CPU
    python3 benchmarks/quantize.py --only awq gptq      some of the methods

Weights are random, in bfloat16, in host memory, as a checkpoint's would be; hidden states have channels
of very different size and the norms a few large ones, since that is what the searches are about. Time
counts everything that a layer costs: loading it, running it float, searching, rounding, running it
quantised. The first layer warms up and is left out. Needs torch, safetensors and numpy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from delivery.model import DenseAttention, StateDict, block, load_block, load_config
from delivery.model.config import ModelConfig
from delivery.quantization.block_search import search_block
from delivery.quantization.driver import Driver, Planned
from delivery.quantization.group_size import GroupSizes
from delivery.quantization.measure import output_error
from delivery.quantization.observe import watch_inputs
from delivery.quantization.options import Options
from delivery.quantization.running import in_dtype, quantized_block
from delivery.quantization.scheme import load_scheme
from delivery.quantization.stream import CHUNK_TOKENS, Piece, Stream
from delivery.quantization.work import BlockWork

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "hidden_act": "silu",
}
TINY = {**LLAMA_3_8B, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512}  # fmt: skip

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "rtn": ("rtn-w4a16", {}),
    "awq": ("awq-w4a16", {}),
    "awq20": ("awq-w4a16", {"points": 20, "duo": "off"}),
    "awq+clip": ("awq-w4a16", {"clip": True}),
    "awq+clip+gptq": ("awq-w4a16", {"clip": True, "rounding": "gptq"}),
    "gptq": ("gptq-w4a16", {}),
    "gptq+clip": ("gptq-w4a16", {"clip": True}),
    "smoothquant": ("smoothquant-int8", {}),
    "smoothquant+search": ("smoothquant-int8", {"search_scale": True}),
    "fp8": ("smoothquant-fp8", {}),
}
TARGET_S = {"awq": 1.0, "awq20": 1.0, "gptq": 1.0, "smoothquant": 0.3}


@dataclass
class Clock:
    """Seconds by phase; waits for the device at both ends of each."""

    device: torch.device
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self.now()
        yield
        self.seconds.setdefault(name, []).append(self.now() - start)


class Timed(Driver):
    """A driver that tells how long its parts take; the rest of a layer is the search and the rounding."""

    clock: Clock

    def _observe(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("float pass + statistics"):
            return super()._observe(*args, **kwargs)

    def _advance(self, *args: Any, **kwargs: Any) -> float:
        with self.clock.phase("quantised pass"):
            return super()._advance(*args, **kwargs)


def random_layers(shape: dict[str, Any], layers: int, home: torch.device) -> StateDict:
    """Random weights in bfloat16; eight channels of every norm are large."""
    h, i, d = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * d, shape["num_key_value_heads"] * d
    random = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {"model.embed_tokens.weight": torch.zeros(1, h, dtype=torch.bfloat16)}
    sizes = {"self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
             "self_attn.o_proj": (h, q), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h),
             "mlp.down_proj": (h, i)}  # fmt: skip
    for n in range(layers):
        at = f"model.layers.{n}"
        for name, (rows, columns) in sizes.items():
            weight = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(generator=random)
            tensors[f"{at}.{name}.weight"] = weight.mul_(columns**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weight = torch.rand(h, generator=random) * 0.5 + 0.2
            weight[:: max(h // 8, 1)] *= 12
            tensors[f"{at}.{name}.weight"] = weight.to(torch.bfloat16)
    return StateDict({name: tensor.to(home) for name, tensor in tensors.items()})


def random_stream(shape: dict[str, Any], samples: int, length: int, device: torch.device) -> Stream:
    """Hidden states [T, H] in bfloat16, kept on the device."""
    h = shape["hidden_size"]
    random = torch.Generator(device.type).manual_seed(1)
    spread = torch.empty(h, device=device).normal_(generator=random).mul_(0.7).exp_()
    per_piece = max(1, CHUNK_TOKENS.get(device.type, 1024) // length)
    pieces = []
    for start in range(0, samples, per_piece):
        count = min(per_piece, samples - start)
        hidden = torch.empty(count * length, h, device=device).normal_(generator=random) * spread
        lengths = (length,) * count
        positions = torch.arange(length, device=device).repeat(count)
        pieces.append(Piece(hidden.to(torch.bfloat16), lengths, positions, DenseAttention(lengths)))
    return Stream(pieces, device, device)


def run(
    name: str, source: StateDict, config: ModelConfig, stream: Stream, dtype: torch.dtype
) -> dict[str, Any]:
    """One method over all layers."""
    scheme_name, settings = METHODS[name]
    scheme = load_scheme(scheme_name)
    options = Options(group_sizes=GroupSizes(), scale_dtype=torch.bfloat16, **settings)
    planned = {n: Planned(scheme, 128 if scheme.grouped else -1) for n in (*ATTENTION, *MLP)}
    driver = Timed(
        source, config, lambda _: planned, options, stream.copy(), device=stream.device, dtype=dtype
    )
    driver.clock = clock = Clock(stream.device)
    if stream.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    first = None
    for layer in range(config.num_layers):
        with clock.phase("layer"):
            result = driver.quantize_block(layer)
        # Only the figures are kept: a real run has written a layer's weights before it goes on.
        first = first or (result.errors, result.block_relative, result.notes)
        del result
    assert first is not None
    layer_errors, block_error, notes = first
    seconds = {phase: statistics.median(s[1:] or s) for phase, s in clock.seconds.items()}
    others = seconds["layer"] - sum(s for phase, s in seconds.items() if phase != "layer")
    errors = {e.canonical: round(e.relative_error, 5) for e in layer_errors}
    peak = torch.cuda.max_memory_allocated() / 2**30 if stream.device.type == "cuda" else float("nan")
    return {
        "method": name,
        "s_per_layer": round(seconds["layer"], 4),
        "target_s": TARGET_S.get(name),
        "phases_s": {p: round(s, 4) for p, s in seconds.items() if p != "layer"}
        | {"load, search, rounding": round(others, 4)},
        "peak_gib": round(peak, 2),
        "block_error_layer_0": round(block_error or 0.0, 6),
        "linear_errors_layer_0": errors,
        "notes": notes,
    }


def reference(source: StateDict, config: ModelConfig, stream: Stream, dtype: torch.dtype) -> dict[str, Any]:
    """The block-output search of the AWQ paper on layer 0: 20 ratios, asymmetric, group 128."""
    clock = Clock(stream.device)
    if stream.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    options = Options(group_sizes=GroupSizes(), scale_dtype=torch.bfloat16)
    with torch.no_grad(), clock.phase("layer"):
        loaded = load_block(source, config, 0, stream.device)
        work = BlockWork(config, 0, loaded, dict.fromkeys((*ATTENTION, *MLP), 128), options)
        running = in_dtype(loaded, dtype)
        watched, watches = watch_inputs(running, work.groups, stream.device, with_gram=False)
        for piece, hidden in stream.run():
            block(config, 0, watched, hidden, piece.positions, piece.mixer)
        work.statistics = {key: watch.statistics for key, watch in watches.items()}
        search_block(work, running, stream)
    quantized = quantized_block(loaded, work, dtype)
    lost = total = 0.0
    with torch.no_grad():
        for piece, hidden in stream.run():
            args = (hidden, piece.positions, piece.mixer)
            error, size = output_error(block(config, 0, quantized, *args), block(config, 0, running, *args))
            lost, total = lost + error, total + size
            if sum(map(len, [piece.lengths])) * piece.lengths[0] >= 4096:
                break
    peak = torch.cuda.max_memory_allocated() / 2**30 if stream.device.type == "cuda" else float("nan")
    return {
        "method": "reference: block-output search",
        "s_per_layer": round(clock.seconds["layer"][0], 4),
        "peak_gib": round(peak, 2),
        "block_error_layer_0": round((lost / total) ** 0.5, 6),
    }


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tiny", action="store_true", help="a small shape")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--resident", action="store_true", help="weights on the device from the start")
    parser.add_argument("--only", nargs="*", choices=[*METHODS, "reference"])
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = {**(TINY if args.tiny else LLAMA_3_8B), "num_hidden_layers": args.layers}
    samples, length = args.samples or (8 if args.tiny else 128), args.length or (64 if args.tiny else 512)
    config = load_config(shape)
    source = random_layers(shape, args.layers, device if args.resident else torch.device("cpu"))
    stream = random_stream(shape, samples, length, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {samples} x {length} tokens, {args.layers} layers", flush=True)
    if dtype == torch.float32:
        for piece in stream.pieces:
            piece.hidden = piece.hidden.float()
    wanted = args.only or [*METHODS, "reference"]
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        n: lambda n=n: run(n, source, config, stream, dtype) for n in METHODS
    }
    calls["reference"] = lambda: reference(source, config, stream, dtype)
    rows = []
    for method in wanted:
        rows.append(calls[method]())
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
