"""Readers of quantised layouts written from their published descriptions, one element at a time.

Nothing here is shared with the packers under test: plain integers and loops.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

Tensors = Mapping[str, torch.Tensor]


def _words(tensor: torch.Tensor) -> np.ndarray:
    assert tensor.dtype == torch.int32
    return tensor.numpy().astype(np.int64) & 0xFFFFFFFF


def awq(tensors: Tensors, prefix: str) -> np.ndarray:
    """float64 [N, K]: (q − z) · s, column 8c + order[i] in nibble i of word c."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight, qzeros = _words(tensors[f"{prefix}.qweight"]), _words(tensors[f"{prefix}.qzeros"])
    scales = tensors[f"{prefix}.scales"].double().numpy()
    features, groups = qweight.shape[0], qzeros.shape[0]
    out = np.empty((qweight.shape[1] * 8, features))
    for k in range(features):
        g = k * groups // features
        for c in range(qweight.shape[1]):
            for i in range(8):
                n = 8 * c + order[i]
                q = int(qweight[k, c]) >> (4 * i) & 15
                z = int(qzeros[g, c]) >> (4 * i) & 15
                out[n, k] = (q - z) * scales[g, n]
    return out


def gptq(tensors: Tensors, prefix: str, bits: int, stored_less_one: bool) -> np.ndarray:
    """float64 [N, K]: words sequential along K; zero points sequential along N."""
    per_word, mask = 32 // bits, (1 << bits) - 1
    qweight, qzeros = _words(tensors[f"{prefix}.qweight"]), _words(tensors[f"{prefix}.qzeros"])
    scales = tensors[f"{prefix}.scales"].double().numpy()
    g_idx = tensors[f"{prefix}.g_idx"].numpy()
    outputs, features = qweight.shape[1], qweight.shape[0] * per_word
    out = np.empty((outputs, features))
    for n in range(outputs):
        for k in range(features):
            g = int(g_idx[k])
            q = int(qweight[k // per_word, n]) >> (bits * (k % per_word)) & mask
            z = int(qzeros[g, n // per_word]) >> (bits * (n % per_word)) & mask
            out[n, k] = (q - (z + 1 if stored_less_one else z)) * scales[g, n]
    return out


def packed(tensors: Tensors, prefix: str, bits: int) -> np.ndarray:
    """float64 [N, K] of compressed-tensors' pack-quantized: q + 2^(bits−1) along K, zero points along N."""
    per_word, mask, half = 32 // bits, (1 << bits) - 1, 1 << (bits - 1)
    words = _words(tensors[f"{prefix}.weight_packed"])
    rows, columns = (int(v) for v in tensors[f"{prefix}.weight_shape"])
    scales = tensors[f"{prefix}.weight_scale"].double().numpy()
    zeros = tensors.get(f"{prefix}.weight_zero_point")
    out = np.empty((rows, columns))
    for n in range(rows):
        for k in range(columns):
            g = k * scales.shape[1] // columns
            q = (int(words[n, k // per_word]) >> (bits * (k % per_word)) & mask) - half
            z = 0
            if zeros is not None:
                z = (int(_words(zeros)[n // per_word, g]) >> (bits * (n % per_word)) & mask) - half
            out[n, k] = (q - z) * scales[n, g]
    return out


def scaled(tensors: Tensors, weight: str, scale: str, block: int = 0) -> np.ndarray:
    """float64 [N, K] of 8-bit weights with a scale per tensor, per row or per block."""
    values = tensors[weight].to(torch.float32).double().numpy()
    scales = tensors[scale].double().numpy()
    out = np.empty_like(values)
    for n in range(values.shape[0]):
        for k in range(values.shape[1]):
            at = (n // block, k // block) if block else (n if scales.size > 1 else 0)
            out[n, k] = values[n, k] * (scales if block else scales.reshape(-1))[at]
    return out
