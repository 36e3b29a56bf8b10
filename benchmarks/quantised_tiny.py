"""A small checkpoint's linear layers in 4 or 8 bits, and the float checkpoint that means the same."""

from __future__ import annotations

from pathlib import Path

import torch

from delivery.checkpoint import Checkpoint, CheckpointWriter
from delivery.formats import load_format
from delivery.kernels.row_quant import quantize_rows
from delivery.qtensor import QTensor

GROUP = 64
KINDS = ("w4", "w8")


def rounded(weight: torch.Tensor, kind: str) -> QTensor:
    """weight [N, K] on the grid of `kind`: 4 bits in groups with zero points, or 8 bits a row."""
    if kind == "w8":
        values, scale = quantize_rows(weight.float(), torch.int8)
        return QTensor(values, scale, None, -1, 8)
    pieces = weight.float().unflatten(1, (-1, GROUP))
    low, high = pieces.amin(-1).clamp(max=0), pieces.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6).half()
    zero = (-low / scale).round().clamp(0, 15)
    values = (pieces / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return QTensor(values.flatten(1).to(torch.uint8), scale, zero.to(torch.uint8), GROUP, 4)


def write_both(source: Path, quantised: Path, plain: Path, kind: str) -> None:
    """Write `source` with its decoder's linear layers quantised, and with what those are worth in bf16."""
    checkpoint, stored = Checkpoint.open(source), load_format("compressed-tensors")
    layers: dict[str, QTensor | None] = {"lm_head": None}
    with CheckpointWriter(quantised) as packed, CheckpointWriter(plain) as dense:
        for name in checkpoint.names():
            tensor = checkpoint.tensor(name)
            prefix = name.removesuffix(".weight")
            linear = "layers." in name and tensor.ndim == 2 and name.endswith("proj.weight")
            expert = ".experts." in name and name.endswith(".weight")
            if not (linear or expert):
                packed.add(name, tensor)
                dense.add(name, tensor)
                layers |= {prefix: None} if tensor.ndim == 2 else {}
                continue
            layer = rounded(tensor, kind)
            layers[prefix] = layer
            for part, value in stored.pack(prefix, layer).items():
                packed.add(part, value)
            dense.add(name, layer.dequantize(tensor.dtype))
        dense.finish(checkpoint.config)
        packed.finish(checkpoint.config | {"quantization_config": stored.quantization_config(layers)})
