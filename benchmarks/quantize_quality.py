"""What each way of quantising costs in quality: perplexity, KL and top-1 on held-out text, mean layer SQNR.

    python benchmarks/quantize_quality.py CHECKPOINT                    all rows; minutes on a GPU
    python benchmarks/quantize_quality.py CHECKPOINT --only rtn awq     some; results are kept, so it goes on
    python benchmarks/quantize_quality.py CHECKPOINT --print            the table as Markdown, nothing is run

All rows are computed in float32 from the same token ids: calibration text (16 x 256 tokens of both built-in
corpora, unless the row says otherwise) and held-out windows of 256 tokens. The built-in corpora depend on the
machine, so the ids are written beside the results (`--tokens`) and read back where they are there already.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from delivery.checkpoint import Checkpoint
from delivery.corpus import parse, render
from delivery.corpus.reading import documents
from delivery.model import (
    BlockWeights,
    ModelConfig,
    block,
    embed,
    final_logits,
    load_block,
    load_config,
    load_ends,
)
from delivery.quantization.driver import Driver, Planned
from delivery.quantization.group_size import GroupSizes
from delivery.quantization.options import Options
from delivery.quantization.running import in_dtype, quantized_block
from delivery.quantization.scheme import load_scheme
from delivery.quantization.stream import Stream

CORPORA = ("legal", "technical")
MIX = "legal,technical"
DEMO = {"clip": True, "rounding": "gptq"}

ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "rtn": ("rtn-w4a16", {}, MIX),
    "awq": ("awq-w4a16", {}, MIX),
    "awq + clip": ("awq-w4a16", {"clip": True}, MIX),
    "gptq": ("gptq-w4a16", {}, MIX),
    "gptq + clip": ("gptq-w4a16", {"clip": True}, MIX),
    "awq + clip + gptq rounding": ("awq-w4a16", DEMO, MIX),
    "the same, calibrated on legal": ("awq-w4a16", DEMO, "legal"),
    "the same, calibrated on technical": ("awq-w4a16", DEMO, "technical"),
    "the same, symmetric": ("awq-w4a16", {**DEMO, "symmetric": True}, MIX),
    "the same, groups of 32": ("awq-w4a16", {**DEMO, "group_sizes": GroupSizes(32, 32)}, MIX),
    "w8a16": ("w8a16", {}, MIX),
    "smoothquant int8": ("smoothquant-int8", {}, MIX),
    "smoothquant int8, searched": ("smoothquant-int8", {"search_scale": True}, MIX),
    "smoothquant fp8": ("smoothquant-fp8", {}, MIX),
    "fp8 dynamic": ("fp8-dynamic", {}, MIX),
}


@dataclass(frozen=True, slots=True)
class Model:
    """The float model on its device, its blocks in float32."""

    checkpoint: Checkpoint
    config: ModelConfig
    device: torch.device
    ends: Any
    blocks: list[BlockWeights]

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Model:
        checkpoint = Checkpoint.open(path)
        config = load_config(checkpoint.config)
        ends = load_ends(checkpoint, config, device, torch.float32)
        layers = range(config.num_layers)
        blocks = [in_dtype(load_block(checkpoint, config, i, device), torch.float32) for i in layers]
        return cls(checkpoint, config, device, ends, blocks)

    def stream(self, samples: list[list[int]]) -> Stream:
        return Stream.start(samples, lambda ids: embed(self.config, self.ends.table, ids), self.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return final_logits(self.config, self.ends.norm, self.ends.head, hidden).float()

    @torch.no_grad()
    def hidden(self, blocks: list[BlockWeights], samples: list[list[int]]) -> list[torch.Tensor]:
        """Hidden states behind the last block, [T, H] a sample."""
        found: list[torch.Tensor] = []
        for piece, state in self.stream(samples).run():
            for layer, weights in enumerate(blocks):
                state = block(self.config, layer, weights, state, piece.positions, piece.mixer)
            found += state.split(list(piece.lengths))
        return found


@torch.no_grad()
def compare(
    model: Model, blocks: list[BlockWeights], held: dict[str, list[list[int]]], source: dict[str, Any]
) -> Any:
    """Per corpus: perplexity, KL(source || quantised) in nats a token, share of equal top-1 tokens."""
    out = {}
    for name, samples in held.items():
        nll = kl = same = count = 0.0
        for ids, ours, theirs in zip(samples, model.hidden(blocks, samples), source[name], strict=True):
            log_p, log_q = model.logits(theirs[:-1]).log_softmax(-1), model.logits(ours[:-1]).log_softmax(-1)
            targets = torch.tensor(ids[1:], device=model.device)
            nll -= float(log_q.gather(1, targets[:, None]).sum())
            kl += float((log_p.exp() * (log_p - log_q)).sum())
            same += float((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            count += len(targets)
        out[name] = {"perplexity": math.exp(nll / count), "kl_nats": kl / count, "top1": same / count}
    return out


def quantized(
    model: Model, row: str, samples: list[list[int]], layers: int
) -> tuple[list[BlockWeights], float]:
    """The blocks of one row, and the mean SQNR of their layers in dB."""
    scheme_name, settings, _ = ROWS[row]
    scheme = load_scheme(scheme_name)
    dtype = torch.bfloat16 if model.config.dtype == "bfloat16" else torch.float16
    options = Options(**{"group_sizes": GroupSizes(64, 64), "scale_dtype": dtype, **settings})
    size = options.group_sizes.mlp if scheme.grouped else -1
    plan = {name: Planned(scheme, size) for name in model.blocks[0].linears}
    driver = Driver(
        model.checkpoint, model.config, lambda _: plan, options, model.stream(samples), device=model.device
    )
    blocks, errors = [], []
    for layer in range(layers):
        result = driver.quantize_block(layer)
        errors += [e.sqnr_db for e in result.errors]
        loaded = load_block(model.checkpoint, model.config, layer, model.device)
        blocks.append(quantized_block(loaded, result.work, torch.float32))
    return blocks + model.blocks[layers:], sum(errors) / len(errors)


def token_ids(path: Path, checkpoint: Checkpoint, windows: int, length: int) -> dict[str, Any]:
    """Calibration samples by corpus and held-out windows by corpus; from the file where it is there."""
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return found
    tokenizer = checkpoint.tokenizer()
    calibration = {
        spec: [list(s.token_ids) for s in render(spec, tokenizer, 16, 256).samples]
        for spec in sorted({spec for _, _, spec in ROWS.values()})
    }
    held = {}
    for source in parse(",".join(CORPORA)):
        ids: list[int] = []
        for document in documents(source, "heldout", 0):
            ids += tokenizer.encode(document.text)
            if len(ids) >= windows * length:
                break
        held[source.label] = [
            ids[i : i + length] for i in range(0, windows * length, length) if len(ids) > i + 1
        ]
    path.write_text(json.dumps({"calibration": calibration, "held": held}), "utf-8")
    return {"calibration": calibration, "held": held}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, in the order in which rows are defined."""
    order = ["float", *ROWS]
    ordered = sorted(rows, key=lambda r: order.index(r["row"]))
    base = next((r for r in ordered if r["row"] == "float"), None)
    columns = [f"{c} {what}" for c in CORPORA for what in ("ppl", "ratio", "KL", "top-1")]
    lines = ["| | " + " | ".join(columns) + " | SQNR, dB |", "|---" * (len(columns) + 2) + "|"]
    for row in ordered:
        cells = []
        for corpus in CORPORA:
            q = row["corpora"][corpus]
            ratio = q["perplexity"] / base["corpora"][corpus]["perplexity"] if base else math.nan
            cells += [f"{q['perplexity']:.2f}", f"{ratio:.3f}", f"{q['kl_nats']:.3f}", f"{q['top1']:.3f}"]
        sqnr = "" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}"
        lines.append(f"| {row['row']} | " + " | ".join(cells) + f" | {sqnr} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--out", type=Path, default=Path("quantize_quality.jsonl"), help="results, added to")
    parser.add_argument("--tokens", type=Path, default=Path("quantize_quality_tokens.json"))
    parser.add_argument("--windows", type=int, default=32, help="held-out windows per corpus, at most")
    parser.add_argument("--layers", type=int, help="quantise the first layers only, to try the script")
    parser.add_argument("--print", action="store_true", help="print the table of what is there")
    args = parser.parse_args()
    rows = (
        [json.loads(line) for line in args.out.read_text("utf-8").splitlines()] if args.out.is_file() else []
    )
    if args.print:
        print(table(rows))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model.load(args.checkpoint, device)
    tokens = token_ids(args.tokens, model.checkpoint, args.windows, 256)
    held = {name: windows[: args.windows] for name, windows in tokens["held"].items()}
    source = {name: model.hidden(model.blocks, samples) for name, samples in held.items()}

    def measure(row: str, make: Callable[[], tuple[list[BlockWeights], float | None]]) -> None:
        if any(r["row"] == row for r in rows):
            return
        start = time.perf_counter()
        blocks, sqnr = make()
        seconds = time.perf_counter() - start
        found = compare(model, blocks, held, source)
        rows.append({"row": row, "corpora": found, "sqnr_db": sqnr, "quantize_s": round(seconds, 2)})
        with args.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**rows[-1], "device": device.type}) + "\n")
        print(json.dumps(rows[-1]), flush=True)

    measure("float", lambda: (model.blocks, None))
    for row in args.only:
        samples = tokens["calibration"][ROWS[row][2]]
        measure(row, partial(quantized, model, row, samples, args.layers or model.config.num_layers))
    print(table(rows))


if __name__ == "__main__":
    main()
