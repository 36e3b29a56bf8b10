"""Linear layers of the Llama-3-8B shape on the card, beside the figures of other engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_checks import Check, check_operators, in_processes, relative_error
from gpu_timing import copies_for, graph_us

from delivery.errors import EnvironmentLacking
from delivery.kernels import linear_w4a16, linear_w8a8, linear_w16a16
from delivery.kernels.row_quant import quantize_rows
from delivery.kernels.tuning import Choice, TuningTable, burden
from delivery.kernels.w4_layout import PackedW4
from delivery.kernels.w8_layout import PackedW8

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Name → (N, K)."""
ROWS = (1, 4, 16, 64, 256, 2048)
OPERATORS = (
    "linear_w4a16",
    "linear_w8a8",
    "linear_w8a16",
    "linear_w16a16",
    "quantize_per_token",
    "quantize_per_channel",
    "fused_moe",
    "fused_moe_quant",
)


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of linear layer: its anchors' name, candidates, weights, and how to run a choice."""

    name: str
    key: str
    candidates: Callable[[int, int, int], Iterator[Choice]]
    weight: Callable[[int, int], Any]
    activations: Callable[[int, int], tuple[torch.Tensor, ...]]
    run: Callable[[tuple[torch.Tensor, ...], Any, Choice], torch.Tensor]
    exact: Callable[[tuple[torch.Tensor, ...], Any], torch.Tensor]
    tolerance: float


def _x(rows: int, k: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, k, device="cuda").bfloat16(),)


def _x8(dtype: torch.dtype) -> Callable[[int, int], tuple[torch.Tensor, ...]]:
    return lambda rows, k: quantize_rows(torch.randn(rows, k, device="cuda"), dtype)


