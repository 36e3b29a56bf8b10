"""AWQ's search as the paper does it: run the block for every candidate (arXiv:2306.00978, section 3.2).

The reference that the search over Gram matrices is compared with: tokens · N · K operations a
candidate, and all activations of a block in memory. Same candidates, same grid, same moves of scales;
only the score differs: the squared error of the output of the module that holds the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.nn import functional

from delivery.model.attention import DenseAttention
from delivery.model.config import ModelConfig
from delivery.model.decoder import gated
from delivery.model.weights import BlockWeights, Linear, Projection
from delivery.quantization.awq import candidate
from delivery.quantization.grid import Grid, round_to_grid
from delivery.quantization.inputs import InputGroup
from delivery.quantization.stream import Stream
from delivery.quantization.work import BlockWork

_QKV = ("q_proj", "k_proj", "v_proj")


def why_not(config: ModelConfig, layer: int) -> str | None:
    """Why a block is none of norm, attention, norm and MLP; None for one that is."""
    if config.layer_types[layer] == "linear_attention":
        return "its mixer is a gated delta rule"
    if config.moe is not None and layer in config.moe.layers:
        return "its MLP is a mixture of experts"
    if config.attention_gate:
        return "its attention has an output gate"
    return "its modules' outputs pass another norm" if config.sandwich_norms else None


@torch.no_grad()
def search_block(work: BlockWork, weights: BlockWeights, stream: Stream, points: int = 20) -> None:
    """Choose and move the scales of a dense attention-and-MLP block by running it, then round its layers.

    work: with statistics of the float block (L2 per channel); changed in place and finished.
    weights: the float block in the dtype that it runs in.
    Raises ValueError for a block of another kind, before anything is changed.
    """
    if reason := why_not(work.config, work.layer):
        raise ValueError(f"block {work.layer} cannot be searched by running its modules: {reason}")
    inputs = _module_inputs(work.config, work.layer, weights, stream)
    for group in sorted(work.groups, key=lambda g: g.norm is not None):
        if work.movable(group):
            work.move(group, _best(work, group, inputs, points))
    for group in work.groups:
        for name in work.active(group):
            layer = work.layers[name]
            work.finish(name, round_to_grid(layer.weight, work.options.grid(layer.group_size)))


def _best(
    work: BlockWork, group: InputGroup, inputs: Mapping[str, list[_Input]], points: int
) -> torch.Tensor:
    importance = work.statistics[group.key].l2()
    best_loss, best = float("inf"), torch.ones_like(importance)
    module = "attention" if group.key == "q_proj" else "mlp" if group.key == "gate_proj" else group.key
    width = work.layers[group.key].group_size
    originals = {n: work.layers[n].weight for n in group.linears}
    reference = [_run(work, module, originals, x) for x in inputs[module]]
    for step in range(points):
        scale = work.tied(group, candidate(importance, step / points, None))
        rounded = {n: _rounded(w, scale, work.options.grid(width)) for n, w in originals.items()}
        loss = 0.0
        for x, expected in zip(inputs[module], reference, strict=True):
            out = _run(work, module, rounded, x)
            loss += float((out - expected).float().square().sum(dtype=torch.float64))
        if loss < best_loss:
            best_loss, best = loss, scale
    return best


def _rounded(weight: torch.Tensor, scale: torch.Tensor, grid: Grid) -> torch.Tensor:
    return round_to_grid(weight * scale, grid).dequantize() / scale


class _Input:
    """What a module reads for one piece of the stream, and what attention needs beside it."""

    def __init__(self, x: torch.Tensor, positions: torch.Tensor, mixer: DenseAttention) -> None:
        self.x = x
        self.positions = positions
        self.mixer = mixer


def _module_inputs(
    config: ModelConfig, layer: int, weights: BlockWeights, stream: Stream
) -> dict[str, list[_Input]]:
    found: dict[str, list[_Input]] = {"attention": [], "o_proj": [], "mlp": [], "down_proj": []}
    for piece, hidden in stream.run():

        def keep(module: str, x: torch.Tensor, p: object = piece) -> None:
            found[module].append(_Input(x, p.positions, p.mixer))  # type: ignore[attr-defined]

        x = weights.norms["input_norm"](hidden)
        keep("attention", x)
        mixed = _mix(config, layer, weights.linears, weights.norms, found["attention"][-1])
        keep("o_proj", mixed)
        hidden = hidden + weights.linears["o_proj"](mixed)
        x = weights.norms["pre_mlp_norm"](hidden)
        keep("mlp", x)
        keep("down_proj", gated(config.activation, weights.project(("gate_proj", "up_proj"), x)))
    return found


def _mix(
    config: ModelConfig, layer: int, linears: Mapping[str, object], norms: Mapping[str, object], at: _Input
) -> torch.Tensor:
    q, k, v = (linears[n](at.x).unflatten(-1, (-1, config.head_dim)) for n in _QKV)  # type: ignore[operator]
    return at.mixer.attention(config, layer, q, k, v, at.positions, norms)


def _run(work: BlockWork, module: str, weights: Mapping[str, torch.Tensor], at: _Input) -> torch.Tensor:
    """The module's output with some of its weights replaced, in the dtype of its input."""

    def linear(name: str) -> Linear:
        layer = work.layers[name]
        weight = weights.get(name, layer.weight)
        bias = None if layer.bias is None else layer.bias.to(at.x.dtype)
        return replace(layer.source, weight=weight.to(at.x.dtype), bias=bias)

    if module == "attention":
        linears = {n: linear(n) for n in _QKV}
        return linear("o_proj")(_mix(work.config, work.layer, linears, work.source_norms, at))
    if module == "mlp":
        both = Projection((linear("gate_proj")(at.x), linear("up_proj")(at.x)))
        return linear("down_proj")(gated(work.config.activation, both))
    return functional.linear(at.x, weights[module].to(at.x.dtype))