def _w4(n: int, k: int) -> PackedW4:
    words = torch.randint(
        -(2**31), 2**31 - 1, (n // 256, k // 128, 128, 32), dtype=torch.int32, device="cuda"
    )
    scale = (torch.rand(k // 128, n, device="cuda") + 0.5).mul_(0.01).bfloat16()
    zero = torch.randint(0, 16, (k // 128, n), dtype=torch.uint8, device="cuda")
    return PackedW4(words, scale, zero, 128, (n, k))


def _w8(dtype: torch.dtype) -> Callable[[int, int], PackedW8]:
    return lambda n, k: PackedW8(*quantize_rows(torch.randn(n, k, device="cuda"), dtype))


def _family8(name: str, dtype: torch.dtype) -> Family:
    return Family(
        name,
        "linear_w8a8_int8" if dtype == torch.int8 else "linear_w8a8_fp8",
        lambda n, k, rows: linear_w8a8.candidates(n, k, rows, dtype),
        _w8(dtype),
        _x8(dtype),
        lambda x, w, choice: linear_w8a8.run(x[0], w, None, choice, x[1]),
        lambda x, w: (x[0].double() * x[1].double()) @ w.dequantize(torch.float64).t(),
        6e-3,
    )


FAMILIES = {
    "w4a16": Family(
        "w4a16",
        "linear_w4a16",
        linear_w4a16.candidates,
        _w4,
        _x,
        lambda x, w, choice: linear_w4a16.run(x[0], w, None, choice),
        lambda x, w: linear_w4a16.reference(x[0].double(), w),
        8e-3,
    ),
    "w8a8int8": _family8("w8a8int8", torch.int8),
    "w8a8fp8": _family8("w8a8fp8", torch.float8_e4m3fn),
    "w16a16": Family(
        "w16a16",
        "linear_w16a16",
        linear_w16a16.candidates,
        lambda n, k: torch.randn(n, k, device="cuda").bfloat16(),
        _x,
        lambda x, w, choice: linear_w16a16.run(x[0], w, None, choice),
        lambda x, w: x[0].double() @ w.double().t(),
        4e-3,
    ),
}


def check() -> list[Check]:
    """The operators' own cases."""
    both = ("linear_w4a16", "linear_w16a16")
    found = check_operators(both)
    return found + check_operators([name for name in OPERATORS if name not in both], [torch.bfloat16])


def check_tiles(names: Sequence[str], rows: Sequence[int]) -> list[Check]:
    """Every tile that is a candidate, on a weight of many tiles; this also compiles it."""
    tasks = []
    for name in names:
        seen = set()
        for n, k in SHAPES.values():
            for m in rows:
                for choice in FAMILIES[name].candidates(n, k, m):
                    if choice.tile is None:
                        continue
                    t = choice.tile
                    kind = (
                        t.block_n,
                        t.block_m,
                        t.warps,
                        t.stages,
                        t.splits > 1,
                        t.scale_weights,
                        t.group_m,
                    )
                    if kind not in seen:
                        seen.add(kind)
                        tasks.append((name, m, choice))
    return in_processes(_check_tile, tasks)


def _check_tile(task: tuple[str, int, Choice]) -> Check:
    name, rows, choice = task
    family = FAMILIES[name]
    label = f"{name} M={rows} {describe(choice)}"
    try:
        # More tiles than run at once, so that programs take several.
        n, k = (65536 if rows <= 64 else 16384), 1024
        weight, x = family.weight(n, k), family.activations(rows, k)
        for _ in range(3):  # a counter left behind by one launch would spoil the next
            got = family.run(x, weight, choice)
        return Check(label, relative_error(got, family.exact(x, weight)), family.tolerance)
    except Exception as failure:
        return Check(label, float("inf"), family.tolerance, f"{type(failure).__name__}: {failure}"[:200])


def describe(choice: Choice) -> str:
    """A choice in a few characters."""
    t = choice.tile
    if t is None:
        return choice.backend
    scaled = "w" if t.scale_weights else "a"
    return f"{choice.backend}[{t.block_n}x{t.block_m} {t.warps}w {t.stages}s k{t.splits} {scaled}]"


def bytes_moved(family: str, n: int, k: int, rows: int) -> float:
    """Weights (with scales), activations and results, each once."""
    weight = {"w4a16": n * k / 2 + n * k / 128 * 3, "w16a16": 2 * n * k}.get(family, n * k + 4 * n)
    per_x = 2 if family in ("w4a16", "w16a16") else 1
    return weight + rows * (k * per_x + n * 2)


def measure_shape(
    name: str, shape: str, rows: Sequence[int], choices: Callable[[int], Sequence[Choice]] | None = None
) -> Iterator[dict[str, Any]]:
    """One row a candidate: op, impl, shape, M, us, gbs, tflops."""
    family = FAMILIES[name]
    n, k = SHAPES[shape]
    weights = [family.weight(n, k) for _ in range(copies_for(int(bytes_moved(name, n, k, 1))))]
    for m in rows:
        x = family.activations(m, k)
        listed = list(family.candidates(n, k, m)) if choices is None else choices(m)
        for choice in listed:
            try:
                taken = graph_us(
                    [lambda w=w, x=x, c=choice: family.run(x, w, c) for w in weights],
                    launches=12 if m <= 256 else 4,
                    replays=7,
                )
            except (RuntimeError, EnvironmentLacking) as failure:
                yield {
                    "op": name,
                    "impl": describe(choice),
                    "shape": shape,
                    "M": m,
                    "problem": str(failure)[:100],
                }
                continue
            yield {
                "op": name,
                "impl": describe(choice),
                "shape": shape,
                "M": m,
                "us": round(taken, 2),
                "gbs": round(bytes_moved(name, n, k, m) / taken / 1e3),
                "tflops": round(2e-6 * n * k * m / taken, 1),
                "choice": choice,
            }


def without_overlap(best: dict[tuple[str, str, int], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The best 4-bit rows again, no launch reading weights before the one in front of it has ended."""
    for (op, shape, m), row in best.items():
        if op == "w4a16" and m <= 64:
            n, k = SHAPES[shape]
            weights = [replace(_w4(n, k), resident=False) for _ in range(copies_for(n * k // 2))]
            x = _x(m, k)
            calls = [lambda w=w, x=x, c=row["choice"]: FAMILIES["w4a16"].run(x, w, c) for w in weights]
            yield {**row, "impl": row["impl"] + " alone", "us": round(graph_us(calls, launches=12), 2)}


def measure_quantize() -> Iterator[dict[str, Any]]:
    """Per-token quantisation of bf16 rows to int8."""
    from delivery.kernels.quantize_per_token import OP

    for m in (1, 64, 256, 2048, 8192):
        for k in (4096, 14336):
            inputs = [_x(m, k)[0] for _ in range(copies_for(2 * m * k))]
            calls = [lambda x=x: OP(x, torch.int8) for x in inputs]
            taken = graph_us(calls, launches=20)
            row = {"op": "quantize", "impl": "triton", "shape": str(k), "M": m, "us": round(taken, 2)}
            yield row | {"gbs": round(3 * m * k / taken / 1e3)}


def best_of(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The fastest row of each op, shape and M."""
    best: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in rows:
        key = row["op"], row["shape"], row["M"]
        if "us" in row and (key not in best or row["us"] < best[key]["us"]):
            best[key] = row
    return best


def table_of(rows: Sequence[dict[str, Any]]) -> TuningTable:
    """The tuning table that those measurements give, `burden` considered."""
    table = TuningTable()
    weighed = [row | {"us": row["us"] * burden(row["choice"], row["M"])} for row in rows if "us" in row]
    for (op, shape, m), row in best_of(weighed).items():
        table = table.with_choice(FAMILIES[op].key, *SHAPES[shape], m, row["choice"])
    return table
